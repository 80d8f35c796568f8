//! Language models: the same losses in every layout, and the collectives of each plan.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::Tensor;
use shardwise::mesh::{Link, Network};
use shardwise::models::{
    DataParallelMode, GptConfig, LlamaConfig, ModelConfig, ModelSpec, ParallelismConfig, StepOptions, batch_placements,
    build, estimate_step, export, import, search_plan,
};
use shardwise::nn::{Builder, ModuleItem};
use shardwise::optim::{AdamW, ParamGroup, ShardedOptimizer, clip_grad_norm};
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;

const BATCH: usize = 16;
const LENGTH: usize = 16;

fn gpt() -> GptConfig {
    GptConfig {
        vocab_size: 40,
        seq_len: LENGTH,
        d_model: 16,
        n_layers: 2,
        n_heads: 4,
        d_ff: 32,
        ..GptConfig::default()
    }
}

fn llama() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 40,
        seq_len: LENGTH,
        d_model: 16,
        n_layers: 2,
        n_heads: 4,
        n_kv_heads: 2,
        d_ff: 24,
        ..LlamaConfig::default()
    }
}

fn parallelism(data_parallel: DataParallelMode, tensor_parallel: bool, sequence_parallel: bool) -> ParallelismConfig {
    ParallelismConfig { data_parallel, tensor_parallel, sequence_parallel }
}

/// Meshes, each with a kind of parallelism.
fn ways() -> Vec<(&'static str, ParallelismConfig)> {
    vec![
        ("dp=4", parallelism(DataParallelMode::Replicate, false, false)),
        ("dp=3", parallelism(DataParallelMode::FullyShard, false, false)),
        ("tp=2", parallelism(DataParallelMode::Replicate, true, false)),
        ("tp=2", parallelism(DataParallelMode::Replicate, true, true)),
        ("dp=2,tp=2", parallelism(DataParallelMode::FullyShard, true, false)),
    ]
}

fn batch(mesh: &DeviceMesh, step: usize) -> Result<(DTensor, DTensor)> {
    let tokens = move |shift: usize| move |i: &[usize]| ((i[0] * 11 + (i[1] + shift) * 7 + step * 5) % 40) as f64;
    let make = |shift| DTensor::from_fn((BATCH, LENGTH), DType::U32, mesh, batch_placements(mesh), tokens(shift));
    Ok((make(0)?, make(1)?))
}

/// The losses of some steps, with clipping, and the final weights.
fn train(
    config: &ModelConfig,
    plan: &ShardingPlan,
    mesh: &DeviceMesh,
    dtype: DType,
    steps: usize,
) -> Result<(Vec<f32>, BTreeMap<String, Tensor>)> {
    mesh.manual_seed(3);
    let model = build(config, plan, mesh, dtype)?;
    let group = ParamGroup::new(AdamW::default()).with_lr(0.01).with_master();
    let mut optimizer = ShardedOptimizer::new(model.named_parameters(), group)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let (ids, targets) = batch(mesh, step % 2)?;
        let loss = model.loss(&ids, &targets)?;
        let params: Vec<Param> = model.named_parameters().into_iter().map(|(_, param)| param).collect();
        let (gradients, _) = clip_grad_norm(loss.backward()?, &params, 1.0, 2.0)?;
        optimizer.step(gradients)?;
        losses.push(loss.item::<f32>()?);
    }
    Ok((losses, export(&model)?))
}

/// The same on a mesh, in a world of its size: losses and weights.
fn trained(config: &ModelConfig, plan: &ShardingPlan, mesh: &str, dtype: DType, steps: usize) -> (Vec<f32>, Vec<f32>) {
    let (config, plan, mesh) = (config.clone(), plan.clone(), mesh.parse::<Mesh>().unwrap());
    let ranks = mesh.size();
    let run = move |world: World| {
        let (losses, weights) = train(&config, &plan, &world.device_mesh(mesh.clone())?, dtype, steps)?;
        let mut numbers = Vec::new();
        for weight in weights.values() {
            numbers.extend(weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok((losses, numbers))
    };
    ThreadWorld::new(ranks).unwrap().run(run).unwrap().swap_remove(0)
}

fn close(a: &[f32], b: &[f32], tolerance: f32) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= tolerance * b.abs().max(1.0))
}

