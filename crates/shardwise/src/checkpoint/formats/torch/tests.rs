//! Handwritten `torch.save` files, valid and invalid.

use super::*;
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::catalogs::open::open;
use crate::checkpoint::formats::pickle::PickleWriter;
use crate::checkpoint::formats::zip::ZipWriter;
use crate::checkpoint::metadata::value::{Key, Value};

/// Opens a `torch.save` file with this pickle and a storage of six 16-bit elements.
fn opened(name: &str, byteorder: &[u8], fill: impl Fn(&mut PickleWriter)) -> Result<Catalog> {
    let mut pickle = PickleWriter::new();
    fill(&mut pickle);
    let mut bytes = Vec::new();
    let mut archive = ZipWriter::new(&mut bytes);
    archive.small("model/data.pkl", &pickle.finish())?;
    archive.small("model/byteorder", byteorder)?;
    let elements: Vec<u8> = (0..6i16).flat_map(i16::to_le_bytes).collect();
    archive.small("model/data/0", &elements)?;
    archive.finish()?;
    let path = std::env::temp_dir().join(format!("shardwise-torch-{name}-{}.pt", std::process::id()));
    std::fs::write(&path, bytes)?;
    let catalog = open(&path).and_then(|catalog| {
        for (key, tensor) in &catalog.tensors {
            assert_eq!(catalog.read(key)?.len(), tensor.bytes());
        }
        Ok(catalog)
    });
    // The catalog keeps the file open, so tests can read it after this.
    let _ = std::fs::remove_file(&path);
    catalog
}

fn tensor(pickle: &mut PickleWriter, first: i64, sizes: &[usize], strides: &[usize]) {
    pickle.global("torch._utils", "_rebuild_tensor_v2");
    pickle.begin_tuple();
    pickle.begin_tuple();
    pickle.text("storage");
    pickle.global("torch", "ShortStorage");
    pickle.text("0");
    pickle.text("cpu");
    pickle.int(6);
    pickle.end_tuple();
    pickle.persistent_id();
    pickle.int(first);
    pickle.sizes(sizes);
    pickle.sizes(strides);
    pickle.bool(false);
    pickle.begin_dict();
    pickle.end_dict();
    pickle.end_tuple();
    pickle.call();
}

type Fill<'a> = &'a dyn Fn(&mut PickleWriter);

