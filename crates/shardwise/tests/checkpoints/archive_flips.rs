//! Flipped bits in the archives of PyTorch's checkpoints: of a checkpoint that `verify` calls intact, every tensor can be read, with the
//! bytes that were saved.
//!
//! `SHARDWISE_ARCHIVE_FLIPS` sets the number of random flips per file (default 60), `SHARDWISE_SEED` the seed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::checkpoint::{self, ConvertOptions, Format, verify};
use shardwise_test_suites::scratch::Scratch;
use shardwise_test_suites::settings::env_or;

/// The bytes of all tensors of a checkpoint.
fn tensors(path: &Path) -> shardwise::Result<BTreeMap<String, Vec<u8>>> {
    let catalog = checkpoint::open(path)?;
    catalog.tensors.keys().map(|key| Ok((key.clone(), catalog.read(key)?))).collect()
}

/// The fields of a local header of a ZIP archive: name, first byte, number of bytes.
const FIELDS: [(&str, usize, usize); 6] = [
    ("signature", 0, 4),
    ("flags", 6, 2),
    ("method", 8, 2),
    ("name length", 26, 2),
    ("length of extra fields", 28, 2),
    ("name", 30, 8),
];

/// The places of local headers, and whether they are those of tensors: `ARCHIVE/data/0`.
fn local_headers(bytes: &[u8]) -> Vec<(usize, bool)> {
    let windows = bytes.windows(4).enumerate();
    let headers = windows.filter(|(_, window)| *window == b"PK\x03\x04").map(|(at, _)| at);
    let is_tensor = |at: usize| {
        let length = usize::from(u16::from_le_bytes([bytes[at + 26], bytes[at + 27]]));
        bytes[at + 30..at + 30 + length].windows(6).any(|window| window == b"/data/")
    };
    headers.map(|at| (at, is_tensor(at))).collect()
}

/// Whether `verify` reports that one bit of a file was flipped; if it does not, everything must be as it was.
fn is_found(path: &Path, file: &Path, good: &[u8], at: usize, bit: u8, whole: &BTreeMap<String, Vec<u8>>) -> bool {
    let mut bytes = good.to_vec();
    bytes[at] ^= 1 << bit;
    std::fs::write(file, &bytes).unwrap();
    if !verify(path, &|_| ()).is_intact() {
        return true;
    }
    let context = format!("bit {bit} of byte {at} of {}", file.display());
    let found = tensors(path).unwrap_or_else(|error| panic!("{context}: intact, and cannot be read: {error}"));
    assert!(found.keys().eq(whole.keys()), "{context}: intact, and without a tensor");
    assert!(found == *whole, "{context}: intact, and with other bytes");
    false
}

#[test]
fn every_tensor_of_an_intact_archive_can_be_read() {
    let (flips, seed) = (env_or("SHARDWISE_ARCHIVE_FLIPS", 60usize), env_or("SHARDWISE_SEED", 0u64));
    let samples = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/dcp");
    let nested = samples.join("nested/checkpoint");
    let scratch = Scratch::new("archive-flips");
    // What PyTorch has written, and what this library writes.
    let mut checkpoints = Vec::new();
    for (name, source) in [("pytorch-dcp", nested.clone()), ("pytorch-torch", samples.join("torch_save/checkpoint"))] {
        let to = scratch.0.join(name);
        std::fs::create_dir(&to).unwrap();
        for entry in std::fs::read_dir(source).unwrap() {
            let from = entry.unwrap().path();
            std::fs::write(to.join(from.file_name().unwrap()), std::fs::read(&from).unwrap()).unwrap();
        }
        checkpoints.push(to);
    }
    for (name, format) in [("own-dcp", Format::Dcp), ("own-torch", Format::Torch)] {
        let to = scratch.0.join(name);
        checkpoint::convert(&nested, &to, &ConvertOptions::to(format), &|_| ()).unwrap();
        checkpoints.push(to);
    }
    let rng = &mut StdRng::seed_from_u64(seed);
    for path in checkpoints {
        let entries = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path());
        let is_archive =
            |path: &PathBuf| path.extension().is_some_and(|end| ["distcp", "pt", "bin"].iter().any(|e| end == *e));
        let files: Vec<PathBuf> = entries.filter(is_archive).collect();
        // A file of `torch.save` is opened by itself.
        let opened = if path.ends_with("pytorch-torch") { files[0].clone() } else { path.clone() };
        let whole = tensors(&opened).unwrap();
        assert!(!whole.is_empty() && verify(&opened, &|_| ()).is_intact());
        let mut seen = BTreeMap::<&str, (usize, usize)>::new();
        for file in &files {
            let good = std::fs::read(file).unwrap();
            let headers = local_headers(&good);
            assert!(!headers.is_empty(), "{}", file.display());
            let mut flip = |field: &'static str, at: usize, bit: u8| {
                let found = is_found(&opened, file, &good, at, bit, &whole);
                let (all, reported) = seen.entry(field).or_default();
                (*all, *reported) = (*all + 1, *reported + usize::from(found));
                found
            };
            for (header, is_tensor) in headers {
                for (field, start, length) in FIELDS {
                    let at = header + start + rng.random_range(0..length);
                    let reported = flip(field, at, rng.random_range(0..8));
                    // Where the bytes of a tensor begin follows from its local header.
                    let must_be = is_tensor && ["signature", "name length"].contains(&field);
                    assert!(reported || !must_be, "{field} of the header at {header} of {}", file.display());
                }
            }
            for _ in 0..flips {
                flip("any byte", rng.random_range(0..good.len()), rng.random_range(0..8));
            }
            std::fs::write(file, &good).unwrap();
        }
        println!("{}: flips and how many were reported, by field: {seen:?} (seed {seed})", path.display());
    }
}
