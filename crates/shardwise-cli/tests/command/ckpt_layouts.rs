//! What `ckpt dry-load` and `ckpt reshard` report of the checkpoint of a training run, compared with what the ranks of a run hold.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use shardwise::checkpoint;
use shardwise::models::{DataParallelMode, ModelConfig, ParallelismConfig, build};
use shardwise::optim::{AdamW, ShardedOptimizer};
use shardwise::prelude::*;

use crate::program::{Place, TINY, json, succeeds};

const RANKS: usize = 2;

/// The bytes of weights and moments that each rank holds after it has loaded a checkpoint for tensor parallelism.
fn held(checkpoint: &Path) -> Vec<u64> {
    let catalog = checkpoint::open(checkpoint).unwrap();
    let config: ModelConfig = catalog.value("config").unwrap().read().unwrap();
    let checkpoint = checkpoint.to_path_buf();
    let run = move |world: World| {
        let mesh = world.mesh([("tp", RANKS)])?;
        let parallelism = ParallelismConfig {
            data_parallel: DataParallelMode::Replicate,
            tensor_parallel: true,
            sequence_parallel: false,
        };
        let model = build(&config, &parallelism.plan(&config, mesh.mesh())?, &mesh, DType::F32)?;
        let mut optimizer = ShardedOptimizer::new(model.named_parameters(), AdamW::default())?;
        checkpoint::load_into(&world, &checkpoint, (&model, &mut optimizer))?;
        let bytes = |tensor: &DTensor| (tensor.local_elem_count() * tensor.dtype().size_in_bytes()) as u64;
        let weights: u64 = model.named_parameters().iter().map(|(_, param)| bytes(&param.get())).sum();
        let state = optimizer.state_dict()?;
        let moments: u64 = state.params.values().flat_map(|param| param.tensors.values()).map(bytes).sum();
        assert_eq!(moments, 2 * weights, "two moments for every weight");
        Ok(weights + moments)
    };
    ThreadWorld::new(RANKS).unwrap().run(run).unwrap()
}

/// The bytes per rank that `dry-load` reports for tensor parallelism.
fn reported(checkpoint: &str) -> Vec<u64> {
    let mesh = format!("tp={RANKS}");
    let lines = succeeds(&["ckpt", "dry-load", checkpoint, "--mesh", &mesh, "--plan", "tp", "--json"]);
    lines.lines().map(|line| json(line)["tensor_bytes"].as_u64().unwrap()).collect()
}

#[test]
fn a_dry_load_of_a_training_checkpoint_reports_what_ranks_hold() {
    let place = Place::new("dry-load-training");
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shardwise/tests/conformance/data/models");
    let (mixtral, gpt2) = (models.join("mixtral").display().to_string(), models.join("gpt2").display().to_string());
    let short = ["--seq-len", "16", "--batch-size", "4", "--eval-every", "0", "--sample-tokens", "4"];
    for (name, options) in [
        ("gpt", TINY.to_vec()),
        ("llama", [&TINY[..], &["--model", "llama", "--kv-heads", "2"]].concat()),
        ("mixtral", [&short[..], &["--init", &mixtral]].concat()),
        ("gpt2", [&short[..], &["--init", &gpt2]].concat()),
    ] {
        let out = place.at(name);
        let summary = json(&succeeds(&[&["train", "--json", "--out", &out, "--steps", "2"], &options[..]].concat()));
        let checkpoint = summary["checkpoint"].as_str().unwrap();
        let (held, reported_before) = (held(Path::new(checkpoint)), reported(checkpoint));
        assert_eq!(reported_before, held, "{name}");
        let to = place.at(&format!("{name}-resharded"));
        succeeds(&["ckpt", "reshard", checkpoint, &to, "--mesh", &format!("tp={RANKS}"), "--plan", "tp"]);
        assert_eq!(reported(&to), held, "{name}, resharded");
        // Every moment is in as many parts as its weight, of the same places.
        let seen = json(&succeeds(&["ckpt", "inspect", &to, "--json"]));
        let tensors: BTreeMap<String, Value> = serde_json::from_value(seen["tensors"].clone()).unwrap();
        let places = |key: &str| -> Vec<(Value, Value)> {
            let parts = tensors[key]["parts"].as_array().unwrap();
            parts.iter().map(|part| (part["offsets"].clone(), part["sizes"].clone())).collect()
        };
        let mut sharded = 0;
        for key in tensors.keys().filter(|key| key.ends_with(".exp_avg")) {
            let weight = key.trim_start_matches("optimizer.state.").trim_end_matches(".exp_avg");
            assert_eq!(places(key), places(&format!("model.{weight}")), "{name}: {key}");
            sharded += usize::from(places(key).len() == RANKS);
        }
        assert!(sharded >= 5, "{name}: {sharded} sharded weights");
    }
}
