//! Scenarios of PyTorch's FSDP2 tests in detail: shared parameters, some layers sharded only, conversions, states around a pass.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use shardwise::checkpoint::{self, SaveOptions, State};
use shardwise::nn::{Embedding, Linear, init::Init};
use shardwise::plan::{ShardingPlan, fully_shard, shard_module};
use shardwise::prelude::*;
use shardwise::{BackwardOptions, checkpoint_activations};
use shardwise_test_suites::scratch::Scratch;

use crate::fsdp::net::*;

/// A table and a head with one weight, and a layer between them.
#[derive(Module)]
struct Tied {
    table: Embedding,
    middle: Arc<Linear>,
    head: Linear,
}

impl Tied {
    fn new(builder: &Builder, rows: usize) -> Result<Self> {
        let table = Embedding::new(&builder.child("table"), rows, 6)?;
        let head = Linear::without_bias(&builder.child("head"), 6, rows)?;
        Ok(Tied {
            head: Linear { weight: table.weight.clone(), ..head },
            middle: Arc::new(Linear::new(&builder.child("middle"), 6, 6)?),
            table,
        })
    }

    /// Squares of all logits but one per row, for every row of the table once.
    fn loss(&self, ids: &DTensor, recompute: bool) -> Result<DTensor> {
        let x = self.table.forward(ids)?;
        let x = match recompute {
            false => self.middle.forward(&x)?.tanh()?,
            true => {
                let middle = Arc::clone(&self.middle);
                checkpoint_activations(&[&x], move |x| Ok(vec![middle.forward(&x[0])?.tanh()?]))?.swap_remove(0)
            }
        };
        self.head.forward(&x)?.sub_scalar(0.5)?.square()?.mean_all()
    }
}

fn ids(mesh: &DeviceMesh, placement: Placement, rows: usize) -> Result<DTensor> {
    let ids: Vec<i64> = (0..4 * rows as i64).map(|i| i % rows as i64).collect();
    let ids = Tensor::from_vec(ids, 4 * rows, &Device::Cpu)?;
    DTensor::distribute_tensor(&ids, mesh, [placement], None)
}

