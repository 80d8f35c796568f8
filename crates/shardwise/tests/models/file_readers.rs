//! Every reader of files meets pipes, devices, directories, files that claim gigabytes, files that cannot be read and missing
//! files: it says what it found, at once and without memory for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use shardwise::ErrorKind;
use shardwise::checkpoint::{self, ConvertOptions, Format};
use shardwise::comm::{CommLock, RankDump};
use shardwise::data::read_documents;
use shardwise::models::{self, PretrainedConfig, load_adapter, load_pooling, load_tokenizer};
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise::text::Tokenizer;
use shardwise_test_suites::own_process::is_alone;
use shardwise_test_suites::process_memory::process_memory;
use shardwise_test_suites::scratch::Scratch;

/// What is in the place of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Pipe,
    EndlessDevice,
    Sparse,
    Directory,
    /// A regular file that can be opened and not read, by root neither, who may read files without permission.
    Unreadable,
    Nothing,
}

const ALL: [Found; 6] =
    [Found::Pipe, Found::EndlessDevice, Found::Sparse, Found::Directory, Found::Unreadable, Found::Nothing];

impl Found {
    fn put(self, path: &Path) {
        let _ = fs::remove_file(path);
        match self {
            Found::Pipe => mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap(),
            Found::EndlessDevice => std::os::unix::fs::symlink("/dev/zero", path).unwrap(),
            Found::Sparse => fs::File::create(path).unwrap().set_len(3 << 30).unwrap(),
            Found::Directory => fs::create_dir(path).unwrap(),
            // Nothing is mapped at address 0.
            Found::Unreadable => std::os::unix::fs::symlink("/proc/self/mem", path).unwrap(),
            Found::Nothing => {}
        }
    }
}

type Reader = fn(&Path) -> Result<()>;

/// In place of data: a checkpoint of this library's format, which is written for the case.
const NATIVE: &str = "native";

/// A file of a directory, relative to the test data, and what reads it given the directory. Optional ones may be missing.
struct Case {
    data: &'static str,
    file: &'static str,
    optional: bool,
    read: Reader,
}

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)
}

fn cases() -> Vec<Case> {
    const LLAMA: &str = "conformance/data/models/llama_gqa";
    let case = |data, file, optional, read| Case { data, file, optional, read };
    let config: Reader = |path| PretrainedConfig::read(path).map(drop);
    let tokenizer: Reader = |path| load_tokenizer(path).map(drop);
    let catalog: Reader = |path| {
        let catalog = checkpoint::open(path)?;
        // What cannot be read is listed, and is an error for whoever asks for it.
        if let Some(entry) = catalog.unreadable.values().next() {
            return Err(Error::other(entry.to_string()));
        }
        Ok(())
    };
    // Reads every tensor.
    let tensors: Reader = |path| match checkpoint::verify(path, &|_| ()).problems.first() {
        Some(problem) => Err(Error::other(problem.clone())),
        None => Ok(()),
    };
    let weights: Reader = |path| {
        let path = path.to_path_buf();
        launch(1, move |world| {
            let mesh = world.mesh([("tp", 1)])?;
            models::load(&path, &mesh, TensorParallel::new("tp")).map(drop)
        })
        .map(drop)
    };
    let adapter: Reader = |path| {
        let path = path.to_path_buf();
        launch(1, move |world| {
            let mesh = world.mesh([("tp", 1)])?;
            let model = models::load(data("conformance/data/models/llama_gqa"), &mesh, TensorParallel::new("tp"))?;
            load_adapter(&world, &path, &model).map(drop)
        })
        .map(drop)
    };
    vec![
        case(LLAMA, "config.json", false, config),
        case(LLAMA, "config.json", false, |path| PretrainedConfig::read(path.join("config.json")).map(drop)),
        case(LLAMA, "tokenizer.json", false, tokenizer),
        case(LLAMA, "tokenizer_config.json", true, tokenizer),
        case(LLAMA, "generation_config.json", true, tokenizer),
        case(LLAMA, "chat_template.jinja", true, tokenizer),
        case(LLAMA, "config.json", true, tokenizer),
        case(LLAMA, "config.json", false, weights),
        case(LLAMA, "model.safetensors", false, weights),
        case(LLAMA, "model.safetensors", false, |path| checkpoint::open(path.join("model.safetensors")).map(drop)),
        case(LLAMA, "1_Pooling", true, |path| load_pooling(path).map(drop)),
        case("data/adapters/llama_gqa", "adapter_config.json", false, adapter),
        case("data/adapters/llama_gqa", "adapter_model.safetensors", false, adapter),
        // Without a manifest or an index a directory is one of plain files.
        case(NATIVE, "manifest.json", true, catalog),
        case(NATIVE, "part-00000.safetensors", false, tensors),
        case("conformance/data/dcp/dtypes/checkpoint", ".metadata", false, catalog),
        case("conformance/data/dcp/dtypes/checkpoint", "__0_0.distcp", false, tensors),
        case("conformance/data/dcp/hf_plain/checkpoint", "model.safetensors.index.json", true, tensors),
        case("conformance/data/dcp/hf_plain/checkpoint", "model-00002-of-00003.safetensors", false, tensors),
        case("", "model.safetensors.index.json", false, catalog),
        case("", ".metadata", false, catalog),
        case("", "model.gguf", false, |path| PretrainedConfig::read(path.join("model.gguf")).map(drop)),
        case("", "model.gguf", false, |path| checkpoint::open(path.join("model.gguf")).map(drop)),
        case("", "model.pt", false, |path| checkpoint::open(path.join("model.pt")).map(drop)),
        case("", "data.jsonl", false, |path| read_documents(path.join("data.jsonl"), &Tokenizer::bytes()).map(drop)),
        case("", "step.lock", false, |path| "".parse::<CommLock>()?.check_file(path.join("step.lock"))),
        case("", "rank-0.json", false, |path| RankDump::read_all(path).map(drop)),
    ]
}

