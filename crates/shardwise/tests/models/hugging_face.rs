//! Exports for Hugging Face, read by an independent forward pass that follows its conventions and shares no code with the
//! library.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{D, DType as Kind, Device, Tensor};
use serde_json::Value;
use shardwise::models::{
    DataParallelMode, GptConfig, LlamaConfig, ModelConfig, ParallelismConfig, build, check_export, export_hf,
};
use shardwise::prelude::*;

const IDS: [u32; 7] = [3, 17, 0, 39, 8, 8, 21];

/// An exported model: weights in f64, and the config.
struct Exported {
    weights: HashMap<String, Tensor>,
    config: Value,
}

type Done<T> = candle_core::Result<T>;

impl Exported {
    fn read(directory: &std::path::Path) -> Self {
        let weights = candle_core::safetensors::load(directory.join("model.safetensors"), &Device::Cpu).unwrap();
        let weights = weights.into_iter().map(|(name, t)| (name, t.to_dtype(Kind::F64).unwrap())).collect();
        let text = std::fs::read_to_string(directory.join("config.json")).unwrap();
        Exported { weights, config: serde_json::from_str(&text).unwrap() }
    }

    fn weight(&self, name: &str) -> &Tensor {
        self.weights.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.weights.keys()))
    }

    fn size(&self, name: &str) -> usize {
        self.config[name].as_u64().unwrap_or_else(|| panic!("{name} in {}", self.config)) as usize
    }

    /// `x` times a weight of shape `[out, in]`.
    fn linear(&self, x: &Tensor, name: &str) -> Done<Tensor> {
        x.matmul(&self.weight(&format!("{name}.weight")).t()?)
    }

    /// `x` times a weight of shape `[in, out]`, as in GPT-2's `Conv1D`.
    fn conv1d(&self, x: &Tensor, name: &str) -> Done<Tensor> {
        let (weight, bias) = (self.weight(&format!("{name}.weight")), self.weight(&format!("{name}.bias")));
        x.matmul(weight)?.broadcast_add(bias)
    }

    fn embedded(&self, name: &str, ids: &[u32]) -> Done<Tensor> {
        self.weight(name).index_select(&Tensor::new(ids, &Device::Cpu)?, 0)
    }

    fn head(&self, x: &Tensor, table: &str) -> Done<Tensor> {
        let tied = self.config["tie_word_embeddings"] == true;
        assert_eq!(tied, !self.weights.contains_key("lm_head.weight"));
        x.matmul(&self.weight(if tied { table } else { "lm_head.weight" }).t()?)
    }

    fn rms(&self, x: &Tensor, name: &str) -> Done<Tensor> {
        let eps = self.config["rms_norm_eps"].as_f64().unwrap();
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
        x.broadcast_div(&scale)?.broadcast_mul(self.weight(&format!("{name}.weight")))
    }

    fn layer_norm(&self, x: &Tensor, name: &str) -> Done<Tensor> {
        let eps = self.config["layer_norm_epsilon"].as_f64().unwrap();
        let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
        let x = x.broadcast_div(&scale)?.broadcast_mul(self.weight(&format!("{name}.weight")))?;
        x.broadcast_add(self.weight(&format!("{name}.bias")))
    }

    /// `modeling_llama.py`: cos and sin of `cat(freqs, freqs)`, and `rotate_half`.
    fn llama(&self, ids: &[u32]) -> Done<Tensor> {
        let (length, heads, key_heads) =
            (ids.len(), self.size("num_attention_heads"), self.size("num_key_value_heads"));
        let size = self.size("head_dim");
        assert_eq!(size * heads, self.size("hidden_size"));
        let theta = self.config["rope_theta"].as_f64().unwrap();
        let angle = |p: usize, i: usize| p as f64 * theta.powf(-2.0 * (i % (size / 2)) as f64 / size as f64);
        let angles: Vec<f64> = (0..length).flat_map(|p| (0..size).map(move |i| angle(p, i))).collect();
        let angles = Tensor::from_vec(angles, (length, size), &Device::Cpu)?;
        let rotate = |t: &Tensor| -> Done<Tensor> {
            let (a, b) = (t.narrow(1, 0, size / 2)?, t.narrow(1, size / 2, size / 2)?);
            t.mul(&angles.cos()?)? + Tensor::cat(&[&b.neg()?, &a], 1)?.mul(&angles.sin()?)?
        };
        let mut x = self.embedded("model.embed_tokens.weight", ids)?;
        for i in 0..self.size("num_hidden_layers") {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            let h = self.rms(&x, &at("input_layernorm"))?;
            let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|n| self.linear(&h, &at(&format!("self_attn.{n}"))));
            let (q, k, v) = (q?, k?, v?);
            let mut mixed = Vec::new();
            for head in 0..heads {
                let shared = head / (heads / key_heads);
                let part = |t: &Tensor, head: usize| t.narrow(1, head * size, size);
                mixed.push(attend(&rotate(&part(&q, head)?)?, &rotate(&part(&k, shared)?)?, &part(&v, shared)?)?);
            }
            x = (x + self.linear(&Tensor::cat(&mixed, 1)?, &at("self_attn.o_proj"))?)?;
            let h = self.rms(&x, &at("post_attention_layernorm"))?;
            let gate = self.linear(&h, &at("mlp.gate_proj"))?.silu()?;
            x = (x + self.linear(&(gate * self.linear(&h, &at("mlp.up_proj"))?)?, &at("mlp.down_proj"))?)?;
        }
        self.head(&self.rms(&x, "model.norm")?, "model.embed_tokens.weight")
    }

    /// `modeling_gpt2.py`.
    fn gpt2(&self, ids: &[u32]) -> Done<Tensor> {
        let (heads, width) = (self.size("n_head"), self.size("n_embd"));
        let positions: Vec<u32> = (0..ids.len() as u32).collect();
        let mut x = self.embedded("transformer.wte.weight", ids)?;
        x = (x + self.embedded("transformer.wpe.weight", &positions)?)?;
        for i in 0..self.size("n_layer") {
            let at = |name: &str| format!("transformer.h.{i}.{name}");
            let fused = self.conv1d(&self.layer_norm(&x, &at("ln_1"))?, &at("attn.c_attn"))?;
            let size = width / heads;
            let part = |kind: usize, head: usize| fused.narrow(1, kind * width + head * size, size);
            let mixed = (0..heads).map(|head| attend(&part(0, head)?, &part(1, head)?, &part(2, head)?));
            let mixed = mixed.collect::<Done<Vec<_>>>()?;
            x = (x + self.conv1d(&Tensor::cat(&mixed, 1)?, &at("attn.c_proj"))?)?;
            let h = self.conv1d(&self.layer_norm(&x, &at("ln_2"))?, &at("mlp.c_fc"))?;
            assert_eq!(
                (self.config["activation_function"].as_str(), h.dims()[1]),
                (Some("gelu_new"), self.size("n_inner"))
            );
            x = (x + self.conv1d(&h.gelu()?, &at("mlp.c_proj"))?)?;
        }
        self.head(&self.layer_norm(&x, "transformer.ln_f")?, "transformer.wte.weight")
    }
}

