//! Frozen parameters: no gradients, no communication for them, and a state that stays.

use shardwise::checkpoint;
use shardwise::models::{GptConfig, Model, build};
use shardwise::nn::Linear;
use shardwise::optim::ParamGroup;
use shardwise::plan::{
    ColwiseParallel, FullyShard, RowwiseParallel, ShardingPlan, ShardingPlanner, TensorParallel, fully_shard,
    parallelize_module, shard_module,
};
use shardwise::prelude::*;
use shardwise_test_suites::scratch::Scratch;

use crate::fsdp::net::*;

fn freeze(net: &impl Module, is_frozen: impl Fn(&str) -> bool) {
    net.named_parameters().iter().for_each(|(name, param)| param.set_requires_grad(!is_frozen(name)));
}

#[test]
fn reductions_carry_trained_elements_only_and_training_equals_one_device() {
    // frozen before or after the model is sharded
    for (way, before) in [(&WAYS[0], true), (&WAYS[0], false), (&WAYS[1], false), (&WAYS[2], false), (&WAYS[5], false)]
    {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            let net = match before {
                false => way.build(&mesh, 8, DType::F64)?,
                true => {
                    mesh.manual_seed(5);
                    let net = Net::new(&Builder::new(&mesh).dtype(DType::F64), 8, 2)?;
                    freeze(&net, |name| name.ends_with("weight"));
                    let plan = FullyShard::new(way.shard).plan(&net, &mesh)?;
                    shard_module(&net, &mesh, &plan)?;
                    net
                }
            };
            let (one, plain) = reference(&world, 8, DType::F64)?;
            freeze(&net, |name| name.ends_with("weight"));
            freeze(&plain, |name| name.ends_with("weight"));
            assert!(!net.head.weight.requires_grad() && net.head.bias.as_ref().unwrap().requires_grad());
            let (mut ours, mut theirs) = (AdamW::default().over(&net)?, AdamW::default().over(&plain)?);
            assert_eq!(ours.params().count(), 8);
            for step in 0..3 {
                let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
                let loss = net.loss(&x, &target, step == 1)?;
                world.trace().clear();
                let gradients = loss.backward()?;
                assert_eq!(gradients.len(), 8);
                ours.step(gradients)?;
                // All reductions together send the elements of the biases (8 + 2 * (8 + 16 + 8) + 3), not of the weights. Tensor
                // parallel layers reduce activations as well.
                let sent = bytes(&world, "reduce_scatter") + bytes(&world, "all_reduce");
                if !way.name.contains("TP") {
                    assert!(sent > 0 && sent <= 2 * 8 * 75, "{}: {sent}", way.name);
                }
                let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
                theirs.step(plain.loss(&x, &target, false)?.backward()?)?;
            }
            assert_same_parameters(&net, &plain, 1e-9, way.name)
        };
        launch(way.ranks(), run).unwrap();
    }
}