fn dict(pickle: &mut PickleWriter, entries: &[(&str, Fill<'_>)]) {
    pickle.begin_dict();
    for (key, entry) in entries {
        pickle.text(key);
        entry(pickle);
    }
    pickle.end_dict();
}

#[test]
fn nested_state_is_flattened_and_tensors_are_located() {
    let catalog = opened("nested", b"little", |pickle| {
        dict(
            pickle,
            &[
                ("whole", &|p| tensor(p, 0, &[2, 3], &[3, 1])),
                ("turned", &|p| tensor(p, 0, &[3, 2], &[1, 3])),
                ("row", &|p| tensor(p, 3, &[3], &[1])),
                ("same", &|p| tensor(p, 5, &[4], &[0])),
                ("none", &|p| tensor(p, 0, &[0, 2], &[2, 1])),
                ("pair", &|p| p.value(&Value::Tuple(vec![Value::Int(1), Value::None]))),
                ("list", &|p| {
                    p.begin_list();
                    dict(p, &[("x", &|p| p.int(1))]);
                    p.none();
                    p.end_list();
                }),
                ("tuple", &|p| {
                    p.begin_tuple();
                    p.global("torch._utils", "_rebuild_parameter");
                    p.begin_tuple();
                    tensor(p, 1, &[], &[]);
                    p.bool(true);
                    p.none();
                    p.end_tuple();
                    p.call();
                    p.end_tuple();
                }),
            ],
        );
    });
    let catalog = catalog.unwrap();
    let places: Vec<_> = catalog.tensors.iter().map(|(key, t)| (key.as_str(), t.chunks[0].offset)).collect();
    let start = catalog.tensors["whole"].chunks[0].offset;
    let expected = [("none", 0), ("row", 6), ("same", 10), ("tuple.0", 2), ("turned", 0), ("whole", 0)];
    assert_eq!(places, expected.map(|(key, at)| (key, start + at)));
    assert_eq!(catalog.tensors["turned"].chunks[0].strides, Some(vec![1, 3]));
    assert!(catalog.tensors["whole"].chunks[0].crc32.is_some() && catalog.tensors["row"].chunks[0].crc32.is_none());
    let values: Vec<_> = catalog.values.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(values, ["list.0.x=1", "list.1=null", "pair={\"tuple\":[1,null]}"]);
    assert_eq!(catalog.paths["list.0.x"], [Key::Name("list".into()), Key::Index(0), Key::Name("x".into())]);
}

#[test]
fn tensors_outside_their_storage_are_refused() {
    let refused = |needed: &str, byteorder: &[u8], fill: Fill<'_>| {
        let error = opened("refused", byteorder, fill).unwrap_err().to_string();
        assert!(error.contains(needed), "{error}");
    };
    let one = |first: i64, sizes: &'static [usize], strides: &'static [usize]| {
        move |p: &mut PickleWriter| dict(p, &[("w", &|p| tensor(p, first, sizes, strides))])
    };
    refused("inside its storage", b"little", &one(0, &[7], &[1]));
    refused("inside its storage", b"little", &one(6, &[1], &[1]));
    refused("inside its storage", b"little", &one(i64::MAX, &[1], &[1]));
    refused("inside its storage", b"little", &one(0, &[2, 2], &[1 << 62, 1]));
    refused("memory can address", b"little", &one(0, &[1 << 40, 1 << 40], &[0, 0]));
    refused("unknown form", b"little", &one(-1, &[1], &[1]));
    refused("unknown form", b"little", &one(0, &[1], &[1, 1]));
    refused("big-endian", b"big", &one(0, &[1], &[1]));
    refused("a dict or list", b"little", &|p| tensor(p, 0, &[1], &[1]));
    refused("two entries", b"little", &|p| {
        dict(p, &[("a.b", &|p| p.int(1)), ("a", &|p| dict(p, &[("b", &|p| p.int(2))]))]);
    });
    // What is valid and cannot be read does not hinder the rest.
    let unreadable = |reason: &str, fill: Fill<'_>| {
        let catalog = opened("unreadable", b"little", fill).unwrap();
        assert!(catalog.unreadable.values().any(|found| found.contains(reason)), "{:?}", catalog.unreadable);
    };
    unreadable("in a storage of", &one(0, &[1 << 40], &[0]));
    unreadable("PosixPath", &|p| dict(p, &[("p", &|p| p.object("pathlib", "PosixPath"))]));
}

/// A long string and a list that many entries share: what is read stays in proportion to the length of the pickle.
#[test]
fn shared_objects_are_not_expanded_without_bound() {
    for shared_key in [true, false] {
        let mut pickle = b"\x80\x02}(X\x01\0\0\0k".to_vec();
        pickle.push(b'X');
        pickle.extend_from_slice(&200_000u32.to_le_bytes());
        pickle.resize(pickle.len() + 200_000, b'x');
        pickle.extend_from_slice(b"q\0");
        for i in 0..100_000u32 {
            if shared_key {
                pickle.extend_from_slice(b"h\0N");
            } else {
                pickle.push(b'X');
                pickle.extend_from_slice(&6u32.to_le_bytes());
                pickle.extend_from_slice(format!("{i:06}").as_bytes());
                pickle.extend_from_slice(b"h\0");
            }
        }
        pickle.extend_from_slice(b"u.");
        let mut bytes = Vec::new();
        let mut archive = ZipWriter::new(&mut bytes);
        archive.small("model/data.pkl", &pickle).unwrap();
        archive.finish().unwrap();
        let path = std::env::temp_dir().join(format!("shardwise-torch-shared-{}.pt", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        let outcome = open(&path);
        std::fs::remove_file(&path).unwrap();
        assert!(outcome.unwrap_err().to_string().contains("repeated too often"));
    }
}
