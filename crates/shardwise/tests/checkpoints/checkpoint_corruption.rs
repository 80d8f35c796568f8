//! Corrupt and malicious checkpoints: detected wherever there is a checksum, and never worse than an error.
//!
//! `SHARDWISE_DAMAGE_CASES` sets the number of corrupted files (default 2000), `SHARDWISE_SEED` the first seed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::DType;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::checkpoint::{self, Format, SaveOptions, State, verify};
use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
use shardwise_test_suites::scratch::Scratch;
use shardwise_test_suites::settings::env_or;

/// Saves a small checkpoint of several files.
fn save(path: &Path, format: Format) {
    let (path, options) = (path.to_path_buf(), SaveOptions { format, ..SaveOptions::default() });
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        let rows = ChunkShardingSpec::over_ranks(0, [1, 2, 1])?;
        let mut entries = vec![
            ("a".to_string(), State::from(DTensor::randn((5, 4), &mesh, [Shard(0)])?)),
            ("b".to_string(), State::from(DTensor::randint(0..99, (4, 3), &mesh, [Shard(1)])?)),
            ("c".to_string(), State::from(DTensor::rand(7, &mesh, [Replicate])?)),
            ("d".to_string(), State::from(ShardedTensor::rand(rows, 6, DType::BF16, &mesh)?)),
        ];
        if format != Format::HuggingFace {
            entries.push(("step".to_string(), State::from(12)));
            entries.push(("names".to_string(), State::list(["x", "y"])));
        }
        checkpoint::save_with(&world, &path, &State::map(entries), &options)
    })
    .unwrap();
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn files(path: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(path).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

/// Opens, verifies and reads everything; returns whether a problem was found.
fn inspected(path: &Path) -> bool {
    let found = catch_unwind(AssertUnwindSafe(|| {
        let verification = verify(path, &|_| {});
        let unread = |catalog: &checkpoint::Catalog| catalog.tensors.keys().any(|key| catalog.read(key).is_err());
        !verification.is_intact() || verification.catalog.as_ref().is_none_or(unread)
    }));
    found.unwrap_or_else(|_| panic!("reading {} panicked", path.display()))
}

#[test]
fn corruption_is_found_by_checksums_and_is_only_ever_an_error() {
    let (cases, first) = (env_or("SHARDWISE_DAMAGE_CASES", 2000usize), env_or("SHARDWISE_SEED", 0usize) as u64);
    let scratch = Scratch::new("flips");
    let formats = [Format::Native, Format::HuggingFace, Format::Dcp];
    let mut found = [0; 3];
    for (i, &format) in formats.iter().enumerate() {
        let (good, bad) = (scratch.0.join(format!("good{i}")), scratch.0.join(format!("bad{i}")));
        save(&good, format);
        assert!(!inspected(&good), "{format:?} is whole");
        copy(&good, &bad);
        for case in 0..cases / formats.len() {
            let seed = first * 1_000_003 + case as u64;
            let mut rng = StdRng::seed_from_u64(seed);
            let all = files(&good);
            let file = &all[rng.random_range(0..all.len())];
            let mut bytes = std::fs::read(file).unwrap();
            let place = rng.random_range(0..bytes.len());
            let what = match rng.random_range(0..4) {
                0 => {
                    bytes.truncate(place);
                    format!("cut off at {place}")
                }
                _ => {
                    let flip = rng.random_range(1..=255u8);
                    bytes[place] ^= flip;
                    format!("byte {place} changed by {flip:#x}")
                }
            };
            let damaged = bad.join(file.file_name().unwrap());
            std::fs::write(&damaged, &bytes).unwrap();
            let is_found = inspected(&bad);
            found[i] += usize::from(is_found);
            // In the native format a checksum covers every byte.
            assert!(is_found || format != Format::Native, "seed {seed}: {what} in {}", file.display());
            std::fs::copy(file, &damaged).unwrap();
        }
    }
    println!(
        "{cases} damaged files from seed {first}: found {found:?} of {} each in {formats:?}",
        cases / formats.len()
    );
}

/// A safetensors file with this header followed by `bytes` bytes.
fn safetensors(header: &str, bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + bytes, 0);
    file
}

#[test]
fn malicious_files_are_rejected() {
    let scratch = Scratch::new("hostile");
    let refused = |name: &str, contents: &[u8], said: &str| {
        let path = scratch.0.join(name);
        std::fs::write(&path, contents).unwrap();
        let error = checkpoint::open(&path).map(drop).unwrap_err().to_string();
        assert!(error.contains(said), "{name}: {error}");
    };
    let tensor = |dtype: &str, shape: &str, range: &str| {
        format!("{{\"t\":{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{range}}}}}")
    };
    refused("huge.safetensors", &(1u64 << 60).to_le_bytes(), "a header of 1152921504606846976 bytes");
    refused("short.safetensors", b"abc", "3 bytes");
    refused("text.safetensors", &safetensors("not json", 0), "a JSON header");
    let overflow = tensor("F64", "[4611686018427387904,4]", "[0,0]");
    refused("overflow.safetensors", &safetensors(&overflow, 0), "as many bytes as the shape has");
    let outside = tensor("F32", "[4]", "[0,16]");
    refused("outside.safetensors", &safetensors(&outside, 8), "inside the file");
    let backwards = tensor("F32", "[0]", "[8,0]");
    refused("backwards.safetensors", &safetensors(&backwards, 8), "inside the file");
    refused("unknown.safetensors", &safetensors(&tensor("X9", "[0]", "[0,0]"), 0), "X9");
    let two = "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}";
    refused("shared.safetensors", &safetensors(two, 3), "a gap or an overlap");
    refused("longer.safetensors", &safetensors(&tensor("U8", "[2]", "[0,2]"), 5), "as the header says");

    // an index and a manifest that point out of the directory
    let place = scratch.0.join("index");
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("model.safetensors.index.json"), r#"{"weight_map":{"t":"../../etc/passwd"}}"#).unwrap();
    let error = checkpoint::open(&place).map(drop).unwrap_err().to_string();
    assert!(error.contains("../../etc/passwd") && error.contains("malicious"), "{error}");
    let place = scratch.0.join("manifest");
    save(&place, Format::Native);
    let manifest = std::fs::read_to_string(place.join("manifest.json")).unwrap();
    for (from, to) in [("part-00001.safetensors", "../x/part-1.safetensors"), ("part-00001.safetensors", "/etc/hosts")]
    {
        let sealed: serde_json::Value = serde_json::from_str(&manifest.replace(from, to)).unwrap();
        let content = serde_json::to_string(&sealed["content"]).unwrap();
        let text = format!(
            "{{\"format\":\"shardwise\",\"crc32\":{},\"content\":{content}}}",
            crc32fast::hash(content.as_bytes())
        );
        std::fs::write(place.join("manifest.json"), text).unwrap();
        let error = checkpoint::open(&place).map(drop).unwrap_err().to_string();
        assert!(error.contains("no such file") || error.contains("malicious"), "{to}: {error}");
    }
}
