//! Model directories: what each rank reads, other spellings of the same weights, exports that load again, directories with
//! something wrong in them, and the key/value cache.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use shardwise::checkpoint::LoadReport;
use shardwise::error::ErrorKind;
use shardwise::models::{
    self, KvCache, LoadOptions, Model, PretrainedConfig, PretrainedModel, batch_placements, dry_load_model, export_hf,
};
use shardwise::nn::{Forward, Module};
use shardwise::plan::{DataParallel, FullyShard, ShardingPlanner, TensorParallel};
use shardwise::prelude::*;

fn recorded(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/conformance/data/models").join(name)
}

/// A copy of a recorded directory in which a test changes something; removed on drop.
struct Changed(PathBuf);

impl Changed {
    fn new(model: &str, test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("shardwise-pretrained-{model}-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        for entry in std::fs::read_dir(recorded(model)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), path.join(entry.file_name())).unwrap();
        }
        Changed(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn config(&self) -> Value {
        serde_json::from_str(&std::fs::read_to_string(self.file("config.json")).unwrap()).unwrap()
    }

    fn set(&self, field: &str, value: Value) {
        let mut config = self.config();
        config[field] = value;
        std::fs::write(self.file("config.json"), config.to_string()).unwrap();
    }

    fn weights(&self) -> HashMap<String, Tensor> {
        candle_core::safetensors::load(self.file("model.safetensors"), &Device::Cpu).unwrap()
    }

    fn write(&self, weights: &HashMap<String, Tensor>) {
        candle_core::safetensors::save(weights, self.file("model.safetensors")).unwrap();
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const IDS: [u32; 9] = [5, 40, 3, 17, 60, 22, 9, 31, 8];

fn ids_of(mesh: &DeviceMesh, ids: &[u32]) -> Result<DTensor> {
    DTensor::from_fn((1, ids.len()), DType::U32, mesh, vec![Replicate; mesh.ndim()], |i| f64::from(ids[i[1]]))
}

fn full(logits: &DTensor) -> Result<Vec<f32>> {
    Ok(logits.full_tensor()?.flatten_all()?.to_vec1()?)
}

/// Logits of [`IDS`] on `tp` ranks.
fn logits(path: &Path, tp: usize) -> Result<Vec<f32>> {
    let path = path.to_path_buf();
    launch(tp, move |world| {
        let mesh = world.mesh([("tp", world.size())])?;
        let model = models::load(&path, &mesh, TensorParallel::new("tp"))?;
        full(&model.forward(&ids_of(&mesh, &IDS)?)?)
    })
}

fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let far = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-4, "{what}: {far}");
}

/// Reports of all ranks of a load, with the bytes of their parameters as stored.
fn reports(
    model: &str,
    mesh: &str,
    planner: impl ShardingPlanner + Clone + Send + Sync + 'static,
) -> Vec<(LoadReport, u64)> {
    let (path, axes, copy) = (recorded(model), mesh.parse::<Mesh>().unwrap(), planner.clone());
    let (size, dry_axes) = (axes.size(), axes.clone());
    let found = ThreadWorld::new(size)
        .unwrap()
        .run(move |world| {
            let mesh = world.device_mesh(axes.clone())?;
            let (model, report) = models::load_with(&path, &mesh, planner.clone(), &LoadOptions::default())?;
            let held = model.named_parameters().iter().map(|(_, p)| p.get().local_elem_count() as u64).sum::<u64>();
            Ok((report, held))
        })
        .unwrap();
    let dry = dry_load_model(recorded(model), &dry_axes, copy, &LoadOptions::default()).unwrap();
    for ((report, held), dry) in found.iter().zip(&dry) {
        assert_eq!((report.bytes, *held * 4), (dry.read_bytes as u64, dry.tensor_bytes as u64), "{model} on {mesh}");
    }
    found
}

#[test]
fn each_rank_reads_the_bytes_of_its_shards() {
    // Bytes per stored element: 4 in f32 files, 2 in the bf16 file of qwen3.
    for (model, size) in [("llama_gqa", 4), ("gpt2", 4), ("qwen3", 2), ("mixtral", 4), ("phi3", 4), ("gpt_neox", 4)] {
        let whole = reports(model, "tp=1", TensorParallel::new("tp"))[0].1;
        for (report, held) in reports(model, "tp=3", TensorParallel::new("tp")) {
            assert_eq!(report.bytes, held * size, "{model}");
            assert!(held < whole * 2 / 3, "{model}: {held} of {whole}");
        }
        let shards = reports(model, "dp=2", FullyShard::new(["dp"]));
        assert_eq!(shards.iter().map(|(report, _)| report.bytes).sum::<u64>(), whole * size, "{model}");
    }
}

#[test]
fn other_spellings_of_the_same_weights_load() {
    // Without the prefix of the base model, with causal masks, and with a head that is tied and so not used.
    let expected = logits(&recorded("llama_gqa"), 1).unwrap();
    let changed = Changed::new("llama_gqa", "spelling");
    let mut weights: HashMap<String, Tensor> = changed
        .weights()
        .into_iter()
        .map(|(name, t)| (name.strip_prefix("model.").unwrap_or(&name).to_string(), t))
        .collect();
    weights.insert("lm_head.weight".into(), Tensor::zeros((512, 72), DType::F32, &Device::Cpu).unwrap());
    weights
        .insert("layers.0.self_attn.rotary_emb.inv_freq".into(), Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap());
    changed.write(&weights);
    assert_close(&logits(&changed.0, 2).unwrap(), &expected, "llama without prefix");

    // Experts of a layer in one tensor, as transformers 5 has them in memory.
    let expected = logits(&recorded("mixtral"), 1).unwrap();
    let changed = Changed::new("mixtral", "stacked");
    let mut weights = changed.weights();
    for layer in 0..2 {
        let at = |rest: &str| format!("model.layers.{layer}.{rest}");
        let mut take =
            |e: usize, w: &str| weights.remove(&at(&format!("block_sparse_moe.experts.{e}.{w}.weight"))).unwrap();
        let (mut fused, mut down) = (Vec::new(), Vec::new());
        for e in 0..6 {
            fused.push(Tensor::cat(&[take(e, "w1"), take(e, "w3")], 0).unwrap());
            down.push(take(e, "w2"));
        }
        let gate = weights.remove(&at("block_sparse_moe.gate.weight")).unwrap();
        weights.insert(at("mlp.gate.weight"), gate);
        weights.insert(at("mlp.experts.gate_up_proj"), Tensor::stack(&fused, 0).unwrap());
        weights.insert(at("mlp.experts.down_proj"), Tensor::stack(&down, 0).unwrap());
    }
    changed.write(&weights);
    for ranks in [1, 3] {
        assert_close(&logits(&changed.0, ranks).unwrap(), &expected, "stacked experts");
    }
}

#[test]
fn an_encoder_loads_with_a_prefix_and_heads_of_other_tasks() {
    let changed = Changed::new("bert", "prefix");
    let mut weights: HashMap<String, Tensor> = HashMap::new();
    for (name, t) in changed.weights() {
        if !name.contains("pooler") {
            weights.insert(format!("bert.{}", name.trim_start_matches("bert.")), t);
        }
    }
    weights.insert("cls.predictions.bias".into(), Tensor::zeros(384, DType::F32, &Device::Cpu).unwrap());
    weights.retain(|name, _| !name.starts_with("bert.cls"));
    changed.write(&weights);
    let encode = |path: PathBuf| {
        launch(2, move |world| {
            let mesh = world.mesh([("tp", 2)])?;
            let encoder = models::load_encoder(&path, &mesh, TensorParallel::new("tp"))?;
            let output = encoder.encode(&ids_of(&mesh, &IDS)?, None, None)?;
            Ok((full(&output.last_hidden_state)?, output.pooler_output.is_some()))
        })
        .unwrap()
    };
    let (expected, with_pooler) = encode(recorded("bert"));
    let (found, without) = encode(changed.0.clone());
    assert!(with_pooler && !without);
    assert_close(&found, &expected, "bert with a prefix");
}

#[test]
fn files_of_torch_save_with_an_index_load_as_one_file_does() {
    let changed = Changed::new("gpt2", "index");
    let bin = changed.file("pytorch_model.bin");
    let names: Vec<String> = shardwise::checkpoint::open(&bin).unwrap().tensors.into_keys().collect();
    let parts = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];
    // Both files have all tensors: the index decides.
    for part in parts {
        std::fs::copy(&bin, changed.file(part)).unwrap();
    }
    std::fs::remove_file(&bin).unwrap();
    let map: HashMap<&String, &str> = names.iter().enumerate().map(|(i, name)| (name, parts[i % 2])).collect();
    let index = |map: Value| {
        std::fs::write(changed.file("pytorch_model.bin.index.json"), json!({ "weight_map": map }).to_string()).unwrap();
    };
    index(json!(map));
    let files = shardwise::checkpoint::open(&changed.0).unwrap();
    assert_eq!(files.tensor(&names[1]).unwrap().chunks[0].file, parts[1]);
    assert_close(&logits(&changed.0, 2).unwrap(), &logits(&recorded("gpt2"), 1).unwrap(), "two files");

    let mut more = json!(map);
    more["none.weight"] = json!(parts[0]);
    index(more);
    assert!(refused(&changed.0).to_string().contains("none.weight"));
    index(json!({ "wte.weight": "../outside.bin" }));
    assert!(refused(&changed.0).to_string().contains("outside.bin"));
    index(json!(map));
    std::fs::remove_file(changed.file(parts[1])).unwrap();
    assert!(refused(&changed.0).to_string().contains(parts[1]));
}

#[test]
fn exports_load_again_and_have_the_names_and_shapes_of_the_original() {
    let models = ["llama_gqa", "gpt2", "qwen3", "gemma2", "phi3", "gpt_neox", "mixtral", "qwen2_moe", "mistral"];
    // `scripts/check-hf-export` keeps the exports and gives them to transformers.
    let kept = std::env::var_os("SHARDWISE_EXPORT_DIR").map(PathBuf::from);
    for model in models {
        let out = Changed::new(model, "export");
        std::fs::remove_dir_all(&out.0).unwrap();
        let (from, to) = (recorded(model), out.0.clone());
        ThreadWorld::new(3)
            .unwrap()
            .run(move |world| {
                let mesh = world.mesh([("tp", 3)])?;
                let model = models::load(&from, &mesh, TensorParallel::new("tp"))?;
                export_hf(&world, &to, &model, model.config())
            })
            .unwrap();
        let shapes = |path: &Path| -> HashMap<String, Vec<usize>> {
            let file =
                if path.join("pytorch_model.bin").exists() { path.join("pytorch_model.bin") } else { path.into() };
            let found = shardwise::checkpoint::open(file).unwrap();
            // GPT-2 files may lack the prefix, which exports have.
            let named = |name: &str| name.trim_start_matches("transformer.").to_string();
            let masks = |name: &&String| !name.ends_with("attn.bias") && !name.ends_with("masked_bias");
            let kept = found.tensors.iter().filter(|(name, _)| masks(name));
            kept.map(|(name, tensor)| (named(name), tensor.shape.clone())).collect()
        };
        assert_eq!(shapes(&out.0), shapes(&recorded(model)), "{model}");
        assert_close(&logits(&out.0, 2).unwrap(), &logits(&recorded(model), 1).unwrap(), model);
        if let Some(kept) = &kept {
            std::fs::create_dir_all(kept.join(model)).unwrap();
            for entry in std::fs::read_dir(&out.0).unwrap() {
                let entry = entry.unwrap();
                std::fs::copy(entry.path(), kept.join(model).join(entry.file_name())).unwrap();
            }
        }
        let config = PretrainedConfig::read(&out.0).unwrap();
        assert_eq!(config.model_type(), PretrainedConfig::read(recorded(model)).unwrap().model_type());
    }
}

/// The error of loading a directory on two ranks, which must be the same on both.
fn refused(path: &Path) -> Error {
    let path = path.to_path_buf();
    let errors = ThreadWorld::new(2)
        .unwrap()
        .run(move |world| {
            let mesh = world.mesh([("tp", 2)])?;
            let loaded = models::load(&path, &mesh, TensorParallel::new("tp"));
            Ok(loaded.err().expect("a bad directory"))
        })
        .unwrap();
    assert_eq!(errors[0].to_string(), errors[1].to_string());
    errors[0].clone()
}

#[test]
fn bad_directories_name_what_is_wrong() {
    let check = |what: &str, change: &dyn Fn(&Changed), words: &[&str]| {
        let changed = Changed::new("llama_gqa", what);
        change(&changed);
        let error = refused(&changed.0);
        for word in words {
            assert!(error.to_string().contains(word), "{what}: no {word:?} in {error}");
        }
        assert!(error.kind().is_some(), "{what}: {error}");
    };
    check("no-config", &|c| std::fs::remove_file(c.file("config.json")).unwrap(), &["config.json"]);
    check("no-weights", &|c| std::fs::remove_file(c.file("model.safetensors")).unwrap(), &["model.safetensors"]);
    check("not-json", &|c| std::fs::write(c.file("config.json"), "{").unwrap(), &["config.json"]);
    check("unknown", &|c| c.set("model_type", json!("mamba")), &["mamba", "llama"]);
    check("no-type", &|c| c.set("model_type", Value::Null), &["model_type"]);
    check("field", &|c| c.set("attention_sinks", json!(4)), &["`attention_sinks`"]);
    check("quantized", &|c| c.set("quantization_config", json!({"bits": 4})), &["`quantization_config`"]);
    check("activation", &|c| c.set("hidden_act", json!("mish")), &["`hidden_act`", "mish"]);
    check(
        "rope",
        &|c| c.set("rope_parameters", json!({"rope_type": "spiral", "rope_theta": 1e4})),
        &["rope_parameters.rope_type", "spiral"],
    );
    check(
        "rope-field",
        &|c| c.set("rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "twist": 3})),
        &["rope_parameters.twist"],
    );
    check("text-size", &|c| c.set("hidden_size", json!("large")), &["`hidden_size`", "large"]);
    check("negative", &|c| c.set("num_hidden_layers", json!(-1)), &["`num_hidden_layers`"]);
    check("groups", &|c| c.set("num_key_value_heads", json!(4)), &["9 heads", "4 key heads"]);
    check("width", &|c| c.set("intermediate_size", json!(100)), &["mlp.gate_proj.weight", "[192, 72]", "[100, 72]"]);
    // Refused at once: building so many layers would take all memory.
    check("endless", &|c| c.set("num_hidden_layers", json!(1_000_000_000)), &["`num_hidden_layers`", "at most 4096"]);
    check("layers", &|c| c.set("num_hidden_layers", json!(4)), &["model.layers.3.input_layernorm.weight", "missing"]);
    check("fewer", &|c| c.set("num_hidden_layers", json!(2)), &["model.layers.2.input_layernorm.weight", "unknown"]);
    check("untied", &|c| c.set("tie_word_embeddings", json!(false)), &["lm_head.weight", "missing"]);
    let replace = |c: &Changed, change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let mut weights = c.weights();
        change(&mut weights);
        c.write(&weights);
    };
    check("missing", &|c| replace(c, &|w| drop(w.remove("model.norm.weight"))), &["model.norm.weight", "1 missing"]);
    check(
        "extra",
        &|c| {
            replace(c, &|w| {
                drop(w.insert(
                    "model.layers.0.self_attn.q_proj.bias".into(),
                    Tensor::zeros(72, DType::F32, &Device::Cpu).unwrap(),
                ));
            });
        },
        &["model.layers.0.self_attn.q_proj.bias", "1 unknown"],
    );
    check(
        "shape",
        &|c| {
            replace(c, &|w| {
                drop(w.insert("model.norm.weight".into(), Tensor::zeros(71, DType::F32, &Device::Cpu).unwrap()));
            });
        },
        &["model.norm.weight", "[71]", "[72]"],
    );
    check(
        "truncated",
        &|c| {
            let bytes = std::fs::read(c.file("model.safetensors")).unwrap();
            std::fs::write(c.file("model.safetensors"), &bytes[..bytes.len() - 100]).unwrap();
        },
        &["model.safetensors", "the file is damaged"],
    );
    // A shard that the index names is absent.
    let changed = Changed::new("mistral", "shard");
    std::fs::remove_file(changed.file("model-00003-of-00005.safetensors")).unwrap();
    assert!(refused(&changed.0).to_string().contains("model-00003-of-00005.safetensors"));
    let error = refused(&recorded("bert"));
    assert!(error.to_string().contains("load_encoder"), "{error}");
    let unused = refused(&PathBuf::from("/no/such/model"));
    assert!(matches!(unused.kind(), Some(ErrorKind::Path { .. })), "{unused}");
}

#[test]
fn unknown_fields_and_tensors_can_be_allowed_by_name() {
    let changed = Changed::new("llama_gqa", "allowed");
    changed.set("training_stage", json!("final"));
    let mut weights = changed.weights();
    weights.insert("probe.weight".into(), Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap());
    changed.write(&weights);
    assert!(refused(&changed.0).to_string().contains("training_stage"));
    let path = changed.0.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let options = LoadOptions {
            ignored_fields: vec!["training_stage".into()],
            ignored_tensors: vec!["probe.weight".into()],
            ..LoadOptions::default()
        };
        models::load_with(&path, &mesh, DataParallel::new(["dp"]), &options).map(drop)
    })
    .unwrap();
}