/// 4 n + 1 rows on 4 ranks: the last rank has fewer. Every row changes, on every rank, as on one device.
#[test]
fn a_shared_weight_is_one_parameter_and_all_its_rows_are_trained() {
    let scratch = Scratch::new("tied");
    let path = scratch.0.join("run");
    let run = move |world: World| {
        let (mesh, one, rows) = (world.mesh([("dp", 4)])?, alone(&world)?, 9);
        for recompute in [false, true] {
            mesh.manual_seed(5);
            one.manual_seed(5);
            let (net, plain) = (
                Tied::new(&Builder::new(&mesh).dtype(DType::F64), rows)?,
                Tied::new(&Builder::new(&one).dtype(DType::F64), rows)?,
            );
            let plan = ShardingPlan::new().param("**", [("dp", Shard(0))]);
            shard_module(&net, &mesh, &plan)?;
            // One parameter, under its first path, in modules, states and optimizers; the other path has its layout.
            let names: Vec<String> = net.named_parameters().into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, ["table.weight", "middle.weight", "middle.bias"]);
            assert_eq!(net.head.weight.get().local_shape(), [[3, 6], [3, 6], [3, 6], [0, 6]][world.rank()]);
            assert!(net.head.weight.get().shares_memory(&net.table.weight.get()));
            assert_eq!(net.state_dict().len(), 3);
            let (mut ours, mut theirs) = (AdamW::default().over(&net)?, AdamW::default().over(&plain)?);
            assert_eq!(ours.params().count(), 3);
            for _ in 0..3 {
                let before = numbers(&net.table.weight.get().to_local()?);
                let gradients = net.loss(&ids(&mesh, Shard(0), rows)?, recompute)?.backward()?;
                assert_eq!(gradients.len(), 3, "the gradients of both uses are one");
                ours.step(gradients)?;
                theirs.step(plain.loss(&ids(&one, Replicate, rows)?, false)?.backward()?)?;
                let after = numbers(&net.table.weight.get().to_local()?);
                assert!(before.iter().zip(&after).all(|(a, b)| a != b), "every row of rank {}", world.rank());
            }
            assert_same_parameters(&net, &plain, 1e-9, "tied")?;
            // Saved once, loaded into both.
            checkpoint::save_from(&world, &path, (&net, &ours))?;
            let stored = checkpoint::open(&path)?;
            assert!(
                stored.tensors.contains_key("model.table.weight") && !stored.tensors.contains_key("model.head.weight")
            );
            let again = Tied::new(&Builder::new(&mesh).dtype(DType::F64), rows)?;
            let mut optimizer = AdamW::default().over(&again)?;
            checkpoint::load_into(&world, &path, (&again, &mut optimizer))?;
            optimizer.step(again.loss(&ids(&mesh, Shard(0), rows)?, recompute)?.backward()?)?;
            ours.step(net.loss(&ids(&mesh, Shard(0), rows)?, recompute)?.backward()?)?;
            assert_same_parameters(&again, &net, 1e-12, "resumed")?;
            world.barrier()?;
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

#[test]
fn a_weight_that_is_used_without_an_input_has_its_gradient() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let weight = Builder::new(&mesh).dtype(DType::F64).param("weight", &[5, 3], Init::Normal(0.0, 1.0))?;
        weight.set(&weight.get().redistribute([Shard(0)])?)?;
        let gradients = weight.get().mul(&weight.get())?.sum_all()?.backward()?;
        let doubled: Vec<f64> = numbers(&weight.get().full_tensor()?).iter().map(|x| 2.0 * x).collect();
        assert_eq!(numbers(&gradients.get(&weight.get())?.full_tensor()?), doubled);
        assert_eq!(gradients.get(&weight.get())?.placements(), [Shard(0)]);
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn a_sharded_model_that_is_converted_trains_in_the_new_type() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 5, DType::F32)?, reference(&world, 5, DType::F32)?);
        let (mut ours, mut theirs) = (Adam::default().over(&net)?, Adam::default().over(&plain)?);
        let (x, target) = batch(&mesh, &way.batch(), DType::F32, 0)?;
        let pending = net.loss(&x, &target, false)?.backward()?;
        net.to_dtype(DType::F64)?;
        plain.to_dtype(DType::F64)?;
        // Gradients of the weights as they were do not step the new ones.
        let error = ours.step(pending).unwrap_err().to_string();
        assert!(error.contains("none of them of a parameter") && ours.steps() == 0, "{error}");
        for step in 0..10 {
            let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
            let gradients = net.loss(&x, &target, false)?.backward()?;
            assert!(gradients.iter().all(|gradient| gradient.dtype() == DType::F64));
            ours.step(gradients)?;
            let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
            theirs.step(plain.loss(&x, &target, false)?.backward()?)?;
        }
        for (name, param) in net.named_parameters() {
            assert_eq!((param.dtype(), param.get().to_local()?.dtype()), (DType::F64, DType::F64), "{name}");
        }
        assert!(ours.state_dict()?.params.values().flat_map(|p| p.tensors.values()).all(|t| t.dtype() == DType::F64));
        assert_same_parameters(&net, &plain, 1e-9, "converted")
    };
    launch(4, run).unwrap();
}

/// Only the layers between are sharded; those around them are replicated and reduced.
#[test]
fn layers_that_are_sharded_between_replicated_ones_train_like_one_device() {
    let run = |world: World| {
        let way = &WAYS[1];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 5, DType::F64)?, reference(&world, 5, DType::F64)?);
        shard_module(&net, &mesh, &ShardingPlan::new().param("blocks.0.**", [("dp", Shard(0))]))?;
        shard_module(&net, &mesh, &ShardingPlan::new().param("blocks.0.down.weight", [("dp", Shard(1))]))?;
        for (name, param) in net.named_parameters() {
            let expected = match name.as_str() {
                "blocks.0.down.weight" => Shard(1),
                name if name.starts_with("blocks.0") => Shard(0),
                _ => Replicate,
            };
            assert_eq!(param.get().placements(), [expected], "{name}");
        }
        let (mut ours, mut theirs) = (Adam::default().over(&net)?, Adam::default().over(&plain)?);
        for step in 0..5 {
            let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
            let gradients = net.loss(&x, &target, false)?.backward()?;
            // Also of what is sharded on dimension 1.
            assert!(gradients.iter().all(|gradient| gradient.to_local().unwrap().is_contiguous()));
            ours.step(gradients)?;
            let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
            theirs.step(plain.loss(&x, &target, false)?.backward()?)?;
        }
        net.check_replicas()?;
        assert!(net.named_parameters().iter().all(|(_, param)| param.get().to_local().unwrap().is_contiguous()));
        assert_same_parameters(&net, &plain, 1e-9, "some sharded")
    };
    launch(4, run).unwrap();
}

