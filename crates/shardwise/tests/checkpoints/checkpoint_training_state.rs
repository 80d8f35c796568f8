//! Training runs saved and resumed in one call, in any layout, and exchanged with PyTorch's FSDP2 and AdamW.
//!
//! `tests/data/fsdp_adamw` was written by `tests/scripts/fsdp_adamw.py write`. With `SHARDWISE_PYTHON`, a Python with
//! PyTorch, PyTorch resumes from what is saved here.

use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device, Tensor};
use shardwise::checkpoint::{self, Format, SaveOptions, Series, State, named};
use shardwise::nn::{BatchNorm, Builder, Forward, Linear, Module};
use shardwise::ops::Reduction;
use shardwise::optim::{AdamW, OptimizerState, ParamGroup, Schedule, ShardedOptimizer};
use shardwise::prelude::*;
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::parameters::{algorithms, full_values, gradients, named as names, params};
use shardwise_test_suites::scratch::Scratch;

/// Shapes and placements for `ranks` ranks; the last parameter gets no gradients at first.
fn layouts(ranks: usize) -> Vec<(Vec<usize>, Vec<Placement>)> {
    let placement = if ranks == 3 { Replicate } else { Shard(0) };
    vec![(vec![5, 4], vec![placement]), (vec![7], vec![Shard(0)]), (vec![3, 2], vec![Shard(1)])]
}

