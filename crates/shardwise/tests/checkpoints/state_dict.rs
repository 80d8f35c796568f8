//! Which names a state dict must have when it is loaded, state dicts as maps, optimizers over modules, and identities of
//! sharded tensors.

use serde::{Deserialize, Serialize};
use shardwise::checkpoint::{self, ModelPart, Series, State, Value, named};
use shardwise::nn::{Linear, StateDictOptions};
use shardwise::optim::{Algorithm, Optimizer, ParamGroup, ParamStep, Schedule, StateTensor};
use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::scratch::Scratch;
use std::collections::{BTreeMap, HashSet};

#[derive(Module)]
struct Pair {
    first: Linear,
    second: Linear,
}

impl Pair {
    fn new(mesh: &DeviceMesh) -> Result<Self> {
        let builder = Builder::new(mesh).placed(|_, _| vec![Shard(0)]);
        Ok(Pair {
            first: Linear::new(&builder.child("first"), 3, 4)?,
            second: Linear::new(&builder.child("second"), 4, 2)?,
        })
    }
}

/// A pair in which one layer has another name and one has no bias.
#[derive(Module)]
struct Renamed {
    first: Linear,
    last: Linear,
}

impl Renamed {
    fn new(mesh: &DeviceMesh) -> Result<Self> {
        let builder = Builder::new(mesh);
        Ok(Renamed {
            first: Linear::without_bias(&builder.child("first"), 3, 4)?,
            last: Linear::new(&builder.child("last"), 4, 2)?,
        })
    }
}

fn options(strict: bool, partial: bool, prefix: &str) -> StateDictOptions {
    StateDictOptions { strict, partial, prefix: prefix.to_string() }
}

fn numbers(tensor: &DTensor) -> Result<Vec<f32>> {
    Ok(tensor.full_tensor()?.flatten_all()?.to_vec1()?)
}