/// Three micro-batches, the head on chunks of the features, and one reduction at the end.
#[test]
fn chunked_losses_of_several_micro_batches_are_reduced_once() {
    let run = |world: World| {
        let way = &WAYS[0];
        let mesh = way.mesh(&world)?;
        let (net, (one, plain)) = (way.build(&mesh, 6, DType::F64)?, reference(&world, 6, DType::F64)?);
        let deferred = BackwardOptions { defer_reduction: true, ..BackwardOptions::default() };
        let mut sum: Option<Gradients> = None;
        let mut add = |new: Gradients| -> Result<()> {
            sum = Some(match sum.take() {
                Some(sum) => sum.accumulate(new)?,
                None => new,
            });
            Ok(())
        };
        let mut expected: Option<Gradients> = None;
        world.trace().clear();
        for step in 0..3 {
            let (x, target) = batch(&mesh, &way.batch(), DType::F64, step)?;
            let features = net.features(&x, false)?;
            let cut = features.detach().requires_grad();
            let mut of_features = None;
            for chunk in 0..2 {
                let rows = |t: &DTensor| t.narrow(0, ROWS / 2 * chunk, ROWS / 2);
                let loss = net.head.forward(&rows(&cut)?)?.sub(&rows(&target)?)?.square()?.sum_all()?;
                let gradients = loss.mul_scalar(1.0 / (3 * ROWS) as f64)?.backward_with(deferred)?;
                let part = gradients.get(&cut)?.clone();
                of_features = Some(match of_features {
                    Some(sum) => part.add(&sum)?,
                    None => part,
                });
                add(gradients)?;
            }
            let cotangent = of_features.expect("two chunks");
            add(features.backward_with(BackwardOptions { cotangent: Some(&cotangent), ..deferred })?)?;
            let (x, target) = batch(&one, &[Replicate], DType::F64, step)?;
            let new = plain.loss(&x, &target, false)?.backward()?;
            expected = Some(match expected {
                Some(sum) => sum.accumulate(new)?,
                None => new,
            });
        }
        assert_eq!(count(&world, "reduce_scatter"), 0, "{:?}", calls(&world));
        world.trace().clear();
        let sum = sum.expect("three").in_param_layout()?;
        assert_eq!(count(&world, "reduce_scatter"), 1, "{:?}", calls(&world));
        assert_same_gradients((&net, &sum), (&plain, &expected.expect("three")), 1e-12, "chunks")
    };
    launch(4, run).unwrap();
}

