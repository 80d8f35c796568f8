//! Models whose matrices stay quantized in memory: the same logits as with expanded weights, on any number of ranks, in less
//! memory.

use std::path::{Path, PathBuf};

use candle_core::Tensor;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::checkpoint::LoadReport;
use shardwise::models::{KvCache, LoadOptions, PretrainedModel, dry_load_model, export_hf, load_with};
use shardwise::nn::Module;
use shardwise::ops::BlockType;
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

const WIDTH: usize = 64;
/// Three blocks: on two ranks no rank has half of the columns in whole blocks.
const HIDDEN: usize = 96;
const VOCABULARY: usize = 40;

/// Name, shape and blocks of a tensor.
type Described = (String, Vec<usize>, Option<BlockType>);

/// The tensors of a llama of two layers.
fn tensors() -> Vec<Described> {
    let mut tensors: Vec<Described> = vec![
        ("token_embd.weight".to_string(), vec![VOCABULARY, WIDTH], Some(BlockType::Q8_0)),
        ("output_norm.weight".to_string(), vec![WIDTH], None),
    ];
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize], block| {
            tensors.push((format!("blk.{layer}.{name}.weight"), shape.to_vec(), block));
        };
        add("attn_norm", &[WIDTH], None);
        add("ffn_norm", &[WIDTH], None);
        add("attn_q", &[64, WIDTH], Some(BlockType::Q4_1));
        add("attn_k", &[32, WIDTH], Some(BlockType::Q4_0));
        add("attn_v", &[32, WIDTH], Some(BlockType::Q8_0));
        add("attn_output", &[WIDTH, 64], Some(BlockType::Q5_1));
        add("ffn_gate", &[HIDDEN, WIDTH], Some(BlockType::Q8_0));
        add("ffn_up", &[HIDDEN, WIDTH], Some(BlockType::Q4_1));
        add("ffn_down", &[WIDTH, HIDDEN], Some(BlockType::Q8_0));
    }
    tensors
}

const EXPERTS: usize = 4;

/// The tensors of a mixture of experts of two layers.
fn expert_tensors() -> Vec<Described> {
    let mut tensors = tensors();
    tensors.retain(|(name, ..)| !["ffn_gate", "ffn_up", "ffn_down"].iter().any(|mlp| name.contains(mlp)));
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize], block| {
            tensors.push((format!("blk.{layer}.{name}.weight"), shape.to_vec(), block));
        };
        add("ffn_gate_inp", &[EXPERTS, WIDTH], None);
        add("ffn_gate_exps", &[EXPERTS, HIDDEN, WIDTH], Some(BlockType::Q8_0));
        add("ffn_up_exps", &[EXPERTS, HIDDEN, WIDTH], Some(BlockType::Q4_1));
        add("ffn_down_exps", &[EXPERTS, WIDTH, HIDDEN], Some(BlockType::Q5_1));
    }
    tensors
}

const EXPERT_COUNTS: [(&str, u32); 2] = [("llama.expert_count", EXPERTS as u32), ("llama.expert_used_count", 2)];

/// Writes a model with random blocks.
fn write_model(path: &Path) {
    let mut rng = StdRng::seed_from_u64(3);
    write_file(path, &tensors(), &[], &mut rng);
}

