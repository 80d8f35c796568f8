//! GGUF files: every block type against what the `gguf` package reads of it, boxes at and inside block boundaries, and
//! damaged, truncated and hostile files.
//!
//! `tests/data/gguf/blocks*.gguf` were written by `tests/scripts/gguf_blocks.py`.

use std::path::{Path, PathBuf};

use shardwise::checkpoint::{
    self, Catalog, ConvertOptions, DiffOptions, ElementType, Format, StateLoadOptions, Value, convert, diff, verify,
};
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

const BLOCKS: [&str; 12] =
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"];

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf").join(name)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn read_box(catalog: &Catalog, key: &str, offsets: &[usize], sizes: &[usize]) -> Vec<f32> {
    let part = shardwise::TensorBox { offsets: offsets.to_vec(), sizes: sizes.to_vec() };
    floats(&catalog.read_box(key, &part).unwrap())
}

#[test]
fn every_block_type_expands_to_what_the_gguf_package_reads() {
    let (stored, plain) =
        (checkpoint::open(data("blocks.gguf")).unwrap(), checkpoint::open(data("blocks_f32.gguf")).unwrap());
    assert_eq!(stored.format, Format::Gguf);
    for name in BLOCKS {
        let (found, expected) = (floats(&stored.read(name).unwrap()), floats(&plain.read(name).unwrap()));
        assert_eq!(found.len(), 1024);
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            // Both compute in f32; only the order of the products of scales may differ.
            assert!((a - b).abs() <= 1e-6 * b.abs().max(1e-3), "{name}[{i}]: {a} and {b}");
        }
        let tensor = stored.tensor(name).unwrap();
        assert_eq!(
            (tensor.type_name().as_str(), tensor.element, &tensor.shape[..]),
            (name, ElementType::F32, &[2, 512][..])
        );
    }
    let numbers = |catalog: &Catalog, key: &str| {
        let (element, bytes) = (catalog.tensor(key).unwrap().element, catalog.read(key).unwrap());
        let tensor =
            candle_core::Tensor::from_raw_buffer(&bytes, element.dtype().unwrap(), &[15], &candle_core::Device::Cpu);
        tensor.unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
    };
    for name in ["F32", "F16", "BF16"] {
        assert_eq!(numbers(&stored, name), numbers(&plain, name), "{name}");
        assert_eq!(stored.tensor(name).unwrap().shape, [3, 5], "dimensions are stored in reverse");
    }
    assert_eq!(stored.tensor("BF16").unwrap().element, ElementType::BF16);
    assert_eq!(stored.tensor("I32").unwrap().shape, [1, 2, 3]);
    assert_eq!(stored.value("test.names").unwrap().to_string(), r#"["a","ä",""]"#);
    assert_eq!(stored.value("test.sizes").unwrap().to_string(), "[3,1,2]");
    assert_eq!(stored.value("test.flag").unwrap(), Value::Bool(true));
    assert_eq!(stored.value("test.epsilon").unwrap(), Value::Float(f64::from(1e-5f32)));
}

#[test]
fn boxes_of_quantized_tensors_are_those_of_the_whole() {
    let catalog = checkpoint::open(data("blocks.gguf")).unwrap();
    for name in BLOCKS {
        let whole = floats(&catalog.read(name).unwrap());
        for (offsets, sizes) in [
            ([0, 0], [2, 512]),
            ([1, 0], [1, 512]),
            ([0, 256], [2, 256]),
            ([0, 32], [2, 64]),
            ([0, 31], [2, 34]),
            ([1, 511], [1, 1]),
            ([0, 250], [2, 20]),
            ([0, 7], [1, 0]),
        ] {
            let expected: Vec<f32> = (offsets[0]..offsets[0] + sizes[0])
                .flat_map(|row| whole[row * 512 + offsets[1]..][..sizes[1]].to_vec())
                .collect();
            assert_eq!(read_box(&catalog, name, &offsets, &sizes), expected, "{name} {offsets:?} {sizes:?}");
        }
    }
}