/// Causal attention of one head over `[length, size]`.
fn attend(q: &Tensor, k: &Tensor, v: &Tensor) -> Done<Tensor> {
    let (length, size) = q.dims2()?;
    let mask = |i: usize, j: usize| if j > i { f64::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f64> = (0..length).flat_map(|i| (0..length).map(move |j| mask(i, j))).collect();
    let scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? / (size as f64).sqrt())?;
    let scores = (scores + Tensor::from_vec(mask, (length, length), &Device::Cpu)?)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(1)?)?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(1)?)?.matmul(&v.contiguous()?)
}

/// A directory that is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Scratch(std::env::temp_dir().join(format!("shardwise-hugging-face-{name}-{}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Exports a model from a mesh, all of whose weights say something, and gives its own logits for [`IDS`].
fn exported(config: &ModelConfig, mesh: &str, parallelism: ParallelismConfig, path: &std::path::Path) -> Vec<f32> {
    let mesh: Mesh = mesh.parse().unwrap();
    let plan = parallelism.plan(config, &mesh).unwrap();
    let (config, path, ranks) = (config.clone(), path.to_path_buf(), mesh.size());
    launch(ranks, move |world| {
        let mesh = world.device_mesh(mesh.clone())?;
        let model = build(&config, &plan, &mesh, DType::F32)?;
        for (salt, (_, param)) in model.named_parameters().into_iter().enumerate() {
            let now = param.get();
            let value = |i: &[usize]| {
                let place = i.iter().fold(salt + 1, |all, i| all * 61 + i);
                0.3 * (place as f64 * 1.7).sin() + if i.len() == 1 { 0.5 } else { 0.0 }
            };
            let whole = DTensor::from_fn(now.shape(), DType::F32, &mesh, vec![Replicate; mesh.ndim()], value)?;
            param.set(&whole.to_layout(now.layout())?)?;
        }
        export_hf(&world, &path, &model, &config)?;
        // the ids for every rank along dp, which shares the batch
        let ids = DTensor::from_fn((4, IDS.len()), DType::U32, &mesh, vec![Replicate; mesh.ndim()], |i| {
            f64::from(IDS[i[1]])
        })?;
        let logits = model.forward(&ids)?.select(0, 0)?;
        Ok(logits.full_tensor()?.flatten_all()?.to_vec1::<f32>()?)
    })
    .unwrap()
}