/// Runs a body with a model on `tp` ranks and returns what the first rank does.
fn with_model<T: Send + 'static>(
    name: &str,
    tp: usize,
    body: impl Fn(&PretrainedModel, &DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> T {
    let path = recorded(name);
    let run = move |world: World| {
        let mesh = world.mesh([("tp", world.size())])?;
        body(&models::load(&path, &mesh, TensorParallel::new("tp"))?, &mesh)
    };
    ThreadWorld::new(tp).unwrap().run(run).unwrap().swap_remove(0)
}

#[test]
fn a_cache_that_is_filled_in_any_steps_gives_the_logits_of_one_pass() {
    // Windows, local and global layers, learned positions, more ranks than key heads.
    for (model, ranks) in [("llama_gqa", 2), ("mistral", 3), ("gemma3", 5), ("gpt2", 2), ("qwen2_moe", 2)] {
        with_model(model, ranks, move |model, mesh| {
            let all: Vec<u32> = (0..60).map(|i| 3 + (i * 37 + i * i) % 80).collect();
            let whole = full(&model.forward(&ids_of(mesh, &all)?)?)?;
            for steps in [vec![60], vec![1; 60], vec![7, 1, 1, 20, 3, 28], vec![59, 1]] {
                let (mut cache, mut from, mut found) = (KvCache::new(), 0, Vec::new());
                for step in steps {
                    let ids = ids_of(mesh, &all[from..from + step])?;
                    found.extend(full(&model.forward_cached_all(&ids, &mut cache)?)?);
                    from += step;
                }
                assert_eq!(cache.len(), 60);
                assert_close(&found, &whole, "cached logits");
            }
            Ok(())
        });
    }
}

#[test]
fn a_cache_grows_in_blocks_and_a_window_bounds_it() {
    let bytes = |model: &str, ranks: usize, tokens: usize| {
        with_model(model, ranks, move |model, mesh| {
            let mut cache = KvCache::new();
            let mut sizes = Vec::new();
            for i in 0..tokens {
                model.forward_cached(&ids_of(mesh, &[IDS[i % IDS.len()]])?, &mut cache)?;
                sizes.push(cache.bytes());
            }
            Ok(sizes)
        })
    };
    // 3 layers, keys and values, 3 key heads of 8 features in f32, 128 positions at a time.
    let grown = bytes("llama_gqa", 1, 130);
    assert_eq!((grown[0], grown[127]), (3 * 2 * 3 * 8 * 4 * 128, grown[0]));
    assert!(grown[128] > grown[0], "{}", grown[128]);
    // The first of two ranks has two of the three key heads.
    assert_eq!(bytes("llama_gqa", 2, 1)[0], grown[0] / 3 * 2);
    // A window of 8 positions needs one block, however many tokens there are.
    let windowed = bytes("mistral", 1, 300);
    assert!(windowed.iter().all(|bytes| *bytes == windowed[0]), "{windowed:?}");
}

#[test]
fn a_cache_refuses_other_rows_and_positions_that_do_not_exist() {
    with_model("gpt2", 2, |model, mesh| {
        let mut cache = KvCache::with_left_padding(vec![1, 0]);
        let error = model.forward_cached(&ids_of(mesh, &IDS)?, &mut cache).unwrap_err().to_string();
        assert!(error.contains("1 row(s) for a cache of 2"), "{error}");
        let long: Vec<u32> = (0..97).collect();
        let error = model.forward_cached(&ids_of(mesh, &long)?, &mut KvCache::new()).unwrap_err().to_string();
        assert!(error.contains("97 positions") && error.contains("96"), "{error}");
        Ok(())
    });
}

#[test]
fn gradients_are_those_of_one_rank_in_every_layout() {
    for model in ["qwen2_moe", "olmoe", "gemma2", "gpt_neox"] {
        let squares = |mesh: &'static str, fully: bool| {
            let path = recorded(model);
            let axes: Mesh = mesh.parse().unwrap();
            let size = axes.size();
            let run = move |world: World| {
                let mesh = world.device_mesh(axes.clone())?;
                let options = LoadOptions::default();
                let model = match fully {
                    true => models::load_with(&path, &mesh, FullyShard::new(["dp"]), &options)?.0,
                    false => models::load_with(&path, &mesh, TensorParallel::new("tp"), &options)?.0,
                };
                let make = |shift: usize| {
                    DTensor::from_fn((4, 6), DType::I64, &mesh, batch_placements(mesh.mesh()), move |i| {
                        ((i[0] * 31 + (i[1] + shift) * 17) % 90) as f64
                    })
                };
                let grads = model.batch_loss(&[make(0)?, make(1)?])?.backward()?;
                let mut found = Vec::new();
                for (path, param) in model.named_parameters() {
                    let full = grads.get(&param.get())?.full_tensor()?;
                    found.push((path, full.sqr()?.sum_all()?.to_scalar::<f32>()?));
                }
                Ok(found)
            };
            ThreadWorld::new(size).unwrap().run(run).unwrap().swap_remove(0)
        };
        let expected = squares("tp=1", false);
        for (mesh, fully) in [("tp=3", false), ("dp=2,tp=2", false), ("dp=3", true)] {
            for ((path, got), (_, want)) in squares(mesh, fully).iter().zip(&expected) {
                assert!((got - want).abs() <= 1e-3 * want.abs() + 1e-9, "{model} {path} on {mesh}: {got} {want}");
                assert!(*want > 0.0, "{model} {path} has no gradient");
            }
        }
    }
}