#[test]
fn options_control_how_names_of_a_state_dict_are_matched() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let (source, target) = (Renamed::new(&mesh)?, Pair::new(&mesh)?);
        let state = source.state_dict_with(&options(true, false, "module."));
        assert!(state.keys().eq(["module.first.weight", "module.last.bias", "module.last.weight"]));
        let before = numbers(&target.second.weight.get())?;
        // missing and unexpected names in one error, and nothing has changed
        for partial in [false, true] {
            let error =
                target.load_state_dict_with(&state, &options(true, partial, "module.")).unwrap_err().to_string();
            for part in
                ["missing [\"first.bias\", \"second.bias\", \"second.weight\"]", "[\"last.bias\", \"last.weight\"]"]
            {
                assert!(error.contains(part), "{error}");
            }
            assert_ne!(numbers(&target.first.weight.get())?, numbers(&source.first.weight.get())?);
        }
        let loaded = target.load_state_dict_with(&state, &options(false, false, "module."))?;
        assert_eq!(loaded.missing_keys, ["first.bias", "second.bias", "second.weight"]);
        assert_eq!(loaded.unexpected_keys, ["last.bias", "last.weight"]);
        assert_eq!(numbers(&target.first.weight.get())?, numbers(&source.first.weight.get())?);
        assert_eq!(target.first.weight.get().placements(), [Shard(0)]);
        assert_eq!(numbers(&target.second.weight.get())?, before);
        // a subset of the names
        let part: BTreeMap<String, DTensor> =
            [("first.bias".to_string(), target.first.bias.as_ref().unwrap().get().zeros_like()?)].into();
        let loaded = target.load_state_dict_with(&part, &options(true, true, ""))?;
        assert_eq!((loaded.missing_keys.len(), loaded.unexpected_keys.len()), (3, 0));
        assert_eq!(numbers(&target.first.bias.as_ref().unwrap().get())?, [0.0; 4]);
        assert!(target.load_state_dict_with(&part, &options(true, false, "")).is_err());
        // names with another prefix are ignored; a wrong shape is an error whatever the options
        let loaded = target.load_state_dict_with(&part, &options(false, false, "teacher."))?;
        assert_eq!((loaded.missing_keys.len(), loaded.unexpected_keys.len()), (4, 0));
        let wrong: BTreeMap<String, DTensor> =
            [("first.bias".to_string(), source.last.bias.as_ref().unwrap().get())].into();
        let error = target.load_state_dict_with(&wrong, &options(false, true, "")).unwrap_err().to_string();
        assert!(error.contains("other shapes of [\"first.bias\"]"), "{error}");
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn options_control_how_names_of_a_checkpoint_are_matched() {
    let scratch = Scratch::new("model-part");
    let path = scratch.0.join("state");
    let place = path.clone();
    let expected = launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let source = Renamed::new(&mesh)?;
        checkpoint::save_from(&world, &place, (ModelPart::new(&source, options(true, false, "module.")), &mesh))?;
        numbers(&source.first.weight.get())
    });
    let expected = expected.unwrap();
    let keys: Vec<String> = checkpoint::open(&path).unwrap().tensors.into_keys().collect();
    assert_eq!(keys, ["model.module.first.weight", "model.module.last.bias", "model.module.last.weight"]);
    for ranks in [2, 3] {
        let (place, expected) = (path.clone(), expected.clone());
        let run = move |world: World| {
            let mesh = world.mesh([("dp", ranks)])?;
            let target = Pair::new(&mesh)?;
            let before = numbers(&target.second.weight.get())?;
            let mut part = ModelPart::new(&target, options(false, false, "module."));
            checkpoint::load_into(&world, &place, (&mut part, &mesh))?;
            assert_eq!(part.loaded().missing_keys, ["first.bias", "second.bias", "second.weight"]);
            assert_eq!(part.loaded().unexpected_keys, ["last.bias", "last.weight"]);
            assert_eq!(numbers(&target.first.weight.get())?, expected);
            assert_eq!(numbers(&target.second.weight.get())?, before);
            Ok(())
        };
        launch(ranks, run).unwrap();
        // a strict load fails on all ranks and changes nothing
        let place = path.clone();
        let text = same_error_on_all_ranks(ranks, move |world| {
            let mesh = world.mesh([("dp", ranks)])?;
            let target = Pair::new(&mesh)?;
            let before = numbers(&target.first.weight.get())?;
            let part = ModelPart::new(&target, options(true, false, "module."));
            let loaded = checkpoint::load_into(&world, &place, (named("model", part),));
            assert_eq!(numbers(&target.first.weight.get())?, before);
            assert!(matches!(loaded, Err(Error::OnRank { .. })));
            loaded.map(drop)
        });
        for part in ["missing [\"first.bias\"", "unexpected [\"last.bias\"", "`strict: false`", "\"module.\""] {
            assert!(text.contains(part), "{text}");
        }
        let place = path.clone();
        let text = same_error_on_all_ranks(ranks, move |world| {
            let target = Pair::new(&world.mesh([("dp", ranks)])?)?;
            checkpoint::load_into(&world, &place, (ModelPart::new(&target, options(false, true, "other.")),)).map(drop)
        });
        assert!(text.contains("no entry of the module under model.other."), "{text}");
    }
}

#[test]
fn state_dicts_are_maps() {
    let mut state: State = [("step", 7), ("epoch", 2)].into_iter().collect();
    state.extend([("names", State::list(["a", "b"])), ("step", State::from(8))]);
    let entries: Vec<(String, State)> = state.clone().into_iter().collect();
    let names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["epoch", "names", "step"]);
    let map = BTreeMap::try_from(state).unwrap();
    let again = State::from(map);
    assert_eq!(again.value("step").unwrap(), Value::Int(8));
    assert_eq!(again.value("names.1").unwrap(), Value::Text("b".into()));
    assert_eq!(State::from(3).into_iter().count(), 0);
    let message = BTreeMap::try_from(State::list([1, 2])).err().unwrap().to_string();
    assert!(message.contains("a list of 2 entries"), "{message}");
    let panicked = std::panic::catch_unwind(|| State::from(3).extend([("step", 7)]));
    assert!(panicked.is_err());
}

