//! State dicts of modules and optimizers in memory: on one rank, in parts, under other names.

use std::collections::BTreeMap;

use candle_core::Tensor;
use shardwise::checkpoint::{self, ModelPart};
use shardwise::nn::{Buffer, ExtraState, Linear, StateDictOptions, init::Init};
use shardwise::optim::ParamState;
use shardwise::plan::fully_shard;
use shardwise::prelude::*;
use shardwise_test_suites::errors::same_error_on_all_ranks;
use shardwise_test_suites::scratch::Scratch;

use crate::fsdp::net::*;

#[test]
fn the_first_rank_alone_gets_and_gives_the_full_state() {
    for way in &WAYS {
        let run = move |world: World| {
            let mesh = way.mesh(&world)?;
            let net = way.build(&mesh, 5, DType::F32)?;
            let mut optimizer = AdamW::default().over(&net)?;
            let (x, target) = batch(&mesh, &way.batch(), DType::F32, 0)?;
            optimizer.step(net.loss(&x, &target, false)?.backward()?)?;
            world.trace().clear();
            let state = net.full_state_dict(&world, 0)?;
            assert_eq!(count(&world, "all_gather"), 0, "no other rank holds a full tensor");
            let of_optimizer = optimizer.state_dict()?.to_full_on(&world, 0)?;
            assert_eq!((state.is_some(), of_optimizer.is_some()), (world.rank() == 0, world.rank() == 0));
            for (name, param) in net.named_parameters() {
                let whole = param.get().full_tensor()?;
                if let Some(state) = &state {
                    assert_eq!(distance(&state[&name], &whole), 0.0, "{name}");
                }
            }
            // a model with other values and another layout
            let other = Net::new(&Builder::new(&mesh), 5, 2)?;
            let mut fresh = AdamW::default().over(&other)?;
            let loaded = other.load_full_state_dict(&world, 0, state.as_ref(), &StateDictOptions::default())?;
            assert!(loaded.missing_keys.is_empty() && loaded.unexpected_keys.is_empty());
            fresh.load_full_state_from(&world, 0, of_optimizer.as_ref())?;
            assert_same_parameters(&net, &other, 0.0, way.name)?;
            assert_eq!(fresh.steps(), 1);
            let (ours, theirs) = (optimizer.state_dict()?.to_full()?, fresh.state_dict()?.to_full()?);
            for (name, state) in &ours.params {
                assert_eq!(state.numbers, theirs.params[name].numbers);
                for (kind, tensor) in &state.tensors {
                    assert_eq!(distance(tensor, &theirs.params[name].tensors[kind]), 0.0, "{name} {kind}");
                }
            }
            // and into a plain model of one rank, from the last rank
            let last = world.size() - 1;
            let state = net.full_state_dict(&world, last)?;
            assert_eq!(state.is_some(), world.rank() == last);
            Ok(())
        };
        launch(way.ranks(), run).unwrap();
    }
}

#[test]
fn what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing() {
    let load = |world: &World, strict: bool, change: &dyn Fn(&mut BTreeMap<String, Tensor>)| -> Result<Vec<String>> {
        let mesh = world.mesh([("dp", 2)])?;
        let net = WAYS[0].axes.len();
        let net = Net::new(&Builder::new(&mesh), 5, net)?;
        fully_shard(&net, &mesh, &["dp"])?;
        let mut state = net.full_state_dict(world, 0)?;
        state.iter_mut().for_each(change);
        let before = numbers(&net.head.weight.get().full_tensor()?);
        let options = StateDictOptions { strict, ..StateDictOptions::default() };
        let loaded = net.load_full_state_dict(world, 0, state.as_ref(), &options);
        assert_eq!(numbers(&net.head.weight.get().full_tensor()?), before);
        let loaded = loaded?;
        Ok([loaded.missing_keys, loaded.unexpected_keys].concat())
    };
    let rename = |state: &mut BTreeMap<String, Tensor>| {
        let moved = state.remove("first.bias").expect("there");
        state.insert("second.bias".into(), moved);
    };
    let text = same_error_on_all_ranks(2, move |world| load(&world, true, &rename).map(drop));
    assert!(text.contains("missing [\"first.bias\"]") && text.contains("unexpected [\"second.bias\"]"), "{text}");
    launch(2, move |world| {
        assert_eq!(load(&world, false, &rename)?, ["first.bias", "second.bias"]);
        Ok(())
    })
    .unwrap();
    let reshape = |state: &mut BTreeMap<String, Tensor>| {
        let turned = state["first.weight"].t().unwrap();
        state.insert("first.weight".into(), turned);
    };
    let text = same_error_on_all_ranks(2, move |world| load(&world, true, &reshape).map(drop));
    assert!(text.contains("other shapes of [\"first.weight\"]"), "{text}");
    let text = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let layer = Linear::new(&Builder::new(&mesh), 3, 4)?;
        layer.load_full_state_dict(&world, 1, None, &StateDictOptions::default()).map(drop)
    });
    assert!(text.contains("no state on rank 1"), "{text}");
    let text = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        let layer = Linear::new(&Builder::new(&mesh), 3, 4)?;
        let mut optimizer = AdamW::default().over(&layer)?;
        let mut state = optimizer.state_dict()?.to_full_on(&world, 0)?;
        state.iter_mut().for_each(|state| drop(state.params.remove("bias")));
        optimizer.load_full_state_from(&world, 0, state.as_ref())
    });
    assert!(text.contains("no parameter `bias`"), "{text}");
    let text = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("dp", 2)])?;
        Linear::new(&Builder::new(&mesh), 3, 4)?.full_state_dict(&world, 2).map(drop)
    });
    assert!(text.contains("rank 2 of 2"), "{text}");
}