/// Runs a reader, which must not wait for anybody.
fn ended(read: Reader, path: &Path) -> Option<Result<()>> {
    let (send, receive) = mpsc::channel();
    let path = path.to_path_buf();
    std::thread::spawn(move || send.send(read(&path)));
    receive.recv_timeout(Duration::from_secs(20)).ok()
}

#[test]
fn readers_of_files_refuse_what_is_no_file_or_too_large() {
    if !is_alone(module_path!(), "readers_of_files_refuse_what_is_no_file_or_too_large") {
        return;
    }
    let mut count = 0;
    for (number, case) in cases().iter().enumerate() {
        for found in ALL {
            let scratch = Scratch::new(&format!("file-readers-{number}-{found:?}"));
            if case.data == NATIVE {
                let from = data("conformance/data/dcp/hf_plain/checkpoint");
                let options = ConvertOptions::to(Format::Native);
                checkpoint::convert(from, &scratch.0, &options, &|_| ()).unwrap();
            } else if !case.data.is_empty() {
                for entry in fs::read_dir(data(case.data)).unwrap() {
                    let from = entry.unwrap().path();
                    fs::copy(&from, scratch.0.join(from.file_name().unwrap())).unwrap();
                }
            }
            let mut place = scratch.0.join(case.file);
            if case.file == "1_Pooling" {
                fs::create_dir(&place).unwrap();
                place = place.join("config.json");
            }
            found.put(&place);
            let (before, _) = process_memory();
            let what = format!("{} ({number}) that is {found:?}", case.file);
            let result = ended(case.read, &scratch.0).unwrap_or_else(|| panic!("{what}: the reader still waits"));
            let (_, peak) = process_memory();
            assert!(peak < before.max(64 << 20) + (192 << 20), "{what}: {} MB, {} before", peak >> 20, before >> 20);
            match result {
                Ok(()) => assert!(case.optional && found == Found::Nothing, "{what} was read"),
                Err(error) => assert!(error.to_string().len() > 20, "{what}: {error}"),
            }
            count += 1;
        }
    }
    assert_eq!(count, cases().len() * ALL.len());
}

#[test]
fn what_is_no_file_is_named() {
    let scratch = Scratch::new("file-readers-named");
    for (found, named) in [
        (Found::Pipe, "a pipe instead of a file"),
        (Found::EndlessDevice, "a character device instead of a file"),
        (Found::Sparse, "3221225472 bytes"),
        (Found::Directory, "No such file"),
        (Found::Unreadable, "Input/output error"),
        (Found::Nothing, "No such file"),
    ] {
        let path = scratch.0.join(format!("{found:?}.json"));
        found.put(&path);
        let error = PretrainedConfig::read(&path).unwrap_err();
        assert!(error.to_string().contains(named), "{found:?}: {error}");
        assert!(matches!(error.kind(), Some(ErrorKind::Path { .. })), "{found:?}: {:?}", error.kind());
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
    let long = scratch.0.join("long.jsonl");
    fs::write(&long, format!("{{\"text\": \"{}\"}}\n", "a".repeat(65 << 20))).unwrap();
    let error = read_documents(&long, &Tokenizer::bytes()).unwrap_err().to_string();
    assert!(error.contains("line 1") && error.contains("in one line"), "{error}");
}

/// Files are opened in one place, which waits for nobody and reads regular files only.
#[test]
fn files_are_opened_to_read_in_one_place() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    // Text that opens a file to read: spelled so that this test does not find itself.
    let opens =
        ["File::open(", "fs::read(", "fs::read_to_string(", "fs::copy(", "openat(", ".read(true)", "from_file("];
    let known = [
        "shardwise/src/read_file.rs",
        // A directory is opened to sync it after a save.
        "shardwise/src/checkpoint/catalogs/directory.rs",
        // A lock, of which nothing is read.
        "shardwise-cli/src/train/output_lock.rs",
    ];
    let (mut seen, mut pending) =
        (0, ["shardwise", "shardwise-cli", "shardwise-mpi"].map(|name| crates.join(name).join("src")).to_vec());
    while let Some(path) = pending.pop() {
        if path.is_dir() {
            pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let name = path.strip_prefix(crates).unwrap().display().to_string();
        if !name.ends_with(".rs") || name.ends_with("/tests.rs") || known.contains(&name.as_str()) {
            continue;
        }
        seen += 1;
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
            // Which opens its file by `read_file`.
            let line = line.replace("TokenFile::open(", "");
            let found = opens.iter().find(|open| line.contains(**open));
            assert!(found.is_none(), "{name}:{}: use shardwise::read_file: {line}", number + 1);
        }
    }
    assert!(seen > 300, "{seen} files");
}