/// A new optimizer loads what another saved, with a template and with `load_into`.
#[test]
fn a_new_optimizer_loads_every_moment_of_a_checkpoint() {
    for (i, algorithm) in algorithms().into_iter().enumerate() {
        let scratch = Scratch::new(&format!("moments-{i}"));
        let path = scratch.0.join("state");
        let place = path.clone();
        let schedule = Schedule::Cosine { warmup: 2, total: 9, end: 0.1 };
        let first = algorithm.clone();
        let expected = ThreadWorld::new(2).unwrap().run(move |world| {
            let mesh = world.mesh([("dp", 2)])?;
            mesh.manual_seed(41);
            DTensor::randn(3, &mesh, [Shard(0)])?;
            let own = params(&mesh, &layouts(2))?;
            let mut optimizer = ShardedOptimizer::new(names(&own), ParamGroup::new(first.clone()).with_lr(0.05))?;
            optimizer.set_schedule(schedule);
            (0..3).try_for_each(|t| optimizer.step(gradients(&own[..2], t)?))?;
            let values = State::map(names(&own).into_iter().map(|(name, param)| (name, param.get().detach())));
            let state = State::map([
                ("params", values),
                ("optimizer", State::try_from(&optimizer.state_dict()?)?),
                ("generator", State::from(mesh.generator().state())),
            ]);
            checkpoint::save(&world, place.join("by-hand"), &state)?;
            for format in [Format::Native, Format::Dcp] {
                let options = SaveOptions { format, ..SaveOptions::default() };
                let at = place.join(format!("{format:?}"));
                checkpoint::save_from_with(&world, at, (&optimizer, &mesh), &options)?;
            }
            (3..5).try_for_each(|t| optimizer.step(gradients(&own, t)?))?;
            full_values(&own)
        });
        let expected = expected.unwrap().swap_remove(0);
        ThreadWorld::new(3)
            .unwrap()
            .run(move |world| {
                let mesh = world.mesh([("dp", 3)])?;
                for way in ["by-hand", "Native", "Dcp"] {
                    let own = params(&mesh, &layouts(3))?;
                    let mut optimizer =
                        ShardedOptimizer::new(names(&own), ParamGroup::new(algorithm.clone()).with_lr(9.0))?;
                    let like = names(&own).into_iter().map(|(name, param)| (name, param.get().detach()));
                    let template = State::map([
                        ("params", State::map(like)),
                        ("optimizer", State::try_from(&optimizer.state_dict()?)?),
                    ]);
                    let loaded = checkpoint::load(&world, path.join("by-hand"), &template)?;
                    for (name, param) in names(&own) {
                        param.set(loaded.tensor(&format!("params.{name}"))?)?;
                    }
                    mesh.manual_seed(0);
                    if way == "by-hand" {
                        let state = OptimizerState::try_from(loaded.get("optimizer").unwrap())?;
                        optimizer.load_state_dict(&state)?;
                        optimizer.set_schedule(schedule);
                    } else {
                        let report = checkpoint::load_into(&world, path.join(way), (&mut optimizer, &mesh))?;
                        assert_eq!(report.unchecked_bytes, 0);
                        assert_eq!((optimizer.schedule(), mesh.generator().state().seed), (schedule, 41));
                        assert!(mesh.generator().state().offset > 0);
                    }
                    assert_eq!(optimizer.steps(), 3);
                    (3..5).try_for_each(|t| optimizer.step(gradients(&own, t)?))?;
                    assert_eq!(full_values(&own)?, expected, "{algorithm:?}, {way}");
                }
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn a_load_that_leaves_optimizer_state_unfilled_is_an_error() {
    let scratch = Scratch::new("unfilled");
    let path = scratch.0.join("state");
    let error = same_error_on_all_ranks(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let own = params(&mesh, &layouts(2))?;
        let group = ParamGroup::new(AdamW::default());
        let mut optimizer = ShardedOptimizer::new(names(&own), group.clone())?;
        optimizer.step(gradients(&own, 0)?)?;
        let saved = optimizer.state_dict()?;
        checkpoint::save(&world, &path, &State::map([("optimizer", State::try_from(&saved)?)]))?;
        // after a step, an empty map per parameter is not a valid state
        let mut empty = saved.clone();
        empty.params.values_mut().for_each(|param| *param = Default::default());
        let mut fresh = ShardedOptimizer::new(names(&own), group)?;
        let told = fresh.load_state_dict(&empty).unwrap_err().to_string();
        assert!(told.contains("no moments of any parameter after 1 step"), "{told}");
        // a single parameter may have had no gradient
        empty.params.insert("p0".into(), saved.params["p0"].clone());
        fresh.load_state_dict(&empty)?;
        empty.params.values_mut().for_each(|param| *param = Default::default());
        checkpoint::load(&world, &path, &State::map([("optimizer", State::try_from(&empty)?)])).map(drop)
    });
    for part in ["optimizer.state.p0.exp_avg", "empty map", "state_dict()"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[derive(Module)]
struct Net {
    inp: Linear,
    norm: BatchNorm,
    out: Linear,
}

impl Net {
    fn new(builder: &Builder) -> Result<Self> {
        Ok(Net {
            inp: Linear::without_bias(&builder.child("inp"), 6, 8)?,
            norm: BatchNorm::new(&builder.child("norm"), 8, 0.1, 1e-5)?,
            out: Linear::new(&builder.child("out"), 8, 3)?,
        })
    }

    fn step(&self, optimizer: &mut ShardedOptimizer, x: &DTensor, y: &DTensor) -> Result<()> {
        let hidden = self.norm.forward(&self.inp.forward(x)?)?.relu()?;
        let loss = self.out.forward(&hidden)?.mse_loss(y, Reduction::Mean)?;
        optimizer.step(loss.backward()?)
    }
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fsdp_adamw")
}

/// An f32 tensor of a `torch.save` file.
fn stored(path: &Path, key: &str) -> Tensor {
    let catalog = checkpoint::open(path).unwrap();
    let shape = catalog.tensor(key).unwrap().shape.clone();
    Tensor::from_raw_buffer(&catalog.read(key).unwrap(), DType::F32, &shape, &Device::Cpu).unwrap()
}

/// The network restored from PyTorch's checkpoint on a mesh of all ranks, with its optimizer, inputs and targets.
fn restored(world: &World) -> Result<(Net, ShardedOptimizer, DTensor, DTensor)> {
    let mesh = world.mesh([("dp", world.size())])?;
    let net = Net::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]))?;
    // default settings, which those of the checkpoint must replace
    let mut optimizer = ShardedOptimizer::new(net.named_parameters(), ParamGroup::new(AdamW::default()))?;
    checkpoint::load_into(world, data().join("checkpoint"), (&net, named("optim", &mut optimizer)))?;
    let group = &optimizer.groups()[0];
    assert_eq!((optimizer.steps(), group.lr), (3, 0.01));
    let expected = AdamW { betas: (0.8, 0.95), weight_decay: 0.1, ..AdamW::default() };
    assert_eq!(group.algorithm, expected.into());
    let input = |key: &str| DTensor::distribute_tensor(&stored(&data().join("next.pt"), key), &mesh, [Shard(0)], None);
    Ok((net, optimizer, input("x")?, input("y")?))
}

/// Compares parameters and running averages with those of PyTorch after its step.
fn compare(net: &Net, expected: &Path) -> Result<()> {
    for (name, tensor) in net.state_dict() {
        let numbers = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (found, expected) = (numbers(&tensor.full_tensor()?), numbers(&stored(expected, &format!("model.{name}"))));
        // Sums in another order differ in the last bits of f32; a step of AdamW is at most as large as its rate.
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() <= 2e-6 + 2e-6 * b.abs(), "{name}[{i}]: {a} instead of {b}");
        }
    }
    Ok(())
}

