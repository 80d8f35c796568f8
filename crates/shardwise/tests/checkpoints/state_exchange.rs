//! State that moves between ranks: gathered on chosen ranks, distributed from one, sent around; renamed and partial model parts.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use shardwise::checkpoint::{self, ModelPart, State, Value, named};
use shardwise::nn::{Builder, Forward, Linear, Module, StateDictOptions};
use shardwise::optim::{AdamW, ParamGroup, Sgd, ShardedOptimizer};
use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, ShardedTensor, shard_tensor};
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::scratch::Scratch;

fn counting(shape: &[usize]) -> Tensor {
    let count = shape.iter().product::<usize>();
    Tensor::arange(0i64, count as i64, &Device::Cpu).unwrap().reshape(shape).unwrap().to_dtype(DType::F32).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

/// A nested state with tensors in several layouts, on several meshes, and values.
fn nested(world: &World) -> Result<State> {
    let (line, grid) = (world.mesh([("all", 4)])?, world.mesh([("a", 2), ("b", 2)])?);
    let some = world.device_mesh(Mesh::from_ranks([("some", 2)], vec![1, 3])?)?;
    let spec = ChunkShardingSpec::over_ranks(0, [3, 0, 0])?;
    let place = |mesh: &DeviceMesh, placements: Vec<Placement>| {
        DTensor::distribute_tensor(&counting(&[5, 3]), mesh, placements, None)
    };
    let ten = (0..10).map(|_| Ok(State::from(place(&line, vec![Shard(0)])?))).collect::<Result<Vec<_>>>()?;
    Ok(State::map([
        ("rows", State::from(place(&line, vec![Shard(0)])?)),
        ("cells", State::from(place(&grid, vec![Shard(0), Shard(1)])?)),
        ("copies", State::from(place(&grid, vec![Replicate, Replicate])?)),
        ("on_two", State::from(place(&some, vec![Shard(1)])?)),
        ("sharded", State::from(shard_tensor(&counting(&[5, 3]), spec, &line, None)?)),
        ("plain", State::from(counting(&[5, 3]))),
        ("list", State::List(ten)),
        ("step", State::from(7)),
    ]))
}

fn check_full(state: &State) {
    let expected = counting(&[5, 3]);
    for key in ["rows", "cells", "copies", "on_two", "sharded", "plain", "list.0", "list.9"] {
        let Some(State::Plain(tensor)) = state.get(key) else { panic!("{key} is not a plain tensor") };
        assert_eq!((tensor.dims(), numbers(tensor)), (expected.dims(), numbers(&expected)), "{key}");
    }
    assert_eq!(state.value("step").unwrap(), Value::Int(7));
}

#[test]
fn whole_tensors_are_gathered_on_chosen_ranks_only() {
    for ranks in [vec![], vec![0], vec![0, 2], vec![3]] {
        launch(4, move |world| {
            let full = nested(&world)?.gather(&world, &ranks)?;
            match ranks.is_empty() || ranks.contains(&world.rank()) {
                true => check_full(&full),
                false => assert!(matches!(full, State::Map(entries) if entries.is_empty())),
            }
            Ok(())
        })
        .unwrap();
    }
    let outside = same_error_on_all_ranks(4, |world| nested(&world)?.gather(&world, &[4]).map(drop));
    assert!(outside.contains("below 4"), "{outside}");
    let differs = same_error_on_all_ranks(2, |world| {
        let state = State::map([(["a", "b"][world.rank()], 1)]);
        state.gather(&world, &[]).map(drop)
    });
    assert!(differs.contains("state to gather"), "{differs}");
}

#[test]
fn a_full_state_of_one_rank_is_distributed_to_any_layouts() {
    // Rank 3 is on all meshes of the template, which sharded tensors need.
    for src in [0, 3] {
        launch(4, move |world| {
            let own = nested(&world)?;
            let gathered = own.gather(&world, &[src])?;
            let zeros = |state: &State| -> Result<State> {
                Ok(match state {
                    State::Tensor(tensor) => State::from(tensor.zeros_like()?),
                    State::Sharded(tensor) => State::from(tensor.zeros_like()?),
                    State::Plain(tensor) => State::from(tensor.zeros_like()?),
                    other => other.clone(),
                })
            };
            let mut template = State::Map(BTreeMap::new());
            for key in ["rows", "cells", "copies", "on_two", "sharded", "plain"] {
                template.extend([(key, zeros(own.get(key).unwrap())?)]);
            }
            template.extend([("step", State::from(0))]);
            let state = template.distribute(&world, &gathered, src)?;
            let mut again = state.gather(&world, &[])?;
            // What the template lacks is not distributed.
            assert!(again.get("list").is_none());
            again.extend([("list", State::List(vec![State::from(counting(&[5, 3])); 10]))]);
            check_full(&again);
            let rows = state.tensor("rows")?;
            assert_eq!(rows.layout(), own.tensor("rows")?.layout());
            Ok(())
        })
        .unwrap();
    }
    let missing = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let template = State::map([("w", DTensor::zeros((2, 2), DType::F32, &mesh, [Shard(0)])?)]);
        let full = State::map([("v", counting(&[2, 2]))]);
        template.distribute(&world, &full, 0).map(drop)
    });
    assert!(missing.contains("no plain tensor \"w\"") && missing.contains("rank 0"), "{missing}");
    let shape = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let template = State::map([("w", DTensor::zeros((2, 2), DType::F32, &mesh, [Shard(0)])?)]);
        template.distribute(&world, &State::map([("w", counting(&[2, 3]))]), 1).map(drop)
    });
    assert!(shape.contains("[2, 3] instead of [2, 2]"), "{shape}");
}