/// Each rank reads the blocks that its columns touch; the report counts their bytes.
#[test]
fn a_rank_reads_the_blocks_of_its_shard() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let empty = DTensor::zeros((2, 512), DType::F32, &mesh, [Shard(1)])?;
        let template = checkpoint::State::map([("Q8_0", empty)]);
        let options = StateLoadOptions::default();
        let loaded = checkpoint::load_with(&world, data("blocks.gguf"), &template, &options)?;
        let (state, report) = (loaded.state, loaded.report);
        assert_eq!(report.bytes, 2 * 8 * 34, "half of the columns: 8 of 16 blocks of two rows");
        assert_eq!(report.unchecked, ["Q8_0"]);
        let catalog = checkpoint::open(data("blocks.gguf"))?;
        let local = state.tensor("Q8_0")?.to_local()?;
        let expected = read_box(&catalog, "Q8_0", &[0, 256 * world.rank()], &[2, 256]);
        assert_eq!(local.flatten_all()?.to_vec1::<f32>()?, expected);
        Ok(())
    })
    .unwrap();
}

#[test]
fn gguf_converts_verifies_and_compares_like_any_format() {
    let scratch = Scratch::new("gguf-convert");
    let native = scratch.0.join("native");
    let done = convert(data("blocks.gguf"), &native, &ConvertOptions::to(Format::Native), &|_| {}).unwrap();
    assert_eq!((done.tensors, done.left_out.len()), (16, 0));
    let (first, second) = (checkpoint::open(data("blocks.gguf")).unwrap(), checkpoint::open(&native).unwrap());
    assert!(diff(&first, &second, DiffOptions::default()).unwrap().is_empty());
    assert_eq!(second.value("test.names").unwrap(), first.value("test.names").unwrap());
    let verified = verify(data("blocks.gguf"), &|_| {});
    assert!(verified.is_intact() && verified.unknown_files.is_empty());
    assert_eq!((verified.verified, verified.without_checksum), (0, 16));
    // A directory with one GGUF file is that file; with two, a choice is needed.
    let directory = scratch.0.join("directory");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::copy(data("blocks.gguf"), directory.join("model.gguf")).unwrap();
    assert_eq!(checkpoint::open(&directory).unwrap().tensors.len(), 16);
    std::fs::copy(data("blocks.gguf"), directory.join("other.gguf")).unwrap();
    let error = checkpoint::open(&directory).unwrap_err().to_string();
    assert!(error.contains("model.gguf, other.gguf"), "{error}");
    // The name does not matter for a single file, the magic number does.
    std::fs::copy(data("blocks.gguf"), directory.join("weights")).unwrap();
    assert_eq!(checkpoint::open(directory.join("weights")).unwrap().format, Format::Gguf);
    let error = convert(&native, scratch.0.join("back"), &ConvertOptions::to(Format::Gguf), &|_| {}).unwrap_err();
    assert!(error.to_string().contains("only read"), "{error}");
}

/// Writes the parts of a GGUF file, so that a test can make any of them wrong.
struct Writer(Vec<u8>);

impl Writer {
    fn new(tensors: u64, values: u64) -> Self {
        Writer(b"GGUF".to_vec()).u32(3).u64(tensors).u64(values)
    }

    fn u32(mut self, n: u32) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn u64(mut self, n: u64) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn text(mut self, text: &str) -> Self {
        self = self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
        self
    }

    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let writer = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(writer, |writer, &n| writer.u64(n)).u32(kind).u64(offset)
    }

    fn data(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(32) + bytes, 0);
        self
    }

    fn byte(mut self, byte: u8) -> Self {
        self.0.push(byte);
        self
    }

    fn open(&self, scratch: &Scratch) -> Result<Catalog> {
        let path = scratch.0.join("hostile.gguf");
        std::fs::write(&path, &self.0).unwrap();
        checkpoint::open(path)
    }
}