#[test]
fn training_resumes_from_pytorch_fsdp2_and_adamw_checkpoints() {
    for ranks in [1, 2, 3] {
        launch(ranks, move |world| {
            let (net, mut optimizer, x, y) = restored(&world)?;
            net.step(&mut optimizer, &x, &y)?;
            compare(&net, &data().join("next.pt"))
        })
        .unwrap();
    }
    // an optimizer of other groups or parameters is refused
    let error = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let net = Net::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]))?;
        let some = net.named_parameters().into_iter().take(2);
        let mut optimizer = ShardedOptimizer::new(some, ParamGroup::new(AdamW::default()))?;
        checkpoint::load_into(&world, data().join("checkpoint"), (&net, named("optim", &mut optimizer))).map(drop)
    });
    assert!(error.contains("5 parameters in group 0"), "{error}");
}

#[test]
fn pytorch_resumes_from_checkpoints_saved_here() {
    let scratch = Scratch::new("to-pytorch");
    let directory = scratch.0.clone();
    launch(3, move |world| {
        let (net, mut optimizer, x, y) = restored(&world)?;
        let options = SaveOptions { format: Format::Dcp, ..SaveOptions::default() };
        let parts = (&net, named("optim", &optimizer));
        checkpoint::save_from_with(&world, directory.join("checkpoint"), parts, &options)?;
        // loaded back here
        let mut again = ShardedOptimizer::new(net.named_parameters(), ParamGroup::new(AdamW::default()))?;
        checkpoint::load_into(&world, directory.join("checkpoint"), (&net, named("optim", &mut again)))?;
        assert_eq!(again.groups(), optimizer.groups());
        net.step(&mut optimizer, &x, &y)?;
        compare(&net, &data().join("next.pt"))
    })
    .unwrap();
    let python = std::env::var("SHARDWISE_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/fsdp_adamw.py");
    let output = match Command::new(&python).arg(&script).arg("read").arg(&scratch.0).output() {
        Ok(output) if output.status.code() != Some(77) => output,
        _ => return println!("skipped: no PyTorch in {python}; name another Python in SHARDWISE_PYTHON"),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (read, expected) = (scratch.0.join("read.pt"), data().join("next.pt"));
    for key in checkpoint::open(&expected).unwrap().tensors.keys().filter(|key| !key.ends_with("tracked")) {
        let numbers = |path: &Path| stored(path, key).flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(numbers(&read), numbers(&expected), "{key}: PyTorch's step from its own checkpoint and from ours");
    }
}

#[test]
fn a_series_resumes_from_the_newest_intact_checkpoint() {
    let scratch = Scratch::new("resume");
    let series = Series::new(scratch.0.join("run"));
    let saving = series.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let own = params(&mesh, &layouts(2))?;
        let mut optimizer = ShardedOptimizer::new(names(&own), ParamGroup::new(AdamW::default()))?;
        assert_eq!(saving.resume(&world, (&mut optimizer, &mesh))?, None);
        for step in 1..=3 {
            optimizer.step(gradients(&own, step)?)?;
            saving.save_from(&world, step as u64, (&optimizer, &mesh))?;
        }
        Ok(())
    })
    .unwrap();
    // the newest is damaged
    let file = series.path(3).join("part-00000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 4;
    std::fs::write(&file, bytes).unwrap();
    launch(3, move |world| {
        let mesh = world.mesh([("dp", 3)])?;
        let own = params(&mesh, &layouts(3))?;
        let mut optimizer = ShardedOptimizer::new(names(&own), ParamGroup::new(AdamW::default()))?;
        let resumed = series.resume(&world, (&mut optimizer, &mesh))?.expect("a checkpoint");
        assert_eq!((resumed.step, optimizer.steps()), (2, 2));
        assert!(resumed.skipped[0].0 == 3 && resumed.skipped[0].1.contains("checksum"), "{resumed:?}");
        Ok(())
    })
    .unwrap();
}