#[test]
fn a_run_resumes_with_one_call_including_custom_state() {
    let scratch = Scratch::new("resume-call");
    let path = scratch.0.join("run");
    let run = move |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let (model, other) = (Pair::new(&mesh)?, Pair::new(&mesh)?);
        let optimizer = AdamW::default().over(&model)?;
        let mut fresh = AdamW::default().over(&other)?;
        assert_eq!(checkpoint::resume(&world, &path, (&other, &mut fresh))?, None);
        let mut state = State::of((&model, &optimizer, &mesh))?;
        state.extend([("note", "mine")]);
        Series::new(&path).save(&world, 4, &state)?;
        let resumed = checkpoint::resume(&world, &path, (&other, &mut fresh, &mesh))?.expect("one was saved");
        assert_eq!((resumed.step, resumed.skipped.len()), (4, 0));
        assert_eq!(numbers(&other.first.weight.get())?, numbers(&model.first.weight.get())?);
        assert_eq!(checkpoint::open(Series::new(&path).path(4))?.value("note")?, Value::Text("mine".into()));
        Ok(())
    };
    launch(2, run).unwrap();
}

/// A custom optimizer.
#[derive(Debug, Serialize, Deserialize)]
struct Constant;

impl Optimizer for Constant {
    const NAME: &'static str = "constant";
    const DEFAULT_LR: f64 = 0.5;

    fn state(&self, _: &[usize]) -> Vec<StateTensor> {
        Vec::new()
    }

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let lr = at.lr();
        at.elementwise([], move |p: f64, g: f64, []: [f64; 0]| (p - lr * g.signum(), []))
    }
}

#[test]
fn every_optimizer_takes_a_module() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let layer = || Linear::without_bias(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 3, 4);
        for name in Algorithm::names() {
            let layer = layer()?;
            let before = numbers(&layer.weight.get())?;
            let algorithm = Algorithm::by_name(name)?;
            let lr = algorithm.default_lr();
            let mut optimizer = algorithm.over(&layer)?;
            assert_eq!((optimizer.groups()[0].lr, optimizer.params().count()), (lr, 1), "{name}");
            optimizer.step(layer.weight.get().square()?.sum_all()?.backward()?)?;
            assert_ne!(numbers(&layer.weight.get())?, before, "{name}");
        }
        let schedule = Schedule::Linear { warmup: 0, total: 2, end: 0.0 };
        let layer = layer()?;
        let mut optimizer = Constant.over(&layer)?.with_schedule(schedule);
        let before = numbers(&layer.weight.get())?;
        for _ in 0..2 {
            optimizer.step(layer.weight.get().sum_all()?.backward()?)?;
        }
        // half of it in the second step
        let moved: Vec<f32> = numbers(&layer.weight.get())?.iter().zip(&before).map(|(a, b)| b - a).collect();
        assert!(moved.iter().all(|change| (change - 0.75).abs() < 1e-6), "{moved:?}");
        Ok(())
    };
    launch(2, run).unwrap();
    let text = same_error_on_all_ranks(2, |world| {
        let pair = Pair::new(&world.mesh([("dp", 2)])?)?;
        Algorithm::by_name("muon")?.over(&pair).map(drop)
    });
    assert!(text.contains("first.bias"), "{text}");
    let text = same_error_on_all_ranks(2, |world| {
        let pair = Pair::new(&world.mesh([("dp", 2)])?)?;
        ParamGroup::new(AdamW::default()).with_lr(-1.0).over(&pair).map(drop)
    });
    assert!(text.contains("learning rate"), "{text}");
}

#[test]
fn sharded_tensors_have_an_identity() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let zeros = || ShardedTensor::zeros(ChunkShardingSpec::over_ranks(0, [0, 1])?, 5, DType::F32, &mesh);
        let (one, other) = (zeros()?, zeros()?);
        assert!(one.equal(&other)? && one.id() != other.id());
        let known: HashSet<_> = [one.id(), other.id()].into();
        let clone = one.clone();
        assert!(known.contains(&clone.id()) && clone.id() == one.id());
        let mut filled = one.clone();
        filled.fill(1.0)?;
        assert!(!known.contains(&filled.id()) && known.contains(&one.id()));
        assert!(!known.contains(&one.to_dtype(DType::F64)?.id()));
        Ok(())
    };
    launch(2, run).unwrap();
}