/// Ranks that name different ranks as the one with the full state get an error each, and none waits for another.
#[test]
fn ranks_that_name_different_ranks_of_a_full_state_all_fail() {
    type Call = fn(&World, &Linear, usize) -> Result<()>;
    let calls: [Call; 4] = [
        |world, layer, rank| layer.full_state_dict(world, rank).map(drop),
        |world, layer, rank| {
            let state = Some(layer.full_state_dict(world, 0)?.unwrap_or_default());
            layer.load_full_state_dict(world, rank, state.as_ref(), &StateDictOptions::default()).map(drop)
        },
        |world, layer, rank| AdamW::default().over(layer)?.state_dict()?.to_full_on(world, rank).map(drop),
        |world, layer, rank| {
            let mut optimizer = AdamW::default().over(layer)?;
            let state = optimizer.state_dict()?.to_full()?;
            optimizer.load_full_state_from(world, rank, Some(&state))
        },
    ];
    for (i, call) in calls.into_iter().enumerate() {
        let run = move |world: World| {
            let mesh = world.mesh([("dp", 2)])?;
            let layer = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 3, 4)?;
            call(&world, &layer, world.rank())
        };
        // Shorter than the default, so that a rank that waits in vain is found soon.
        let world = ThreadWorld::new(2).unwrap().deadline(std::time::Duration::from_secs(30));
        for result in world.run_each(run) {
            let error = result.expect_err("the ranks differ");
            assert!(!matches!(error, Error::Timeout { .. }), "call {i}: {error}");
        }
    }
}

#[derive(Module)]
struct Tables {
    layer: Linear,
    angles: Buffer,
    counts: Buffer,
    extra: ExtraState,
}

impl Tables {
    fn new(mesh: &DeviceMesh) -> Result<Self> {
        let builder = Builder::new(mesh);
        Ok(Tables {
            layer: Linear::new(&builder.child("layer"), 4, 6)?,
            angles: builder.buffer("angles", &[6], Init::ONES)?.not_persistent(),
            counts: builder.buffer("counts", &[6], Init::ZEROS)?,
            extra: ExtraState::new("new"),
        })
    }
}