/// Model and optimizer trained on 2 ranks; the full state is on rank 0 only, and a fresh sharded model on 3 ranks gets it.
#[test]
fn a_model_and_its_optimizer_are_restored_from_the_full_state_of_rank_0() {
    let full = ThreadWorld::new(2)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("dp", 2)])?;
            mesh.manual_seed(5);
            let model = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 3, 5)?;
            let mut optimizer = ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()))?;
            let input = DTensor::ones((2, 3), DType::F32, &mesh, [Replicate])?;
            let loss = model.forward(&input)?.sum_all()?;
            optimizer.step(loss.backward()?)?;
            let state = State::of((&model, &optimizer))?;
            let full = state.gather(&world, &[0])?;
            let entries = match &full {
                State::Map(entries) => entries.len(),
                _ => 0,
            };
            assert_eq!(entries, if world.rank() == 0 { 2 } else { 0 });
            Ok(full)
        })
        .unwrap()
        .swap_remove(0);
    let weight = |state: &State| match state.get("model.weight") {
        Some(State::Plain(tensor)) => numbers(tensor),
        _ => panic!("no weight"),
    };
    let expected = weight(&full);
    launch(3, move |world| {
        let mesh = world.mesh([("dp", 3)])?;
        let model = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 3, 5)?;
        let mut optimizer = ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()))?;
        let input = DTensor::ones((2, 3), DType::F32, &mesh, [Replicate])?;
        // A step allocates the moments, whose layouts are the template.
        optimizer.step(model.forward(&input)?.sum_all()?.backward()?)?;
        let only = if world.rank() == 0 { full.clone() } else { State::Map(BTreeMap::new()) };
        let state = State::of((&model, &optimizer))?.distribute(&world, &only, 0)?;
        let tensors = ["weight", "bias"].map(|name| (name.to_string(), state.tensor(&format!("model.{name}"))));
        let tensors: BTreeMap<String, DTensor> =
            tensors.into_iter().map(|(name, tensor)| Ok((name, tensor?.clone()))).collect::<Result<_>>()?;
        model.load_state_dict(&tensors)?;
        optimizer.load_state_dict(&state.get("optimizer").unwrap().try_into()?)?;
        assert_eq!(numbers(&model.state_dict()["weight"].full_tensor()?), expected);
        assert_eq!(optimizer.steps(), 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_state_travels_around_a_ring() {
    launch(4, |world| {
        let (me, next, previous) = (world.rank(), (world.rank() + 1) % 4, (world.rank() + 3) % 4);
        let mesh = world.mesh([("all", 4)])?;
        let state = |rank: usize| -> Result<State> {
            let local = (counting(&[2, 3]) + rank as f64)?;
            let spec = ChunkShardingSpec::over_ranks(0, [0, 1, 2, 3])?;
            let sharded = ShardedTensor::full(spec, rank as f64, (8, 2), DType::F32, &mesh)?;
            Ok(State::map([
                ("plain", State::from(local.clone())),
                ("tensor", State::from(DTensor::from_local(&local, &mesh, [Shard(0)])?)),
                ("sharded", State::from(sharded)),
                ("text", State::from(format!("rank {rank}"))),
                ("list", State::List(vec![State::from(1), State::from(counting(&[rank + 1]))])),
            ]))
        };
        let own = state(me)?;
        own.send(&world, next)?;
        let received = State::receive(&world, previous, &own)?;
        assert_eq!(received.value("text")?, Value::Text(format!("rank {previous}")));
        let expected = numbers(&(counting(&[2, 3]) + previous as f64)?);
        assert_eq!(numbers(&received.tensor("tensor")?.to_local()?), expected);
        assert_eq!(received.tensor("tensor")?.layout(), own.tensor("tensor")?.layout());
        let Some(State::Plain(plain)) = received.get("plain") else { panic!("no plain tensor") };
        assert_eq!(numbers(plain), expected);
        let Some(State::Plain(listed)) = received.get("list.1") else { panic!("no tensor in the list") };
        assert_eq!(listed.dims(), [previous + 1]);
        let Some(State::Sharded(sharded)) = received.get("sharded") else { panic!("no sharded tensor") };
        assert_eq!(numbers(&sharded.local_tensor()?), [previous as f32; 4]);
        // Parts that do not fit the template are refused.
        let other = State::map([("plain", DTensor::zeros((9, 3), DType::F32, &mesh, [Shard(0)])?)]);
        State::map([("plain", counting(&[2, 3]))]).send(&world, next)?;
        let error = State::receive(&world, previous, &other).err().unwrap().to_string();
        assert!(error.contains("\"plain\"") && error.contains("layouts of the sender"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn renamed_keys_load_with_the_same_rename_only() {
    let scratch = Scratch::new("renamed");
    let path = scratch.0.join("state");
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let build = || Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 4, 6);
        let rename = |name: &str| name.replace("weight", "kernel");
        let saved = build()?;
        let options = StateDictOptions::default();
        checkpoint::save_from(&world, &path, (ModelPart::new(&saved, options.clone()).renamed(rename),))?;
        assert!(checkpoint::open(&path)?.tensors.contains_key("model.kernel"));
        let model = build()?;
        let error = checkpoint::load_into(&world, &path, (&model,)).unwrap_err().to_string();
        assert!(error.contains("model.weight"), "{error}");
        checkpoint::load_into(&world, &path, (ModelPart::new(&model, options.clone()).renamed(rename),))?;
        let same =
            |a: &Linear, b: &Linear| -> Result<bool> { a.state_dict()["weight"].equal(&b.state_dict()["weight"]) };
        assert!(same(&saved, &model)?);
        let twice = ModelPart::new(&model, options).renamed(|_| "x".to_string());
        let error = checkpoint::save_from(&world, &path, (twice,)).unwrap_err().to_string();
        assert!(error.contains("both stored as \"x\""), "{error}");
        Ok(())
    })
    .unwrap();
}

#[derive(Module)]
struct Two {
    first: Linear,
    second: Linear,
}

#[test]
fn a_submodule_is_saved_alone_and_loaded_into_the_model() {
    let scratch = Scratch::new("submodule");
    let path = scratch.0.join("state");
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let build = || -> Result<Two> {
            let builder = Builder::new(&mesh).placed(|_, _| vec![Shard(0)]);
            Ok(Two {
                first: Linear::new(&builder.child("first"), 3, 4)?,
                second: Linear::new(&builder.child("second"), 4, 2)?,
            })
        };
        let (saved, model) = (build()?, build()?);
        let kept = model.first.state_dict()["weight"].clone();
        // Without its prefix, into the submodule; and with it, into the whole model.
        checkpoint::save_from(&world, path.join("alone"), (&saved.second,))?;
        checkpoint::load_into(&world, path.join("alone"), (&model.second,))?;
        assert!(model.second.state_dict()["weight"].equal(&saved.second.state_dict()["weight"])?);
        let prefixed = StateDictOptions { prefix: "second.".into(), ..StateDictOptions::default() };
        checkpoint::save_from(&world, path.join("prefixed"), (ModelPart::new(&saved.second, prefixed),))?;
        let whole = build()?;
        let first = whole.first.state_dict()["weight"].clone();
        let mut part = ModelPart::new(&whole, StateDictOptions { partial: true, ..StateDictOptions::default() });
        checkpoint::load_into(&world, path.join("prefixed"), (&mut part,))?;
        assert_eq!(part.loaded().missing_keys, ["first.bias", "first.weight"]);
        assert!(whole.second.state_dict()["weight"].equal(&saved.second.state_dict()["weight"])?);
        assert!(whole.first.state_dict()["weight"].equal(&first)? && model.first.state_dict()["weight"].equal(&kept)?);
        Ok(())
    })
    .unwrap();
}

/// Objects of the program next to plain entries, and an optimizer without moments.
#[test]
fn an_optimizer_without_state_saves_its_settings_only() {
    let scratch = Scratch::new("stateless");
    let path = scratch.0.join("state");
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let model = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 3, 4)?;
        let sgd = |lr| ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(Sgd::default()).with_lr(lr));
        let mut optimizer = sgd(0.5)?;
        let input = DTensor::ones((2, 3), DType::F32, &mesh, [Replicate])?;
        optimizer.step(model.forward(&input)?.sum_all()?.backward()?)?;
        checkpoint::save_from(&world, &path, (named("optim", &optimizer),))?;
        assert!(checkpoint::open(&path)?.tensors.is_empty());
        let mut fresh = sgd(0.1)?;
        checkpoint::load_into(&world, &path, (named("optim", &mut fresh),))?;
        assert_eq!((fresh.steps(), fresh.groups()[0].lr), (1, 0.5));
        Ok(())
    })
    .unwrap();
}