/// Widths 2 to 5: shards of different sizes, some of them empty.
#[test]
fn a_state_is_sharded_and_the_same_before_and_after_a_pass() {
    for way in [&WAYS[0], &WAYS[2], &WAYS[5]] {
        let run = move |world: World| {
            for width in 2..6 {
                let mesh = way.mesh(&world)?;
                let net = way.build(&mesh, width, DType::F32)?;
                net.set_reshard_after_forward(false, way.shard);
                let before = net.state_dict();
                let (x, target) = batch(&mesh, &way.batch(), DType::F32, 0)?;
                let loss = net.loss(&x, &target, false)?;
                let after = net.state_dict();
                let mut sharded = 0;
                for (name, param) in net.named_parameters() {
                    assert_eq!(
                        (before[&name].layout(), after[&name].layout()),
                        (&param.layout(), &param.layout()),
                        "{name}"
                    );
                    assert!(after[&name].shares_memory(&before[&name]) || after[&name].local_elem_count() == 0);
                    sharded += usize::from(param.layout().placements().iter().any(|p| p.shard_dim().is_some()));
                }
                assert!(sharded > 8, "{}: {sharded} sharded", way.name);
                let mut optimizer = AdamW::default().over(&net)?;
                optimizer.step(loss.backward()?)?;
                // Moments are sharded as the weights are.
                for (name, state) in optimizer.state_dict()?.params {
                    let param = optimizer.param(&name).expect("its own").layout();
                    assert!(state.tensors.values().all(|tensor| *tensor.layout() == param), "{}: {name}", way.name);
                }
                // A step does not change a state that was taken before, and the state brings the weights back.
                assert!(distance(&net.head.weight.get().full_tensor()?, &before["head.weight"].full_tensor()?) > 0.0);
                net.load_state_dict(&before)?;
                assert_eq!(distance(&net.head.weight.get().full_tensor()?, &before["head.weight"].full_tensor()?), 0.0);
            }
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}

/// Model and optimizer of every way of sharding load into every other one, from a save in the background: the next step is that of
/// one device. Width 5 divides by no number of ranks.
#[test]
fn a_run_goes_on_from_a_checkpoint_of_any_way_of_sharding() {
    const TP: Way = Way { name: "TP", axes: &[("tp", 4)], replicate: &[], shard: &[] };
    let ways = [&WAYS[0], &WAYS[1], &WAYS[2], &WAYS[5], &TP];
    let scratch = Scratch::new("ways");
    let root = scratch.0.clone();
    let run = move |world: World| {
        let step = |way: &Way, net: &Net, optimizer: &mut ShardedOptimizer, number: usize| -> Result<f64> {
            let (x, target) = batch(net.head.weight.get().device_mesh(), &way.batch(), DType::F64, number)?;
            let loss = net.loss(&x, &target, false)?;
            let found = value(&loss)?;
            optimizer.step(loss.backward()?)?;
            Ok(found)
        };
        let one = Way { name: "one", axes: &[("one", 1)], replicate: &[], shard: &[] };
        let (_, plain) = reference(&world, 5, DType::F64)?;
        let mut theirs = AdamW::default().over(&plain)?;
        let losses: Vec<f64> = (0..3).map(|i| step(&one, &plain, &mut theirs, i)).collect::<Result<_>>()?;
        for from in ways {
            let net = from.build(&from.mesh(&world)?, 5, DType::F64)?;
            let mut optimizer = AdamW::default().over(&net)?;
            (0..2).try_for_each(|i| step(from, &net, &mut optimizer, i).map(drop))?;
            let path = root.join(from.name);
            let state = State::of((&net, &optimizer))?;
            let saving = checkpoint::async_save(&world, &path, &state, &SaveOptions::default())?;
            // Training goes on while it is written.
            step(from, &net, &mut optimizer, 2)?;
            saving.wait()?;
            for to in ways {
                let again = to.build(&to.mesh(&world)?, 5, DType::F64)?;
                let mut optimizer = AdamW::default().over(&again)?;
                // Other weights and moments than those of the checkpoint.
                step(to, &again, &mut optimizer, 4)?;
                checkpoint::load_into(&world, &path, (&again, &mut optimizer))?;
                assert_eq!(optimizer.steps(), 2);
                let what = format!("{} to {}", from.name, to.name);
                let loss = step(to, &again, &mut optimizer, 2)?;
                assert!((loss - losses[2]).abs() < 1e-9, "{what}: {loss} {}", losses[2]);
                assert_same_parameters(&again, &plain, 1e-9, &what)?;
            }
        }
        Ok(())
    };
    launch(4, run).unwrap();
}

/// A mesh of an existing group has the ranks and coordinates of one that is built anew, and trains alike.
#[test]
fn a_mesh_of_an_existing_group_trains_like_a_new_one() {
    let run = |world: World| {
        let group = world.subgroup(&(0..world.size()).collect::<Vec<_>>())?;
        let (new, of_group) = (world.mesh([("dp", 2)])?, DeviceMesh::from_group(&world, "dp", &group)?);
        assert_eq!((new.ranks(), new.my_coordinate()), (of_group.ranks(), of_group.my_coordinate()));
        let train = |mesh: &DeviceMesh| -> Result<Net> {
            mesh.manual_seed(5);
            let net = Net::new(&Builder::new(mesh).dtype(DType::F64), 5, 1)?;
            fully_shard(&net, mesh, &["dp"])?;
            let mut optimizer = AdamW::default().over(&net)?;
            for step in 0..3 {
                let (x, target) = batch(mesh, &[Shard(0)], DType::F64, step)?;
                optimizer.step(net.loss(&x, &target, false)?.backward()?)?;
            }
            Ok(net)
        };
        assert_same_parameters(&train(&new)?, &train(&of_group)?, 0.0, "of a group")
    };
    launch(2, run).unwrap();
}