#[test]
fn a_seed_gives_the_same_losses_on_every_mesh_with_dropout_and_a_tied_head() {
    let configs = [
        ModelConfig::Gpt(GptConfig { dropout: 0.2, ..gpt() }),
        ModelConfig::Gpt(GptConfig { tied_head: true, ..gpt() }),
        ModelConfig::Llama(LlamaConfig { dropout: 0.2, tied_head: true, ..llama() }),
    ];
    for config in configs {
        let alone =
            parallelism(DataParallelMode::Replicate, false, false).plan(&config, &"dp=1".parse().unwrap()).unwrap();
        let (expected, weights) = trained(&config, &alone, "dp=1", DType::F32, 8);
        assert!(expected[6] < 0.9 * expected[0], "{expected:?}");
        for (mesh, parallelism) in ways() {
            let plan = parallelism.plan(&config, &mesh.parse().unwrap()).unwrap();
            let (losses, found) = trained(&config, &plan, mesh, DType::F32, 8);
            assert!(
                close(&losses, &expected, 1e-5),
                "{config:?} on {mesh}, {parallelism:?}: {losses:?}, not {expected:?}"
            );
            // Rounding grows where the optimizer divides by small numbers: a step is 0.01.
            assert!(close(&found, &weights, 1e-3), "{config:?} on {mesh}, {parallelism:?}");
        }
    }
}

/// The elements that dropout inside a model zeroed, in the order of the calls.
fn zeros(config: &ModelConfig, plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<Vec<Vec<u8>>> {
    mesh.manual_seed(9);
    let model = build(config, plan, mesh, DType::F32)?;
    let seen = Arc::new(Mutex::new(Vec::new()));
    model.walk("", &mut |path, item| {
        if let ModuleItem::Hooks(hooks) = item
            && path.ends_with("dropout.hooks")
        {
            let seen = Arc::clone(&seen);
            hooks.on_output(move |y| {
                let whole = y.detach().full_tensor()?.flatten_all()?.to_vec1::<f32>()?;
                seen.lock().unwrap().push(whole.iter().map(|&x| u8::from(x == 0.0)).collect());
                Ok(y.clone())
            });
        }
    });
    let (ids, targets) = batch(mesh, 0)?;
    model.loss(&ids, &targets)?;
    let seen = seen.lock().unwrap().clone();
    Ok(seen)
}

#[test]
fn dropout_drops_the_same_elements_in_every_layout() {
    let config = ModelConfig::Gpt(GptConfig { dropout: 0.3, ..gpt() });
    let masks = |mesh: &str, parallelism: ParallelismConfig| {
        let (config, mesh) = (config.clone(), mesh.parse::<Mesh>().unwrap());
        let plan = parallelism.plan(&config, &mesh).unwrap();
        let ranks = mesh.size();
        let run = move |world: World| zeros(&config, &plan, &world.device_mesh(mesh.clone())?);
        ThreadWorld::new(ranks).unwrap().run(run).unwrap().swap_remove(0)
    };
    let expected = masks("dp=1", parallelism(DataParallelMode::Replicate, false, false));
    // after the embeddings, and twice in each of the two blocks
    assert_eq!(expected.len(), 5);
    for mask in &expected {
        let dropped = mask.iter().filter(|&&zero| zero == 1).count() as f64 / mask.len() as f64;
        assert!((dropped - 0.3).abs() < 0.08, "{dropped}");
    }
    for (mesh, parallelism) in ways() {
        assert!(masks(mesh, parallelism) == expected, "{mesh}, {parallelism:?}");
    }
}

/// The collectives of one step without clipping, by operator and name.
fn collectives(
    config: &ModelConfig,
    mesh: &str,
    parallelism: ParallelismConfig,
) -> BTreeMap<(&'static str, &'static str), usize> {
    let (config, mesh) = (config.clone(), mesh.parse::<Mesh>().unwrap());
    let plan = parallelism.plan(&config, &mesh).unwrap();
    let ranks = mesh.size();
    let run = move |world: World| {
        let mesh = world.device_mesh(mesh.clone())?;
        let model = build(&config, &plan, &mesh, DType::F32)?;
        let mut optimizer = ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()))?;
        let (ids, targets) = batch(&mesh, 0)?;
        world.trace().clear();
        optimizer.step(model.loss(&ids, &targets)?.backward()?)?;
        let report = world.trace().report();
        Ok(report.0.into_iter().map(|(operator, call, total)| ((operator, call), total.calls)).collect())
    };
    ThreadWorld::new(ranks).unwrap().run(run).unwrap().swap_remove(0)
}

