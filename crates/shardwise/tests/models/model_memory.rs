//! Peak memory of loading a model: the shards of a rank and little more.
//!
//! `SHARDWISE_MODEL_MB` sets the size of the model (default 512; 2048 for the full run).

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;
use shardwise::checkpoint::RankLoad;
use shardwise::models::{LoadOptions, dry_load_model, load_with};
use shardwise::nn::Module;
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise_test_suites::own_process::test_command;
use shardwise_test_suites::process_memory::process_memory;
use shardwise_test_suites::scratch::Scratch;
use shardwise_test_suites::settings::env_or;

const MB: usize = 1 << 20;

/// Writes a llama with about as many parameters, all of them zeros: a sparse file, which takes no space on the disk.
fn write_model(directory: &Path, parameters: usize, element: &str, bytes: usize) {
    let (width, hidden, vocabulary) = (1024usize, 4096usize, 8192usize);
    let of_layer = 4 * width * width + 3 * width * hidden + 2 * width;
    let layers = parameters.saturating_sub(2 * vocabulary * width).div_ceil(of_layer).max(1);
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": width,
        "intermediate_size": hidden, "max_position_embeddings": 64, "num_attention_heads": 16, "num_hidden_layers": layers,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "vocab_size": vocabulary,
    });
    std::fs::create_dir_all(directory).unwrap();
    std::fs::write(directory.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_string(), vec![vocabulary, width]),
        ("lm_head.weight".to_string(), vec![vocabulary, width]),
        ("model.norm.weight".to_string(), vec![width]),
    ];
    for layer in 0..layers {
        let mut add = |name: &str, shape: &[usize]| {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        ["q_proj", "k_proj", "v_proj", "o_proj"]
            .iter()
            .for_each(|name| add(&format!("self_attn.{name}"), &[width, width]));
        ["gate_proj", "up_proj"].iter().for_each(|name| add(&format!("mlp.{name}"), &[hidden, width]));
        add("mlp.down_proj", &[width, hidden]);
        ["input_layernorm", "post_attention_layernorm"].iter().for_each(|name| add(name, &[width]));
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in shapes {
        let size = shape.iter().product::<usize>() * bytes;
        header.insert(name, json!({ "dtype": element, "shape": shape, "data_offsets": [end, end + size] }));
        end += size;
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = std::fs::File::create(directory.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

/// The model and the number of ranks that a child process loads.
const CHILD: &str = "SHARDWISE_MODEL_MEMORY_CHILD";

/// What a load in a process of its own took at most: the process, and the tensors of rank 0 by its own count. Memory that an
/// earlier load left behind in the allocator would hide some of it.
fn peaks(path: &Path, ranks: usize) -> (usize, usize) {
    let child = test_command(module_path!(), "load_in_a_child_process")
        .env(CHILD, format!("{ranks} {}", path.display()))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{text}{}", String::from_utf8_lossy(&child.stderr));
    let figures = text.lines().find_map(|line| line.strip_prefix("peaks: ")).expect("figures of the child");
    let (taken, counted) = figures.split_once(' ').unwrap();
    (taken.parse().unwrap(), counted.parse().unwrap())
}

#[test]
fn load_in_a_child_process() {
    let Ok(child) = std::env::var(CHILD) else { return };
    let (ranks, path) = child.split_once(' ').unwrap();
    let (ranks, path): (usize, PathBuf) = (ranks.parse().unwrap(), path.into());
    let (taken, counted) = launch(ranks, move |world| {
        let mesh = world.mesh([("tp", ranks)])?;
        let before = process_memory().0;
        world.barrier()?;
        let (model, _) = load_with(&path, &mesh, TensorParallel::new("tp"), &LoadOptions::default())?;
        world.barrier()?;
        assert!(!model.named_parameters().is_empty());
        Ok((process_memory().1.saturating_sub(before), world.memory().peak()))
    })
    .unwrap();
    println!("\npeaks: {taken} {counted}");
}

#[test]
fn loading_needs_the_memory_of_the_shards_and_64_mb_per_rank() {
    let megabytes: usize = env_or("SHARDWISE_MODEL_MB", 512);
    let scratch = Scratch::new("model-memory");
    for (element, bytes) in [("F32", 4), ("BF16", 2)] {
        let path = scratch.0.join(element);
        // As f32 in memory, whatever the file has.
        write_model(&path, megabytes * MB / 4, element, bytes);
        for ranks in [1, 2] {
            let mesh = Mesh::new([("tp", ranks)]).unwrap();
            let loads = dry_load_model(&path, &mesh, TensorParallel::new("tp"), &LoadOptions::default()).unwrap();
            let shards: usize = loads.iter().map(|load: &RankLoad| load.tensor_bytes).sum();
            let (taken, counted) = peaks(&path, ranks);
            println!(
                "{element} on {ranks} rank(s): {} MB of shards, {} MB at most, {} MB counted on rank 0",
                shards / MB,
                taken / MB,
                counted / MB
            );
            assert!(shards >= megabytes * MB, "{} MB", shards / MB);
            assert!(taken <= shards + ranks * 64 * MB, "{} MB for {} MB of shards", taken / MB, shards / MB);
            assert!(counted <= loads[0].peak_bytes, "{counted} bytes, {} predicted", loads[0].peak_bytes);
        }
    }
}