fn check(name: &str, config: &ModelConfig) {
    let parallelism =
        |data_parallel, tensor_parallel| ParallelismConfig { data_parallel, tensor_parallel, sequence_parallel: false };
    for (i, (mesh, parallelism)) in [
        ("dp=1", parallelism(DataParallelMode::Replicate, false)),
        ("dp=3", parallelism(DataParallelMode::FullyShard, false)),
        ("dp=2,tp=2", parallelism(DataParallelMode::FullyShard, true)),
    ]
    .into_iter()
    .enumerate()
    {
        let scratch = Scratch::new(&format!("{name}-{i}"));
        let own = exported(config, mesh, parallelism, &scratch.0);
        let read = Exported::read(&scratch.0);
        let found = if matches!(config, ModelConfig::Llama(_)) { read.llama(&IDS) } else { read.gpt2(&IDS) };
        let found = found.unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        assert_eq!(found.len(), own.len());
        let largest = found.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let far = found.iter().zip(&own).map(|(a, b)| (a - f64::from(*b)).abs()).fold(0.0, f64::max);
        assert!(largest > 0.1 && far < 1e-4 * largest, "{name} on {mesh}: {far} of {largest}");
    }
}

#[test]
fn llama_exports_give_the_same_logits() {
    let config = LlamaConfig {
        vocab_size: 40,
        seq_len: 16,
        d_model: 32,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        d_ff: 24,
        rope_theta: 500.0,
        ..LlamaConfig::default()
    };
    check("llama", &ModelConfig::Llama(config.clone()));
    check("llama-tied", &ModelConfig::Llama(LlamaConfig { tied_head: true, ..config }));
}

#[test]
fn gpt_exports_give_the_same_logits() {
    let config = GptConfig {
        vocab_size: 40,
        seq_len: 16,
        d_model: 16,
        n_layers: 2,
        n_heads: 4,
        d_ff: 24,
        ..GptConfig::default()
    };
    check("gpt", &ModelConfig::Gpt(config.clone()));
    check("gpt-tied", &ModelConfig::Gpt(GptConfig { tied_head: true, ..config }));
}

#[test]
fn an_export_does_not_overwrite_other_files() {
    let scratch = Scratch::new("refused");
    assert!(check_export(&scratch.0).is_ok());
    std::fs::create_dir(&scratch.0).unwrap();
    assert!(check_export(&scratch.0).is_ok());
    std::fs::write(scratch.0.join("model.safetensors"), "").unwrap();
    assert!(check_export(&scratch.0).is_ok());
    std::fs::write(scratch.0.join("thesis.txt"), "").unwrap();
    for path in [scratch.0.clone(), scratch.0.join("thesis.txt"), "..".into()] {
        let error = check_export(&path).unwrap_err().to_string();
        assert!(error.contains("name another directory"), "{error}");
    }
}