#[test]
fn every_plan_runs_exactly_the_expected_collectives() {
    let (replicated, sharded) = (DataParallelMode::Replicate, DataParallelMode::FullyShard);
    for layers in [1, 3] {
        let config = ModelConfig::Gpt(GptConfig { n_layers: layers, ..gpt() });
        let expect = |mesh: &str, parallelism: ParallelismConfig, expected: &[(&'static str, &'static str, usize)]| {
            // Products with and without a fused bias or activation are counted together.
            let mut calls = BTreeMap::new();
            for ((op, call), n) in collectives(&config, mesh, parallelism) {
                *calls
                    .entry((if matches!(op, "linear" | "linear_activation") { "einsum" } else { op }, call))
                    .or_insert(0) += n;
            }
            let found: Vec<_> = calls.into_iter().map(|((op, call), n)| (op, call, n)).collect();
            assert_eq!(found, expected, "{layers} layers on {mesh}, {parallelism:?}");
        };
        // How many targets count, the loss, and all gradients together.
        let loss = [("cross_entropy", "all_reduce", 1), ("div", "all_reduce", 1)];
        expect(
            "dp=4",
            self::parallelism(replicated, false, false),
            &[&loss[..], &[("gradients", "all_reduce", 1)]].concat(),
        );
        // Every matrix is gathered in the forward and in the backward pass, and its gradient is reduce-scattered; the two
        // embedding tables are not needed in the backward pass.
        let (gathers, scatters) = (("einsum", "all_gather", 12 * layers + 2), 6 * layers + 3);
        let fsdp = [
            ("add", "all_gather", 1),
            loss[0],
            loss[1],
            gathers,
            ("embedding", "all_gather", 1),
            ("gradients", "all_reduce", 1),
            ("redistribute", "reduce_scatter", scatters),
        ];
        expect("dp=4", self::parallelism(sharded, false, false), &fsdp);
        // Attention and MLP reduce once each in both passes, the embedding too. Of the logits one number per token is reduced; the
        // loss stays partial.
        let sums = 4 * layers + 2;
        let tp =
            [("cross_entropy", "all_reduce", 1), ("gradients", "all_reduce", 1), ("redistribute", "all_reduce", sums)];
        expect("tp=2", self::parallelism(replicated, true, false), &tp);
        // With sequence parallelism every all-reduce is a reduce-scatter and an all-gather; once more for the
        // gradient of the positions.
        let sequence =
            [tp[0], tp[1], ("redistribute", "all_gather", sums + 1), ("redistribute", "reduce_scatter", sums)];
        expect("tp=2", self::parallelism(replicated, true, true), &sequence);
        // Vectors have three different layouts; the gradients of each are reduced in one bucket.
        let both = [
            ("add", "all_gather", 1),
            ("cross_entropy", "all_reduce", 2),
            gathers,
            ("embedding", "all_gather", 1),
            ("gradients", "all_reduce", 3),
            ("redistribute", "all_reduce", sums),
            ("redistribute", "reduce_scatter", scatters),
        ];
        expect("dp=2,tp=2", self::parallelism(sharded, true, false), &both);
    }
}

#[test]
fn bf16_training_with_master_weights_follows_f32() {
    let config = ModelConfig::Llama(llama());
    let plan = parallelism(DataParallelMode::FullyShard, false, false).plan(&config, &"dp=2".parse().unwrap()).unwrap();
    let (expected, _) = trained(&config, &plan, "dp=2", DType::F32, 12);
    let (losses, _) = trained(&config, &plan, "dp=2", DType::BF16, 12);
    assert!(losses[11] < 0.8 * losses[0], "{losses:?}");
    // bf16 has 8 bits
    assert!(close(&losses, &expected, 0.02) && losses != expected, "{losses:?}, not {expected:?}");
}

#[test]
fn a_searched_plan_trains_like_any_other() {
    let config = ModelConfig::Gpt(gpt());
    let mesh = "dp=2,tp=2";
    let search = search_plan(&config, &mesh.parse().unwrap(), &StepOptions::new(BATCH, Network::THREADS)).unwrap();
    let best = search.trials[0].estimate.us();
    assert!(search.trials.len() > 4 && search.trials.iter().all(|trial| best <= trial.estimate.us()), "{search}");
    let alone = parallelism(DataParallelMode::Replicate, false, false).plan(&config, &"dp=1".parse().unwrap()).unwrap();
    let (expected, _) = trained(&config, &alone, "dp=1", DType::F32, 4);
    let (losses, _) = trained(&config, &search.plan, mesh, DType::F32, 4);
    assert!(close(&losses, &expected, 1e-5), "{losses:?}, not {expected:?}");
}