#[test]
fn buffers_that_are_not_persistent_are_left_out_and_extra_state_is_kept() {
    let scratch = Scratch::new("extra-state");
    let path = scratch.0.join("run");
    let run = move |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let (saved, other) = (Tables::new(&mesh)?, Tables::new(&mesh)?);
        fully_shard(&other, &mesh, &["dp"])?;
        let names: Vec<String> = saved.state_dict().into_keys().collect();
        assert_eq!(names, ["counts", "layer.bias", "layer.weight"]);
        assert_eq!(saved.named_buffers().len(), 2);
        saved.counts.set(&saved.counts.get().add_scalar(3.0)?);
        saved.angles.set(&saved.angles.get().add_scalar(3.0)?);
        saved.extra.set("{\"steps\": 12}");
        other.load_state_dict(&saved.state_dict())?;
        assert_eq!(numbers(&other.counts.get().full_tensor()?), [3.0; 6]);
        assert_eq!(numbers(&other.angles.get().full_tensor()?), [1.0; 6]);
        // a name that is not part of the state is unexpected
        let mut state = saved.state_dict();
        state.insert("angles".into(), saved.angles.get());
        assert!(other.load_state_dict(&state).unwrap_err().to_string().contains("unexpected [\"angles\"]"));
        let loose = StateDictOptions { strict: false, ..StateDictOptions::default() };
        assert_eq!(other.load_state_dict_with(&state, &loose)?.unexpected_keys, ["angles"]);
        assert_eq!(numbers(&other.angles.get().full_tensor()?), [1.0; 6]);
        // the extra state goes through checkpoints, of every format that stores values
        assert_eq!(saved.named_extra_states()[0].0, "extra");
        for format in [checkpoint::Format::Native, checkpoint::Format::Dcp] {
            let path = path.with_extension(format!("{format:?}"));
            let options = checkpoint::SaveOptions { format, ..Default::default() };
            checkpoint::save_from_with(&world, &path, (&saved,), &options)?;
            other.extra.set("old");
            checkpoint::load_into(&world, &path, (&other,))?;
            assert_eq!(other.extra.get(), "{\"steps\": 12}", "{format:?}");
            let prefixed = StateDictOptions { prefix: "module.".into(), ..StateDictOptions::default() };
            let path = path.with_extension("prefixed");
            checkpoint::save_from_with(&world, &path, (ModelPart::new(&saved, prefixed.clone()),), &options)?;
            other.extra.set("old");
            checkpoint::load_into(&world, &path, (ModelPart::new(&other, prefixed),))?;
            assert_eq!(other.extra.get(), "{\"steps\": 12}", "{format:?}");
        }
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn states_are_loaded_in_parts_and_under_other_names() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let (source, target) = (Net::new(&Builder::new(&mesh), 5, 2)?, Net::new(&Builder::new(&mesh), 5, 2)?);
        fully_shard(&target, &mesh, &["dp"])?;
        // part after part
        let state = source.state_dict();
        let loose = StateDictOptions { strict: false, ..StateDictOptions::default() };
        let mut missing = Vec::new();
        for start in ["first", "blocks.0", "blocks.1", "head"] {
            let part =
                state.iter().filter(|(name, _)| name.starts_with(start)).map(|(n, t)| (n.clone(), t.clone())).collect();
            missing.push(target.load_state_dict_with(&part, &loose)?.missing_keys.len());
        }
        assert_eq!(missing, [14, 10, 10, 14]);
        assert_same_parameters(&source, &target, 0.0, "in parts")?;
        // a submodule alone, and with the prefix that it has in the model
        let fresh = Net::new(&Builder::new(&mesh), 5, 2)?;
        fresh.blocks[1].load_state_dict(&source.blocks[1].state_dict())?;
        let inside = StateDictOptions { prefix: "blocks.0.".into(), ..StateDictOptions::default() };
        fresh.blocks[0].load_state_dict_with(&state, &inside)?;
        let part = source.blocks[0].state_dict_with(&inside);
        assert!(fresh.load_state_dict_with(&part, &loose)?.unexpected_keys.is_empty());
        assert_same_parameters(&source.blocks[0], &fresh.blocks[0], 0.0, "block 0")?;
        assert_same_parameters(&source.blocks[1], &fresh.blocks[1], 0.0, "block 1")?;
        // keys that were renamed are renamed back
        let renamed: BTreeMap<String, DTensor> =
            state.iter().map(|(n, t)| (n.replace("blocks", "layers"), t.clone())).collect();
        assert!(fresh.load_state_dict(&renamed).is_err());
        let back = renamed.into_iter().map(|(n, t)| (n.replace("layers", "blocks"), t)).collect();
        fresh.load_state_dict(&back)?;
        assert_same_parameters(&source, &fresh, 0.0, "renamed")
    };
    launch(2, run).unwrap();
}

#[test]
fn a_parameter_without_saved_moments_starts_anew() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let way = &WAYS[0];
        let _ = way;
        let net = Net::new(&Builder::new(&mesh), 5, 1)?;
        fully_shard(&net, &mesh, &["dp"])?;
        let mut optimizer = AdamW::default().over(&net)?;
        let (x, target) = batch(&mesh, &[Shard(0)], DType::F32, 0)?;
        optimizer.step(net.loss(&x, &target, false)?.backward()?)?;
        let mut state = optimizer.state_dict()?;
        state.params.insert("head.weight".into(), ParamState::default());
        optimizer.load_state_dict(&state)?;
        let loaded = optimizer.state_dict()?;
        assert_eq!(
            (loaded.params["head.weight"].numbers["step"], loaded.params["head.bias"].numbers["step"]),
            (0.0, 1.0)
        );
        // an optimizer without moments has no tensors to save
        let mut plain = Sgd { momentum: 0.0, ..Sgd::default() }.over(&net)?;
        plain.step(net.loss(&x, &target, false)?.backward()?)?;
        let state = plain.state_dict()?;
        assert!(state.params.values().all(|param| param.tensors.is_empty()));
        plain.load_state_dict(&state)?;
        assert_eq!(plain.steps(), 1);
        Ok(())
    };
    launch(2, run).unwrap();
}
