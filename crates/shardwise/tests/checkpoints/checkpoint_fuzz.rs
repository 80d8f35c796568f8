//! Mutation fuzzing of every parser of checkpoint files: never a panic, a hang, or more memory than the files justify. The
//! outcome is an error or a readable checkpoint.
//!
//! `SHARDWISE_FUZZ_SECONDS` bounds the time per parser (default 2; hours find more), `SHARDWISE_SEED` sets the seed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::checkpoint::{self, ConvertOptions, Format, convert};
use shardwise_test_suites::settings::env_or;

/// Checkpoints that PyTorch and other tools have written.
fn samples() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/dcp")
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            let target = to.join(entry.file_name());
            std::fs::write(target, std::fs::read(entry.path()).unwrap()).unwrap();
        }
    }
}

/// Changes, removes, inserts, repeats or replaces some bytes.
fn mutate(rng: &mut StdRng, bytes: &mut Vec<u8>) {
    for _ in 0..rng.random_range(1..6) {
        let at = rng.random_range(0..=bytes.len());
        let length = rng.random_range(0..=16.min(bytes.len() - at));
        match rng.random_range(0..6) {
            0 if at < bytes.len() => bytes[at] = rng.random(),
            1 => drop(bytes.drain(at..at + length)),
            2 => bytes.splice(at..at, (0..length).map(|_| 0xff)).for_each(drop),
            3 => {
                let piece = bytes[at..at + length].to_vec();
                let to = rng.random_range(0..=bytes.len());
                bytes.splice(to..to, piece).for_each(drop);
            }
            4 if bytes.len() >= at + 8 => {
                let interesting = [0, 1, u64::MAX, 1 << 60, i64::MAX as u64, u64::from(u32::MAX), 1 << 31];
                let value = interesting[rng.random_range(0..interesting.len())];
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            5 => bytes.truncate(at),
            _ => {}
        }
    }
}

/// Mutates `file` and opens the checkpoint at `path` until the time is up. Prints how many were still valid.
fn fuzz(name: &str, good: &Path, file: &str, path: impl Fn(&Path) -> PathBuf) {
    let (seconds, seed) = (env_or("SHARDWISE_FUZZ_SECONDS", 2u64), env_or("SHARDWISE_SEED", 0u64));
    let scratch = std::env::temp_dir().join(format!("shardwise-fuzz-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&scratch);
    copy(good, &scratch);
    let original = std::fs::read(good.join(file)).unwrap();
    let mut rng = StdRng::seed_from_u64(seed);
    let start = Instant::now();
    let (mut rounds, mut opened) = (0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        let mut bytes = original.clone();
        mutate(&mut rng, &mut bytes);
        std::fs::write(scratch.join(file), &bytes).unwrap();
        let begun = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let catalog = checkpoint::open(path(&scratch)).ok()?;
            // A tensor can only be as large as its chunks in the files.
            assert!(catalog.bytes() <= 256 << 20, "{} bytes", catalog.bytes());
            catalog.tensors.keys().for_each(|key| drop(catalog.read(key)));
            Some(())
        }));
        let label = || format!("{name}, seed {seed}, round {rounds}: {bytes:?}");
        opened += usize::from(result.unwrap_or_else(|_| panic!("{}", label())).is_some());
        assert!(begun.elapsed() < Duration::from_secs(10), "slow: {}", label());
        rounds += 1;
    }
    println!("{name}: {rounds} files from seed {seed}, {opened} of them good");
    assert!(rounds > 20 && opened < rounds, "{rounds} rounds, {opened} good");
    std::fs::remove_dir_all(&scratch).unwrap();
}

#[test]
fn fuzz_safetensors_header() {
    fuzz("safetensors", &samples().join("hf_plain/checkpoint"), "model-00001-of-00003.safetensors", Path::to_path_buf);
}

#[test]
fn fuzz_safetensors_index() {
    fuzz("index", &samples().join("hf_plain/checkpoint"), "model.safetensors.index.json", Path::to_path_buf);
}

#[test]
fn fuzz_offsets_in_rank_headers() {
    let file = "shard-00002-model-00001-of-00001.safetensors";
    fuzz("offsets", &samples().join("hf_sharded/checkpoint"), file, Path::to_path_buf);
}

#[test]
fn fuzz_dcp_metadata_pickle() {
    fuzz("metadata", &samples().join("nested/checkpoint"), ".metadata", Path::to_path_buf);
}

#[test]
fn fuzz_dcp_archives() {
    fuzz("distcp", &samples().join("nested/checkpoint"), "__2_0.distcp", Path::to_path_buf);
}

#[test]
fn fuzz_torch_save_files() {
    fuzz("torch", &samples().join("torch_save/checkpoint"), "model.pt", |scratch| scratch.join("model.pt"));
}

#[test]
fn fuzz_gguf_files() {
    let good = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf");
    fuzz("gguf", &good, "blocks.gguf", |scratch| scratch.join("blocks.gguf"));
}

#[test]
fn fuzz_native_manifest() {
    let good = std::env::temp_dir().join(format!("shardwise-fuzz-good-{}", std::process::id()));
    convert(samples().join("nested/checkpoint"), &good, &ConvertOptions::to(Format::Native), &|_| {}).unwrap();
    fuzz("manifest", &good, "manifest.json", Path::to_path_buf);
    std::fs::remove_dir_all(&good).unwrap();
}