#[test]
fn a_search_shards_layers_on_a_fast_network_and_replicates_them_on_a_slow_one() {
    let config = GptConfig { d_model: 64, d_ff: 256, seq_len: 32, ..gpt() };
    let mesh: Mesh = "tp=2".parse().unwrap();
    let satellite = Network::one_host(Link { latency_us: 1e5, gb_per_s: 0.01 }).unwrap();
    let options = |network: &Network| StepOptions::new(8, network.clone());
    let search = |network: &Network| search_plan(&config, &mesh, &options(network)).unwrap();
    let (fast, slow) = (search(&Network::THREADS), search(&satellite));
    assert!(fast.plan.to_string().contains("tp: S("), "{fast}");
    assert!(!slow.plan.to_string().contains("tp: S("), "{slow}");
    let fast_plan_on_slow = estimate_step(&config, &fast.plan, &mesh, &options(&satellite)).unwrap();
    assert!(slow.estimate.us() < fast_plan_on_slow.us(), "{slow}");
    // a limit of memory that nothing fits into, and one rank too few
    let error = search_plan(&config, &mesh, &options(&satellite).memory_limit(1)).unwrap_err().to_string();
    assert!(error.contains("memory limit"), "{error}");
    let one_rank = Network::of_hosts([0], Link::THREADS, Link::THREADS).unwrap();
    let error = search_plan(&config, &mesh, &options(&one_rank)).unwrap_err().to_string();
    assert!(error.contains("the hosts of 1 rank(s)"), "{error}");
}

#[test]
fn invalid_configurations_are_rejected_before_anything_runs() {
    let plain = parallelism(DataParallelMode::Replicate, false, false);
    let tp = parallelism(DataParallelMode::Replicate, true, false);
    let sharded = parallelism(DataParallelMode::FullyShard, false, false);
    let sequence = parallelism(DataParallelMode::Replicate, false, true);
    let refused = |config: ModelConfig, mesh: &str, parallelism: ParallelismConfig, parts: &[&str]| {
        let error = parallelism.plan(&config, &mesh.parse().unwrap()).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    refused(ModelConfig::Gpt(gpt()), "dp=2,tp=2", plain, &["idle"]);
    refused(ModelConfig::Gpt(gpt()), "dp=2", tp, &["axis `tp`"]);
    refused(ModelConfig::Gpt(gpt()), "tp=2", parallelism(DataParallelMode::FullyShard, true, false), &["axis `dp`"]);
    refused(ModelConfig::Gpt(gpt()), "dp=2", sequence, &["sequence"]);
    refused(ModelConfig::Gpt(gpt()), "pp=2", sharded, &["axis `pp`", "`dp=2,tp=4`"]);
    refused(ModelConfig::Gpt(GptConfig { n_heads: 3, ..gpt() }), "dp=2", plain, &["width 16", "3 query heads"]);
    refused(ModelConfig::Gpt(GptConfig { n_layers: 0, ..gpt() }), "dp=2", plain, &["at least 1"]);
    refused(ModelConfig::Gpt(GptConfig { dropout: 1.0, ..gpt() }), "dp=2", plain, &["dropout 1"]);
    refused(ModelConfig::Llama(LlamaConfig { n_heads: 16, ..llama() }), "dp=2", plain, &["even"]);
    let axis = search_plan(&ModelConfig::Gpt(gpt()), &"pp=2".parse().unwrap(), &StepOptions::new(2, Network::THREADS))
        .unwrap_err()
        .to_string();
    assert!(axis.contains("axis `pp`"), "{axis}");
}

#[test]
fn weights_are_exported_and_imported_by_name_or_not_at_all() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let config = ModelConfig::Gpt(gpt());
        let plan = parallelism(DataParallelMode::FullyShard, false, false).plan(&config, &mesh)?;
        let (one, other) = (build(&config, &plan, &mesh, DType::F32)?, config.build(&Builder::new(&mesh))?);
        let weights = export(&one)?;
        let same = |a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>| -> Result<bool> {
            let numbers = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>().map_err(Error::from);
            let mut all = a.len() == b.len();
            for (name, t) in a {
                all &= numbers(t)? == numbers(&b[name])?;
            }
            Ok(all)
        };
        let before = export(&other)?;
        assert!(!same(&before, &weights)?);
        for (change, part) in [(0, "unknown name `extra`"), (1, "nothing for `lm_head.weight`"), (2, "[40, 15]")] {
            let mut wrong = weights.clone();
            match change {
                0 => drop(wrong.insert("extra".into(), weights["lm_head.weight"].clone())),
                1 => drop(wrong.remove("lm_head.weight")),
                _ => drop(wrong.insert("lm_head.weight".into(), weights["lm_head.weight"].narrow(1, 0, 15)?)),
            }
            let error = import(&other, &wrong).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
            assert!(same(&export(&other)?, &before)?);
        }
        import(&other, &weights)?;
        assert!(same(&export(&other)?, &weights)?);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}
