//! Two custom optimizers: one elementwise, one that needs the full matrix. Parameter groups, schedules, states and
//! checkpoints for any world size come with the trait.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise::ShardedOptimizer;
use shardwise::checkpoint::{self, Format, SaveOptions};
use shardwise::error::ErrorKind;
use shardwise::nn::{Builder, Forward, Linear, Module};
use shardwise::ops::Reduction;
use shardwise::optim::{AdamW, Algorithm, Optimizer, ParamGroup, ParamStep, Schedule, StateTensor};
use shardwise::prelude::*;

/// SignSGD with momentum: every element moves by the learning rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SignSgd {
    momentum: f64,
}

impl Optimizer for SignSgd {
    const NAME: &'static str = "signsgd";
    const DEFAULT_LR: f64 = 0.01;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("momentum", shape)]
    }

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let (lr, keep) = (at.lr(), self.momentum);
        at.elementwise(["momentum"], move |p: f64, g: f64, [m]: [f64; 1]| {
            let m = keep * m + (1.0 - keep) * g;
            (p - lr * m.signum(), [m])
        })
    }
}

/// Divides every row of a gradient by the root of the mean of its squares so far, and bounds the whole update by a norm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct RowNorm {
    beta: f64,
    max_norm: f64,
}

impl Optimizer for RowNorm {
    const NAME: &'static str = "rownorm";

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("row_squares", [shape[0], 1])]
    }

    fn numbers(&self) -> &'static [(&'static str, f64)] {
        &[("step", 0.0), ("kept", 1.0)]
    }

    fn check(&self) -> Result<()> {
        match (0.0..1.0).contains(&self.beta) {
            true => Ok(()),
            false => Err(ErrorKind::Argument.error(
                "beta",
                self.beta,
                "a number from 0 to below 1",
                "correct `beta` of rownorm",
            )),
        }
    }

    fn check_shape(&self, shape: &[usize]) -> Result<()> {
        match shape.len() {
            2 => Ok(()),
            _ => Err(ErrorKind::Argument.error(
                "parameter for rownorm",
                format!("shape {shape:?}"),
                "a matrix",
                "use signsgd",
            )),
        }
    }

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let kept = at.number("kept")? * self.beta;
        at.set_number("kept", kept)?;
        let gradient = at.gradient()?;
        let squares = at.state("row_squares")?;
        // one number per row travels if columns are sharded
        let of_gradient = gradient.square()?.mean(&[1], true)?.to_layout(squares.layout())?;
        let squares = squares.lerp(&of_gradient, 1.0 - self.beta)?;
        at.set_state("row_squares", &squares)?;
        let update = gradient.div(&squares.div_scalar(1.0 - kept)?.sqrt()?.add_scalar(1e-8)?)?;
        let norm = update.norm(2.0, &[], false)?;
        let update = update.div(&norm.div_scalar(self.max_norm)?.clamp(Some(1.0), None)?)?;
        let lr = at.lr();
        at.apply(&update, [], move |p: f64, change: f64, []: [f64; 0]| (p - lr * change, []))
    }
}

#[derive(Module)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(builder: &Builder) -> Result<Self> {
        Ok(Net {
            first: Linear::new(&builder.child("first"), 6, 9)?,
            second: Linear::new(&builder.child("second"), 9, 4)?,
        })
    }

    fn loss(&self, x: &DTensor, y: &DTensor) -> Result<DTensor> {
        self.second.forward(&self.first.forward(x)?.tanh()?)?.mse_loss(y, Reduction::Mean)
    }
}

/// Where the weights of a run are.
type Placing = fn(&str, &[usize]) -> Vec<Placement>;

/// Three groups, each with a different optimizer, and a schedule.
fn optimizer(net: &Net, signs: &SignSgd, rows: &RowNorm) -> Result<ShardedOptimizer> {
    let of = |fits: &dyn Fn(&str, &[usize]) -> bool| {
        let params = net.named_parameters().into_iter();
        params.filter(|(name, param)| fits(name, &param.shape())).collect::<Vec<_>>()
    };
    let mut optimizer = ShardedOptimizer::new(of(&|_, shape| shape.len() == 1), signs.clone())?;
    let group = ParamGroup::new(rows.clone()).with_lr(0.2);
    optimizer.add_param_group(of(&|name, _| name == "first.weight"), group)?;
    optimizer.add_param_group(of(&|name, _| name == "second.weight"), AdamW::default())?;
    optimizer.set_schedule(Schedule::Cosine { warmup: 2, total: 8, end: 0.1 });
    Ok(optimizer)
}

/// What is read from a checkpoint before the steps, and written to two after them.
#[derive(Clone, Default)]
struct Files {
    load: Option<PathBuf>,
    save: Option<PathBuf>,
}