fn two(mesh: &DeviceMesh) -> Result<Two> {
    let builder = Builder::new(mesh).placed(|_, _| vec![Shard(0)]);
    Ok(Two { first: Linear::new(&builder.child("first"), 3, 4)?, second: Linear::new(&builder.child("second"), 4, 2)? })
}

impl Two {
    fn step(&self, optimizer: &mut ShardedOptimizer, mesh: &DeviceMesh) -> Result<()> {
        let input = DTensor::ones((2, 3), DType::F32, mesh, [Replicate])?;
        let loss = self.second.forward(&self.first.forward(&input)?)?.square()?.sum_all()?;
        optimizer.step(loss.backward()?)
    }
}

#[test]
fn a_parameter_frozen_after_a_step_keeps_its_state_through_a_checkpoint() {
    let scratch = Scratch::new("frozen");
    let path = scratch.0.join("state");
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        mesh.manual_seed(3);
        let over = |model: &Two| ShardedOptimizer::new(model.named_parameters(), ParamGroup::new(AdamW::default()));
        let moment = |optimizer: &ShardedOptimizer, name: &str| -> Result<Vec<f32>> {
            Ok(numbers(&optimizer.state_dict()?.params[name].tensors["exp_avg"].full_tensor()?))
        };
        let model = two(&mesh)?;
        let mut optimizer = over(&model)?;
        model.step(&mut optimizer, &mesh)?;
        let (weight, before) = (model.first.weight.get().detach(), moment(&optimizer, "first.weight")?);
        let other = moment(&optimizer, "second.weight")?;
        model.first.set_requires_grad(false);
        model.step(&mut optimizer, &mesh)?;
        assert!(model.first.weight.get().detach().equal(&weight)?, "a frozen weight stays");
        assert_eq!(moment(&optimizer, "first.weight")?, before);
        assert_ne!(moment(&optimizer, "second.weight")?, other);
        checkpoint::save_from(&world, &path, (&model, &optimizer))?;
        let fresh = two(&mesh)?;
        let mut loaded = over(&fresh)?;
        checkpoint::load_into(&world, &path, (&fresh, &mut loaded))?;
        assert_eq!(moment(&loaded, "first.weight")?, before);
        assert_eq!(
            loaded.state_dict()?.params["first.weight"].numbers,
            optimizer.state_dict()?.params["first.weight"].numbers
        );
        Ok(())
    })
    .unwrap();
}

