//! A disk that is full while a checkpoint, a conversion, an export or adapters are written: every rank has the error, which names
//! the file and the cause, and what was there before stays as it was.
//!
//! A limit on the sizes of files, in a process of its own, stands in for the full disk: writes fail in the same way.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use shardwise::checkpoint::{self, ConvertOptions, Format, State, convert};
use shardwise::models::{GptConfig, ModelSpec, export_hf, export_hf_with_tokenizer, save_adapter};
use shardwise::nn::{Builder, Lora};
use shardwise::prelude::*;
use shardwise::text::TextFiles;
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::own_process::test_arguments;
use shardwise_test_suites::scratch::Scratch;

/// Environment variables of the process with the limit: what it writes, and where.
const WRITTEN: &str = "SHARDWISE_FULL_DISK_WRITTEN";
const DIRECTORY: &str = "SHARDWISE_FULL_DISK_DIRECTORY";

const RANKS: usize = 4;
/// 74 KB: a quarter is below the limit of 32 KB, and the joined file of an export above.
const MODEL: GptConfig = GptConfig {
    vocab_size: 256,
    seq_len: 64,
    d_model: 32,
    n_layers: 1,
    n_heads: 2,
    d_ff: 64,
    layer_norm_eps: 1e-5,
    tied_head: true,
    dropout: 0.0,
};

/// Writes to `state` in a directory; what is written depends on the generation. Collective.
fn write(world: &World, what: &str, directory: &Path, generation: usize) -> Result<()> {
    let (target, mesh) = (directory.join("state"), world.mesh([("dp", RANKS)])?);
    let model = || {
        mesh.manual_seed(generation as u64);
        MODEL.build(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]))
    };
    match what {
        // The last rank has the most to write.
        "save" => {
            let sizes = Placement::ragged(0, [1, 1, 1, 99_997]);
            let x = DTensor::full(generation as f64, 100_000, DType::F32, &mesh, [sizes])?;
            checkpoint::save(world, &target, &State::map([("x", x)]))
        }
        "convert" => world
            .on_first_rank(|| {
                let source = directory.join(format!("source{generation}"));
                convert(source, &target, &ConvertOptions::to(Format::HuggingFace), &|_| {})
            })
            .map(drop),
        "export" => export_hf(world, &target, &model()?, &MODEL),
        // The weights fit, and the tokenizer of the second generation does not.
        "tokenizer" => {
            mesh.manual_seed(generation as u64);
            let config = GptConfig { vocab_size: 64, seq_len: 16, d_model: 16, d_ff: 32, ..MODEL };
            let model = config.build(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]))?;
            let text = TextFiles { tokenizer: vec![b' '; 20_000 * generation], ..TextFiles::default() };
            export_hf_with_tokenizer(world, &target, &model, &config, &text)
        }
        _ => {
            let (model, lora) = (model()?, Lora { rank: 8 * generation.pow(2), ..Lora::default() });
            lora.apply(&model, |path| path.starts_with("blocks"))?;
            save_adapter(world, &target, &model, &lora, "base")
        }
    }
}

/// Contents of all files below a directory, hidden ones too.
fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => drop(found.insert(path.clone(), std::fs::read(&path).unwrap())),
        }
    }
    found
}

/// The process with the limit.
#[test]
fn child_process_with_a_limit() {
    let (Some(directory), Ok(what)) = (std::env::var_os(DIRECTORY), std::env::var(WRITTEN)) else { return };
    let directory = PathBuf::from(directory);
    let error = same_error_on_all_ranks(RANKS, move |world| write(&world, &what, &directory, 2));
    println!("refused: {error}");
}

/// Writes the first generation, fails to write the second with a limit, and writes it without.
fn check(what: &'static str, named: &[&str]) {
    let scratch = Scratch::new(&format!("full-disk-{what}"));
    let run = |generation: usize| {
        let directory = scratch.0.clone();
        launch(RANKS, move |world| write(&world, what, &directory, generation)).unwrap();
    };
    if what == "convert" {
        for generation in [1, 2] {
            let source = scratch.0.join(format!("source{generation}"));
            launch(RANKS, move |world| {
                let mesh = world.mesh([("dp", RANKS)])?;
                let x = DTensor::full(generation as f64, 20_000, DType::F32, &mesh, [Shard(0)])?;
                checkpoint::save(&world, &source, &State::map([("x", x)]))
            })
            .unwrap();
        }
    }
    run(1);
    let before = files(&scratch.0);
    let output = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$@\"", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(test_arguments(module_path!(), "child_process_with_a_limit"))
        .env(WRITTEN, what)
        .env(DIRECTORY, &scratch.0)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in named.iter().chain(&["refused: ", "File too large", "free some space"]) {
        assert!(said.contains(part), "{part}: {said} {}", String::from_utf8_lossy(&output.stderr));
    }
    let after = files(&scratch.0);
    assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>(), "{what}");
    assert!(after == before, "{what}: a file of before changed");
    run(2);
    assert!(files(&scratch.0) != before, "{what}");
}

#[test]
fn a_checkpoint_stays_if_the_next_one_does_not_fit() {
    check("save", &["rank 3", "part-00003.safetensors"]);
}

#[test]
fn a_converted_checkpoint_stays_if_the_next_one_does_not_fit() {
    check("convert", &["rank 0", "model.safetensors"]);
}

/// Its configuration stays too, without which the weights are of no use.
#[test]
fn an_export_stays_if_the_next_one_does_not_fit() {
    check("export", &["rank 0", "model.safetensors"]);
}

#[test]
fn an_export_stays_if_the_tokenizer_of_the_next_one_does_not_fit() {
    check("tokenizer", &["rank 0", "tokenizer.json"]);
}

#[test]
fn adapters_stay_if_the_next_ones_do_not_fit() {
    check("adapter", &["rank 0", "adapter_model.safetensors"]);
}