/// Trains for some steps and returns the weights by name.
fn train(ranks: usize, place: Placing, range: Range<u64>, files: Files) -> Vec<(String, Vec<f64>)> {
    let run = move |world: World| {
        let mesh = world.mesh([("dp", world.size())])?;
        mesh.manual_seed(5);
        let net = Net::new(&Builder::new(&mesh).placed(place))?;
        net.named_parameters().iter().try_for_each(|(_, p)| p.set(&p.get().detach().to_dtype(DType::F64)?))?;
        // a run that loads takes the settings of the checkpoint
        let scale = if files.load.is_some() { 0.5 } else { 1.0 };
        let (signs, rows) = (SignSgd { momentum: 0.9 * scale }, RowNorm { beta: 0.8 * scale, max_norm: 1.5 * scale });
        let mut optimizer = optimizer(&net, &signs, &rows)?;
        if let Some(path) = &files.load {
            optimizer.set_schedule(Schedule::Constant);
            checkpoint::load_into(&world, path, (&net, &mut optimizer, &mesh))?;
            let found = [0, 1].map(|i: usize| optimizer.groups()[i].algorithm.clone());
            let expected: [Algorithm; 2] =
                [SignSgd { momentum: 0.9 }.into(), RowNorm { beta: 0.8, max_norm: 1.5 }.into()];
            assert_eq!(found, expected);
            assert!(found[0].downcast_ref::<SignSgd>().is_some_and(|signs| signs.momentum == 0.9));
        }
        assert_eq!(optimizer.steps(), range.start);
        for t in range.clone() {
            let data = |shape: (usize, usize), k: usize| {
                let value = move |i: &[usize]| ((i[0] * 5 + i[1] * 3 + t as usize * k) % 7) as f64 / 7.0 - 0.4;
                DTensor::from_fn(shape, DType::F64, &mesh, [Shard(0)], value)
            };
            let loss = net.loss(&data((12, 6), 1)?, &data((12, 4), 2)?)?;
            optimizer.step(loss.backward()?)?;
        }
        if let Some(path) = &files.save {
            for format in [Format::Native, Format::Dcp] {
                let options = SaveOptions { format, ..SaveOptions::default() };
                checkpoint::save_from_with(&world, in_format(path, format), (&net, &optimizer, &mesh), &options)?;
            }
        }
        let value =
            |(name, param): (String, Param)| Ok((name, param.get().full_tensor()?.flatten_all()?.to_vec1::<f64>()?));
        net.named_parameters().into_iter().map(value).collect::<Result<Vec<_>>>()
    };
    ThreadWorld::new(ranks).unwrap().run(run).unwrap().swap_remove(ranks - 1)
}

fn in_format(path: &Path, format: Format) -> PathBuf {
    path.join(format!("{format:?}"))
}

fn assert_same(found: &[(String, Vec<f64>)], expected: &[(String, Vec<f64>)], what: &str) {
    for ((name, found), (_, expected)) in found.iter().zip(expected) {
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-11, "{name}, {what}: {found}, expected {expected}");
        }
    }
}

fn replicated(_: &str, _: &[usize]) -> Vec<Placement> {
    vec![Replicate]
}

fn by_rows(_: &str, _: &[usize]) -> Vec<Placement> {
    vec![Shard(0)]
}

fn by_columns(_: &str, shape: &[usize]) -> Vec<Placement> {
    vec![Shard(shape.len() as isize - 1)]
}

#[test]
fn custom_optimizers_do_not_depend_on_the_layout() {
    let expected = train(1, replicated, 0..6, Files::default());
    for ranks in [2, 3, 4] {
        for place in [replicated as Placing, by_rows, by_columns] {
            assert_same(&train(ranks, place, 0..6, Files::default()), &expected, &format!("{ranks} ranks"));
        }
    }
    // the steps did something to every parameter
    let start = train(1, replicated, 0..0, Files::default());
    for ((name, start), (_, end)) in start.iter().zip(&expected) {
        assert!(start.iter().zip(end).all(|(a, b)| a != b), "{name}");
    }
}

#[test]
fn their_states_resume_on_another_number_of_ranks() {
    let path = std::env::temp_dir().join(format!("shardwise-outside-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    let expected = train(1, replicated, 0..8, Files::default());
    train(2, by_rows, 0..4, Files { save: Some(path.clone()), load: None });
    for format in [Format::Native, Format::Dcp] {
        let files = Files { load: Some(in_format(&path, format)), save: None };
        let found = train(3, by_columns, 4..8, files);
        assert_same(&found, &expected, &format!("{format:?}"));
    }
    std::fs::remove_dir_all(&path).unwrap();
}

#[test]
fn their_errors_name_parameter_and_setting() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let net = Net::new(&Builder::new(&mesh))?;
        let rows = RowNorm { beta: 0.5, max_norm: 1.0 };
        let refused = [
            (ShardedOptimizer::new(net.named_parameters(), rows.clone()), "`first.bias` with shape [9]"),
            (ShardedOptimizer::new([], RowNorm { beta: 1.0, ..rows }), "correct `beta` of rownorm"),
        ];
        for (result, part) in refused {
            let message = result.err().expect(part).to_string();
            assert!(message.contains(part), "{part} in {message}");
        }
        // a state of another optimizer is refused by name
        let signs = SignSgd { momentum: 0.5 };
        let mut by_sign = ShardedOptimizer::new(net.named_parameters(), signs)?;
        let adamw = ShardedOptimizer::new(net.named_parameters(), AdamW::default())?;
        let message = by_sign.load_state_dict(&adamw.state_dict()?).unwrap_err().to_string();
        assert!(message.contains("adamw in group 0") && message.contains("signsgd"), "{message}");
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}