/// Pre-trained layers are loaded under a prefix and frozen; only the new layers and their optimizer are saved and resumed.
#[test]
fn pretrained_layers_stay_frozen_and_only_the_new_ones_are_saved() {
    let scratch = Scratch::new("fine-tuning");
    let root = scratch.0.clone();
    launch(2, move |world| {
        let mesh = world.mesh([("dp", 2)])?;
        mesh.manual_seed(4);
        let (base, run) = (root.join("base"), root.join("run"));
        let pretrained = two(&mesh)?;
        checkpoint::save_from(&world, &base, (&pretrained,))?;
        let begin = || -> Result<(Two, ShardedOptimizer)> {
            let model = two(&mesh)?;
            let prefix = StateDictOptions { prefix: "first.".into(), ..StateDictOptions::default() };
            checkpoint::load_into(&world, &base, (ModelPart::new(&model.first, prefix),))?;
            model.first.set_requires_grad(false);
            let optimizer = ShardedOptimizer::new(model.trainable_parameters(), ParamGroup::new(AdamW::default()))?;
            Ok((model, optimizer))
        };
        let (model, mut optimizer) = begin()?;
        model.step(&mut optimizer, &mesh)?;
        checkpoint::save_from(&world, &run, (&model.second, &optimizer))?;
        let stored = checkpoint::open(&run)?;
        assert!(stored.tensors.keys().all(|key| !key.contains("first")), "{:?}", stored.tensors.keys());
        model.step(&mut optimizer, &mesh)?;
        let (resumed, mut its_optimizer) = begin()?;
        checkpoint::load_into(&world, &run, (&resumed.second, &mut its_optimizer))?;
        resumed.step(&mut its_optimizer, &mesh)?;
        for name in ["first.weight", "second.weight", "second.bias"] {
            assert!(resumed.state_dict()[name].equal(&model.state_dict()[name])?, "{name}");
        }
        assert!(resumed.first.weight.get().detach().equal(&pretrained.first.weight.get().detach())?);
        Ok(())
    })
    .unwrap();
}