/// Writes a GGUF file with these tensors, and with more counts in its metadata.
fn write_file(path: &Path, tensors: &[Described], more: &[(&str, u32)], rng: &mut StdRng) {
    let counts = [
        ("llama.block_count", 2u32),
        ("llama.context_length", 64),
        ("llama.embedding_length", WIDTH as u32),
        ("llama.feed_forward_length", HIDDEN as u32),
        ("llama.attention.head_count", 4),
        ("llama.attention.head_count_kv", 2),
    ];
    let counts = [&counts, more].concat();
    let mut file = b"GGUF".to_vec();
    file.extend(3u32.to_le_bytes());
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend((counts.len() as u64 + 2).to_le_bytes());
    let text = |file: &mut Vec<u8>, text: &str| {
        file.extend((text.len() as u64).to_le_bytes());
        file.extend(text.as_bytes());
    };
    text(&mut file, "general.architecture");
    file.extend(8u32.to_le_bytes());
    text(&mut file, "llama");
    for (key, count) in counts {
        text(&mut file, key);
        file.extend([4u32.to_le_bytes(), count.to_le_bytes()].concat());
    }
    text(&mut file, "llama.attention.layer_norm_rms_epsilon");
    file.extend([6u32.to_le_bytes(), 1e-5f32.to_le_bytes()].concat());
    let mut data = Vec::new();
    for (name, shape, block) in tensors {
        data.resize(data.len().next_multiple_of(32), 0u8);
        text(&mut file, name);
        file.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&n| file.extend((n as u64).to_le_bytes()));
        file.extend(block.map_or(0, BlockType::number).to_le_bytes());
        file.extend((data.len() as u64).to_le_bytes());
        let elements: usize = shape.iter().product();
        let Some(block) = block else {
            (0..elements).for_each(|_| data.extend(rng.random_range(0.5f32..1.5).to_le_bytes()));
            continue;
        };
        for _ in 0..elements / block.elements() {
            let start = data.len();
            data.extend((0..block.bytes()).map(|_| rng.random::<u8>()));
            // Matrices with elements of about 0.1: fewer bits have larger scales.
            let scale: u16 = if *block == BlockType::Q8_0 { 0x1400 } else { 0x2200 };
            data[start..start + 2].copy_from_slice(&(scale + rng.random_range(0..0x200)).to_le_bytes());
            if matches!(block, BlockType::Q4_1 | BlockType::Q5_1) {
                data[start + 2..start + 4].copy_from_slice(&(0xa400 + rng.random_range(0..0x200u16)).to_le_bytes());
            }
        }
    }
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

/// Logits of a prompt, those of a token after it with the cache, the bytes of this rank's parameters and what it read.
struct Outcome {
    prompt: Tensor,
    next: Tensor,
    held: usize,
    report: LoadReport,
}

fn run(path: &Path, ranks: usize, keep_quantized: bool) -> Outcome {
    let path = path.to_path_buf();
    launch(ranks, move |world| {
        let mesh = world.mesh([("tp", ranks)])?;
        let options = LoadOptions { keep_quantized, ..LoadOptions::default() };
        let (model, report): (PretrainedModel, _) = load_with(&path, &mesh, TensorParallel::new("tp"), &options)?;
        let mut cache = KvCache::new();
        // More rows than products with blocks as they are have, then one.
        let ids = DTensor::from_fn((2, 20), DType::U32, &mesh, [Replicate], |i| ((i[0] * 7 + i[1] * 3) % 40) as f64)?;
        let prompt = model.forward_cached_all(&ids, &mut cache)?.full_tensor()?;
        let one = DTensor::from_fn((2, 1), DType::U32, &mesh, [Replicate], |i| (i[0] + 5) as f64)?;
        let next = model.forward_cached(&one, &mut cache)?.full_tensor()?;
        let local = |param: &Param| param.get().local_elem_count() * param.dtype().size_in_bytes();
        let held = model.named_parameters().iter().map(|(_, param)| local(param)).sum();
        Ok(Outcome { prompt, next, held, report })
    })
    .unwrap()
}

fn difference(a: &Tensor, b: &Tensor) -> (f32, f32) {
    let largest = |t: &Tensor| t.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
    (largest(&(a - b).unwrap()), largest(b))
}