#[test]
fn layers_are_frozen_and_trained_again_later() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 6, DType::F64)?, reference(&world, 6, DType::F64)?);
        let (mut ours, mut theirs) = (AdamW::default().over(&net)?, AdamW::default().over(&plain)?);
        for step in 0..5 {
            // every second layer in the middle; nothing has a gradient in step 2
            let is_frozen = |name: &str| match step {
                1 | 3 => name.contains("up") || name.contains("first"),
                2 => true,
                _ => false,
            };
            freeze(&net, is_frozen);
            freeze(&plain, is_frozen);
            for (net, mesh, placed, optimizer) in
                [(&net, &mesh, way.batch(), &mut ours), (&plain, &one, vec![Replicate], &mut theirs)]
            {
                let (x, target) = batch(mesh, &placed, DType::F64, step)?;
                // used three times, once without recording
                no_grad(|| net.loss(&x, &target, false))?;
                let loss = net.loss(&x, &target, false)?.add(&net.loss(&x.mul_scalar(0.5)?, &target, false)?)?;
                match step {
                    2 => assert!(loss.backward().unwrap_err().to_string().contains("requires_grad")),
                    _ => optimizer.step(loss.backward()?)?,
                }
            }
            assert_same_parameters(&net, &plain, 1e-9, &format!("step {step}"))?;
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn plans_styles_conversions_and_loads_keep_a_parameter_frozen() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let net = Net::new(&Builder::new(&mesh), 8, 1)?;
        let (up, down) = (&net.blocks[0].up, &net.blocks[0].down);
        up.weight.set_requires_grad(false);
        down.weight.set_requires_grad(false);
        parallelize_module(
            &net,
            &mesh,
            &[("blocks.0.up", &ColwiseParallel::new("tp")), ("blocks.0.down", &RowwiseParallel::new("tp"))],
        )?;
        assert_eq!(up.weight.get().placements(), [Replicate, Shard(0)]);
        let plan = TensorParallel::new("tp").and(FullyShard::new(["dp"])).plan(&net, &mesh)?;
        shard_module(&net, &mesh, &plan)?;
        let state = net.state_dict();
        net.to_dtype(DType::F64)?;
        net.to_dtype(DType::F32)?;
        net.load_state_dict(&state)?;
        for (name, param) in net.named_parameters() {
            assert_eq!(
                param.requires_grad(),
                !["blocks.0.up.weight", "blocks.0.down.weight"].contains(&name.as_str()),
                "{name}"
            );
        }
        let (x, target) = batch(&mesh, &[Shard(0), Replicate], DType::F32, 0)?;
        assert_eq!(net.loss(&x, &target, false)?.backward()?.len(), 8);
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn the_optimizer_state_of_a_parameter_that_was_frozen_later_is_saved_and_used_again() {
    let scratch = Scratch::new("frozen-state");
    let path = scratch.0.join("run");
    let run = move |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let groups = |net: &Net| -> Result<ShardedOptimizer> {
            let (biases, weights): (Vec<_>, Vec<_>) =
                net.named_parameters().into_iter().partition(|(name, _)| name.ends_with("bias"));
            let mut optimizer = ShardedOptimizer::new(weights, ParamGroup::new(AdamW::default()).with_lr(0.01))?;
            optimizer.add_param_group(biases, ParamGroup::new(AdamW::default()).with_lr(0.02))?;
            Ok(optimizer)
        };
        let step = |net: &Net, optimizer: &mut ShardedOptimizer, number: usize| {
            let (x, target) = batch(&mesh, &way.batch(), DType::F64, number)?;
            optimizer.step(net.loss(&x, &target, false)?.backward()?)
        };
        let net = way.build(&mesh, 6, DType::F64)?;
        let mut optimizer = groups(&net)?;
        step(&net, &mut optimizer, 0)?;
        net.first.set_requires_grad(false);
        step(&net, &mut optimizer, 1)?;
        let state = optimizer.state_dict()?;
        assert_eq!(state.params["first.weight"].numbers["step"], 1.0);
        assert_eq!(state.params["head.weight"].numbers["step"], 2.0);
        assert!(numbers(&state.params["first.weight"].tensors["exp_avg"].full_tensor()?).iter().any(|x| *x != 0.0));
        checkpoint::save_from(&world, &path, (&net, &optimizer))?;
        let again = way.build(&mesh, 6, DType::F64)?;
        let mut loaded = groups(&again)?;
        checkpoint::load_into(&world, &path, (&again, &mut loaded))?;
        // a load does not freeze: the program says what is trained
        assert!(again.first.weight.requires_grad());
        net.first.set_requires_grad(true);
        step(&net, &mut optimizer, 2)?;
        step(&again, &mut loaded, 2)?;
        assert_same_parameters(&net, &again, 0.0, "resumed")?;
        assert_eq!(loaded.state_dict()?.params["first.weight"].numbers["step"], 2.0);
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn a_transformer_with_any_pattern_of_trained_parameters_communicates_no_more_than_with_all() {
    type IsTrained = fn(&str) -> bool;
    // PyTorch's seven patterns: what is trained
    let patterns: [(&str, IsTrained); 7] = [
        ("all", |_| true),
        ("all but attention", |name| !name.contains("attention")),
        ("all but mlp", |name| !name.contains("mlp") && !name.contains("up") && !name.contains("down")),
        ("norms", |name| name.contains("norm")),
        ("head", |name| name.starts_with("head") || name.starts_with("output")),
        ("biases", |name| name.ends_with("bias")),
        ("tables", |name| name.contains("embed") || name.contains("tokens") || name.contains("positions")),
    ];
    let run = move |world: World| {
        let config = GptConfig {
            n_layers: 2,
            d_model: 16,
            d_ff: 32,
            n_heads: 2,
            seq_len: 4,
            vocab_size: 12,
            ..GptConfig::default()
        };
        let mesh = world.mesh([("tp", 2)])?;
        let one = alone(&world)?;
        let model = |mesh: &DeviceMesh| {
            mesh.manual_seed(3);
            build(&config, &ShardingPlan::new(), mesh, DType::F64)
        };
        let (ours, plain) = (model(&mesh)?, model(&one)?);
        shard_module(&ours, &mesh, &TensorParallel::new("tp").plan(&ours, &mesh)?)?;
        let ids = |mesh: &DeviceMesh, salt: usize| {
            DTensor::from_fn((2, 4), DType::I64, mesh, [Replicate], move |i| ((i[0] * 5 + i[1] * 3 + salt) % 12) as f64)
        };
        ours.eval();
        plain.eval();
        let mut most = None;
        for (name, is_trained) in patterns {
            freeze(&ours, |path| !is_trained(path));
            freeze(&plain, |path| !is_trained(path));
            if ours.trainable_parameters().is_empty() {
                continue;
            }
            let loss = ours.batch_loss(&[ids(&mesh, 0)?, ids(&mesh, 1)?])?;
            world.trace().clear();
            let found = loss.backward()?.in_param_layout()?;
            let now = calls(&world).len();
            assert!(now <= *most.get_or_insert(now), "{name}: {now} collectives");
            let expected = plain.batch_loss(&[ids(&one, 0)?, ids(&one, 1)?])?.backward()?;
            assert_eq!(found.len(), expected.len(), "{name}");
            for ((path, a), (_, b)) in ours.trainable_parameters().into_iter().zip(plain.trainable_parameters()) {
                let (a, b) = (found.get(&a.get())?.full_tensor()?, expected.get(&b.get())?.full_tensor()?);
                // the model computes its loss in f32, of which half a unit in the last place is 6e-8
                assert!(distance(&a, &b) < 6e-8, "{name}, {path}: {}", distance(&a, &b));
            }
        }
        Ok(())
    };
    launch(2, run).unwrap();
}

/// A frozen layer, whose weight may be f8, before a trained one.
#[derive(Module)]
struct Stored {
    frozen: Linear,
    trained: Linear,
}

impl Stored {
    /// Weights that f8 holds, so that a run in f32 is the same.
    fn new(mesh: &DeviceMesh, dtype: DType) -> Result<Self> {
        let builder = Builder::new(mesh);
        let net = Stored {
            frozen: Linear::without_bias(&builder.child("frozen"), 6, 10)?,
            trained: Linear::new(&builder.child("trained"), 10, 3)?,
        };
        let placements = vec![Replicate; mesh.ndim()];
        let weight = |at: &[usize]| ((at[0] * 6 + at[1]) % 13) as f64 / 8.0 - 0.75;
        net.frozen.weight.set(&DTensor::from_fn((10, 6), dtype, mesh, placements, weight)?)?;
        net.frozen.weight.set_requires_grad(false);
        Ok(net)
    }

    fn loss(&self, x: &DTensor, target: &DTensor) -> Result<DTensor> {
        self.trained.forward(&self.frozen.forward(x)?.tanh()?)?.sub(target)?.square()?.mean_all()
    }
}

#[test]
fn a_frozen_f8_weight_is_gathered_as_such_beside_a_trained_one() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        mesh.manual_seed(5);
        let net = Stored::new(&mesh, DType::F8E4M3)?;
        fully_shard(&net, &mesh, &["dp"])?;
        let f8 = net.frozen.weight.clone();
        assert_eq!((f8.dtype(), f8.layout().placements()), (DType::F8E4M3, [Shard(0)].as_slice()));
        // Used as it is, it is refused.
        let (x, target) = batch(&mesh, &[Shard(0)], DType::F32, 0)?;
        let message = net.loss(&x, &target).unwrap_err().to_string();
        assert!(message.contains("f8e4m3") && message.contains("to_dtype(DType::F32)"), "{message}");
        f8.on_use(|shards| shards.redistribute([Replicate])?.to_dtype(DType::F32));
        let one = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let plain = Stored::new(&one, DType::F32)?;
        for ((_, from), (_, to)) in net.trained.named_parameters().into_iter().zip(plain.trained.named_parameters()) {
            to.set(&DTensor::from_local(&from.get().detach().full_tensor()?, &one, [Replicate])?)?;
        }
        let (mut ours, mut theirs) = (AdamW::default().over(&net)?, AdamW::default().over(&plain)?);
        for step in 0..3 {
            let (x, target) = batch(&mesh, &[Shard(0)], DType::F32, step)?;
            world.trace().clear();
            no_grad(|| net.frozen.forward(&x))?;
            // Each rank sends its 30 elements, of one byte, to the other.
            assert!(bytes(&world, "all_gather") <= 60, "{}", bytes(&world, "all_gather"));
            let gradients = net.loss(&x, &target)?.backward()?;
            assert_eq!(gradients.len(), 2);
            ours.step(gradients)?;
            let (x, target) = batch(&one, &[Replicate], DType::F32, step)?;
            theirs.step(plain.loss(&x, &target)?.backward()?)?;
        }
        for ((name, a), (_, b)) in net.trained.named_parameters().into_iter().zip(plain.trained.named_parameters()) {
            let (a, b) = (numbers(&a.get().full_tensor()?), numbers(&b.get().full_tensor()?));
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-6), "{name}: {a:?} {b:?}");
        }
        assert_eq!((f8.dtype(), f8.requires_grad()), (DType::F8E4M3, false));
        let stored = f8.get().to_dtype(DType::F32)?.full_tensor()?;
        assert_eq!(numbers(&stored), numbers(&plain.frozen.weight.get().full_tensor()?));
        Ok(())
    };
    launch(2, run).unwrap();
}