#[test]
fn hostile_files_are_errors_that_say_what_is_wrong() {
    let scratch = Scratch::new("gguf-hostile");
    let of = |build: &dyn Fn(Writer) -> Writer, tensors: u64, values: u64| {
        build(Writer::new(tensors, values)).open(&scratch)
    };
    let good = of(&|w| w.tensor("a", &[32, 2], 8, 0).data(68), 1, 0).unwrap();
    assert_eq!(good.tensor("a").unwrap().shape, [2, 32]);
    let cases: Vec<(&str, Result<Catalog>)> = vec![
        ("does not begin with GGUF", Writer(b"GGUX".to_vec()).open(&scratch)),
        ("does not begin with GGUF", Writer(Vec::new()).open(&scratch)),
        ("version 77", Writer([&b"GGUF"[..], &77u32.to_le_bytes()].concat()).open(&scratch)),
        ("big-endian", Writer([&b"GGUF"[..], &3u32.to_be_bytes(), &[0; 16]].concat()).open(&scratch)),
        ("inside the file", of(&|w| w, u64::MAX, 0)),
        ("inside the file", of(&|w| w, 0, u64::MAX)),
        ("inside the file", of(&|w| w.u64(u64::MAX), 0, 1)),
        ("inside the file", of(&|w| w.text("k").u32(8).u64(1 << 60), 0, 1)),
        ("inside the file", of(&|w| w.text("k").u32(9).u32(4).u64(1 << 60).u32(1), 0, 1)),
        ("nested", of(&|w| (0..40).fold(w.text("k").u32(9), |w, _| w.u32(9).u64(1)), 0, 1)),
        ("a value of type 99", of(&|w| w.text("k").u32(99), 0, 1)),
        ("the boolean 7", of(&|w| w.text("k").u32(7).byte(7), 0, 1)),
        ("two values named \"k\"", of(&|w| w.text("k").u32(4).u32(1).text("k").u32(4).u32(1), 0, 2)),
        ("general.alignment 0", of(&|w| w.text("general.alignment").u32(4).u32(0), 0, 1)),
        ("general.alignment 12", of(&|w| w.text("general.alignment").u32(4).u32(12), 0, 1)),
        ("not UTF-8", of(&|w| w.u64(1).byte(0xff), 1, 0)),
        ("\"blk.0.x\" of type IQ2_XXS", of(&|w| w.tensor("blk.0.x", &[256], 16, 0).data(99), 1, 0)),
        ("\"a\" of type 4000", of(&|w| w.tensor("a", &[256], 4000, 0).data(99), 1, 0)),
        ("\"a\" of 5 dimensions", of(&|w| w.tensor("a", &[1, 1, 1, 1, 1], 0, 0).data(99), 1, 0)),
        ("whole blocks of 32", of(&|w| w.tensor("a", &[33], 8, 0).data(99), 1, 0)),
        ("whole blocks of 256", of(&|w| w.tensor("a", &[32, 8], 12, 0).data(999), 1, 0)),
        ("inside the file", of(&|w| w.tensor("a", &[32, 2], 8, 0).data(67), 1, 0)),
        ("inside the file", of(&|w| w.tensor("a", &[1 << 40, 1 << 40], 0, 0).data(64), 1, 0)),
        ("inside the file", of(&|w| w.tensor("a", &[32], 0, u64::MAX - 31).data(64), 1, 0)),
        ("a multiple of 32", of(&|w| w.tensor("a", &[4], 0, 8).data(64), 1, 0)),
        ("two tensors named", of(&|w| w.tensor("a", &[4], 0, 0).tensor("a", &[4], 0, 32).data(64), 2, 0)),
        ("do not overlap", of(&|w| w.tensor("a", &[16], 0, 0).tensor("b", &[4], 0, 32).data(64), 2, 0)),
    ];
    for (i, (needed, result)) in cases.into_iter().enumerate() {
        let error = result.map(|_| ()).expect_err(needed);
        assert!(error.to_string().contains(needed), "case {i}: {error} lacks {needed:?}");
        let is_typed = matches!(error.kind(), Some(ErrorKind::Damaged | ErrorKind::Unsupported));
        assert!(is_typed, "case {i}: {error}");
    }
}

/// Every prefix of a file is an error, never a panic.
#[test]
fn truncated_files_are_errors() {
    let scratch = Scratch::new("gguf-truncated");
    let bytes = std::fs::read(data("blocks.gguf")).unwrap();
    let path: &Path = &scratch.0.join("short.gguf");
    for length in (0..bytes.len()).step_by(13).chain([bytes.len() - 1]) {
        std::fs::write(path, &bytes[..length]).unwrap();
        // The last tensor may end before the padding does.
        if let Ok(catalog) = checkpoint::open(path) {
            assert!(length > bytes.len() - 32, "{length} of {} bytes", bytes.len());
            assert_eq!(catalog.tensors.len(), 16);
        }
    }
}