#[test]
fn quantized_models_give_the_logits_of_expanded_ones() {
    let scratch = Scratch::new("quantized-models");
    let path: PathBuf = scratch.0.join("model.gguf");
    write_model(&path);
    let expected = run(&path, 1, false);
    assert!(difference(&expected.prompt, &expected.prompt).1 > 1.0, "logits of some size");
    for ranks in [1, 2, 3] {
        let found = run(&path, ranks, true);
        for (a, b) in [(&found.prompt, &expected.prompt), (&found.next, &expected.next)] {
            let (error, size) = difference(a, b);
            assert!(error <= 1e-4 * size, "{ranks} ranks: {error} of {size}");
        }
        assert!(found.held * 3 < expected.held, "{} and {} bytes", found.held, expected.held);
        // What a rank reads is what it holds, and what a dry run says.
        assert_eq!(found.report.bytes as usize, found.held, "{ranks} ranks");
        let options = LoadOptions { keep_quantized: true, ..LoadOptions::default() };
        let mesh = Mesh::new([("tp", ranks)]).unwrap();
        let loads = dry_load_model(&path, &mesh, TensorParallel::new("tp"), &options).unwrap();
        assert_eq!((loads[0].tensor_bytes, loads[0].read_bytes), (found.held, found.held));
    }
    // Expanded weights are read as blocks too.
    assert!(expected.report.bytes < expected.held as u64 / 3, "{} bytes", expected.report.bytes);
}

/// On five ranks there are fewer blocks than ranks: some ranks have no part of the experts.
#[test]
fn quantized_experts_give_the_tokens_of_expanded_ones() {
    let scratch = Scratch::new("quantized-experts");
    let path: PathBuf = scratch.0.join("model.gguf");
    write_file(&path, &expert_tensors(), &EXPERT_COUNTS, &mut StdRng::seed_from_u64(5));
    let expected = run(&path, 1, false);
    let tokens = |logits: &Tensor| logits.argmax(1).unwrap().to_vec1::<u32>().unwrap();
    for ranks in [1, 2, 3, 5] {
        let found = run(&path, ranks, true);
        for (a, b) in [(&found.prompt, &expected.prompt), (&found.next, &expected.next)] {
            let (error, size) = difference(a, b);
            assert!(error <= 1e-4 * size, "{ranks} ranks: {error} of {size}");
        }
        assert_eq!(tokens(&found.next), tokens(&expected.next), "{ranks} ranks");
        assert!(found.held * 3 < expected.held, "{} and {} bytes", found.held, expected.held);
        // What a rank reads is what it holds, and what a dry run says.
        assert_eq!(found.report.bytes as usize, found.held, "{ranks} ranks");
        let options = LoadOptions { keep_quantized: true, ..LoadOptions::default() };
        let mesh = Mesh::new([("tp", ranks)]).unwrap();
        let loads = dry_load_model(&path, &mesh, TensorParallel::new("tp"), &options).unwrap();
        assert_eq!((loads[0].tensor_bytes, loads[0].read_bytes), (found.held, found.held));
    }
}

/// Experts with one stack that is not quantized are expanded altogether, and the rest of the model is not.
#[test]
fn experts_stay_quantized_together() {
    let scratch = Scratch::new("quantized-experts-mixed");
    let path: PathBuf = scratch.0.join("model.gguf");
    let mut tensors = expert_tensors();
    let up = tensors.iter_mut().find(|(name, ..)| name == "blk.1.ffn_up_exps.weight").unwrap();
    up.2 = None;
    write_file(&path, &tensors, &EXPERT_COUNTS, &mut StdRng::seed_from_u64(6));
    launch(2, move |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let options = LoadOptions { keep_quantized: true, ..LoadOptions::default() };
        let (model, _) = load_with(&path, &mesh, TensorParallel::new("tp"), &options)?;
        let dtype =
            |path: &str| model.named_parameters().into_iter().find(|(other, _)| other == path).unwrap().1.dtype();
        for stack in ["gate", "up", "down"] {
            assert_eq!(dtype(&format!("blocks.0.experts.experts.{stack}")), DType::U8);
            assert_eq!(dtype(&format!("blocks.1.experts.experts.{stack}")), DType::F32);
        }
        assert_eq!(dtype("blocks.1.attention.query.weight"), DType::U8);
        Ok(())
    })
    .unwrap();
}

/// Parameters that are not quantized, such as norms and adapters, have the gradients that they have with expanded experts.
#[test]
fn gradients_pass_through_quantized_experts() {
    let scratch = Scratch::new("quantized-experts-gradients");
    let path: PathBuf = scratch.0.join("model.gguf");
    write_file(&path, &expert_tensors(), &EXPERT_COUNTS, &mut StdRng::seed_from_u64(7));
    let gradient = |ranks: usize, keep_quantized: bool| -> Tensor {
        let path = path.clone();
        launch(ranks, move |world| {
            let mesh = world.mesh([("tp", ranks)])?;
            let options = LoadOptions { keep_quantized, ..LoadOptions::default() };
            let (model, _) = load_with(&path, &mesh, TensorParallel::new("tp"), &options)?;
            // So many rows that products expand the blocks: few rows are rounded, which gradients near zero show.
            let id = |i: &[usize]| ((i[0] * 11 + i[1] * 5 + i[1] * i[1]) % 40) as f64;
            let ids = DTensor::from_fn((4, 60), DType::I64, &mesh, [Replicate], id)?;
            let grads = model.loss(&ids, &ids)?.backward()?;
            let params = model.named_parameters();
            let (_, norm) = params.iter().find(|(path, _)| path == "blocks.0.before_mlp.weight").unwrap();
            grads.get(&norm.get())?.full_tensor()
        })
        .unwrap()
    };
    let expected = gradient(1, false);
    for ranks in [1, 2] {
        let (error, size) = difference(&gradient(ranks, true), &expected);
        assert!(error <= 1e-4 * size && size > 1e-3, "{ranks} ranks: {error} of {size}");
    }
}

#[test]
fn quantized_weights_are_not_exported() {
    let scratch = Scratch::new("quantized-export");
    let path = scratch.0.join("model.gguf");
    write_model(&path);
    let target = scratch.0.join("hf");
    let error = launch(2, move |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let options = LoadOptions { keep_quantized: true, ..LoadOptions::default() };
        let (model, _) = load_with(&path, &mesh, TensorParallel::new("tp"), &options)?;
        export_hf(&world, &target, &model, model.config())
    })
    .unwrap_err()
    .to_string();
    assert!(error.contains("quantized blocks") && error.contains("keep_quantized"), "{error}");
}

/// Another type in memory needs expanded weights.
#[test]
fn half_precision_weights_are_dequantized() {
    let scratch = Scratch::new("quantized-half");
    let path = scratch.0.join("model.gguf");
    write_model(&path);
    launch(1, move |world| {
        let mesh = world.mesh([("tp", 1)])?;
        let options = LoadOptions { keep_quantized: true, dtype: DType::BF16, ..LoadOptions::default() };
        let (model, _) = load_with(&path, &mesh, TensorParallel::new("tp"), &options)?;
        assert!(model.named_parameters().iter().all(|(_, param)| param.dtype() == DType::BF16));
        Ok(())
    })
    .unwrap();
}

/// A model in several files is that in one, from any of them or from their directory.
#[test]
fn split_files_are_one_model() {
    let scratch = Scratch::new("gguf-split");
    let whole = scratch.0.join("model.gguf");
    write_model(&whole);
    let expected = run(&whole, 1, false);
    let directory = scratch.0.join("split");
    std::fs::create_dir(&directory).unwrap();
    let mut rng = StdRng::seed_from_u64(3);
    let all = tensors();
    let names = ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"];
    for (number, (name, part)) in names.iter().zip([&all[..5], &all[5..]]).enumerate() {
        write_file(&directory.join(name), part, &[("split.no", number as u32), ("split.count", 2)], &mut rng);
    }
    for path in [directory.clone(), directory.join(names[0]), directory.join(names[1])] {
        let found = run(&path, 2, true);
        let (error, size) = difference(&found.prompt, &expected.prompt);
        assert!(error <= 1e-4 * size, "{}: {error} of {size}", path.display());
    }
    let refused = |path: &Path| shardwise::checkpoint::open(path).unwrap_err().to_string();
    std::fs::copy(directory.join(names[0]), scratch.0.join("renamed.gguf")).unwrap();
    assert!(refused(&scratch.0.join("renamed.gguf")).contains("file 1 of 2"));
    std::fs::copy(directory.join(names[0]), directory.join(names[1])).unwrap();
    assert!(refused(&directory).contains("needed file 2 of 2"));
    std::fs::remove_file(directory.join(names[1])).unwrap();
    assert!(refused(&directory).contains(names[1]));
}
