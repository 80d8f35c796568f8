//! Optimizer states: saved, loaded into other layouts and worlds, or rejected.

use candle_core::{DType, Tensor};
use shardwise::optim::{
    Adadelta, Adafactor, Adam, AdamW, AdjustLr, Algorithm, FullState, Lion, Muon, NAdam, OptimizerState, ParamGroup,
    RmsProp, Schedule, Sgd, ShardedOptimizer,
};
use shardwise::prelude::*;
use shardwise_test_suites::parameters::{
    algorithms, full_values, gradient_value, gradients, named, numbers, params, sharded_layouts,
};

/// Steps `range` of an optimizer that resumes from a state.
fn go_on(
    mesh: &DeviceMesh,
    layouts: &[(Vec<usize>, Vec<Placement>)],
    algorithm: Algorithm,
    from: Option<&(FullState, Vec<Tensor>)>,
    range: std::ops::Range<usize>,
) -> Result<(FullState, Vec<Tensor>)> {
    let params = params(mesh, layouts)?;
    // loaded settings replace the settings that the optimizer was created with
    let lr = if from.is_some() { 7.0 } else { 0.05 };
    let mut optimizer = ShardedOptimizer::new(named(&params[..4]), ParamGroup::new(algorithm).with_lr(lr))?;
    optimizer
        .add_param_group(named(&params).into_iter().skip(4), ParamGroup::new(Adam::default()).with_lr(lr / 2.0))?;
    optimizer.set_schedule(Schedule::Linear { warmup: 3, total: 10, end: 0.0 });
    if let Some((state, values)) = from {
        for (param, value) in params.iter().zip(values) {
            let placed = param.layout().placements().to_vec();
            param.set(&DTensor::distribute_tensor(value, mesh, placed, None)?)?;
        }
        optimizer.load_full_state(state)?;
    }
    for t in range {
        optimizer.step(gradients(&params, t)?)?;
    }
    let values = params.iter().map(|param| param.get().full_tensor()).collect::<Result<_>>()?;
    Ok((optimizer.state_dict()?.to_full()?, values))
}

#[test]
fn a_state_saved_by_four_ranks_resumes_on_three() {
    for algorithm in algorithms() {
        let layouts = sharded_layouts;
        let four = |from: Option<(FullState, Vec<Tensor>)>, range: std::ops::Range<usize>| {
            let algorithm = algorithm.clone();
            let run = move |world: World| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                go_on(&mesh, &layouts(), algorithm.clone(), from.as_ref(), range.clone())
            };
            ThreadWorld::new(4).unwrap().run(run).unwrap().swap_remove(3)
        };
        let (expected_state, expected) = four(None, 0..6);
        let half = four(None, 0..3);
        let again = algorithm.clone();
        let run = move |world: World| {
            let mesh = world.mesh([("a", 3)])?;
            let other = |(i, (shape, _)): (usize, (Vec<usize>, _))| match (i % 3, shape.is_empty()) {
                (0, false) => (shape, vec![Shard(0)]),
                (1, false) => {
                    let n = shape[0];
                    (shape, vec![Placement::ragged(0, [n - n / 2, 0, n / 2])])
                }
                _ => (shape, vec![Replicate]),
            };
            let layouts: Vec<_> = sharded_layouts().into_iter().enumerate().map(other).collect();
            go_on(&mesh, &layouts, again.clone(), Some(&half), 3..6)
        };
        let (state, got) = ThreadWorld::new(3).unwrap().run(run).unwrap().swap_remove(1);
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(numbers(got), numbers(expected), "{algorithm:?}, parameter {i}");
        }
        assert_eq!(state.steps, 6);
        assert_eq!(state.groups, expected_state.groups);
        for (name, expected) in &expected_state.params {
            assert_eq!(state.params[name].numbers, expected.numbers);
            for (kind, expected) in &expected.tensors {
                assert_eq!(numbers(&state.params[name].tensors[kind]), numbers(expected), "{kind} of {name}");
            }
        }
    }
}

#[test]
fn a_state_moves_between_placements_and_meshes_of_one_world() {
    let run = |world: World| {
        let square = world.mesh([("a", 2), ("b", 2)])?;
        // three of the four ranks, in another order
        let row = world.device_mesh(Mesh::from_ranks([("c", 3)], vec![3, 0, 2])?)?;
        let shapes: Vec<Vec<usize>> = vec![vec![5, 3], vec![8]];
        let on = |mesh: &DeviceMesh, placed: &[Placement]| {
            let layouts: Vec<_> = shapes.iter().map(|shape| (shape.clone(), placed.to_vec())).collect();
            params(mesh, &layouts)
        };
        let group = ParamGroup::new(Adam { amsgrad: true, ..Adam::default() });
        let first = on(&square, &[Shard(0), Replicate])?;
        let mut optimizer = ShardedOptimizer::new(named(&first), group.clone())?;
        (0..3).try_for_each(|t| optimizer.step(gradients(&first, t)?))?;
        let state = optimizer.state_dict()?;
        optimizer.step(gradients(&first, 3)?)?;
        let expected = full_values(&first)?;
        for (mesh, placed) in [
            (&square, vec![Replicate, Shard(0)]),
            (&square, vec![Replicate, Replicate]),
            (&row, vec![Shard(0)]),
            (&row, vec![Replicate]),
        ] {
            let second = on(mesh, &placed)?;
            let mut other = ShardedOptimizer::new(named(&second), group.clone())?;
            // the same values as after three steps
            let mut again = ShardedOptimizer::new(named(&second), group.clone())?;
            (0..3).try_for_each(|t| again.step(gradients(&second, t)?))?;
            other.load_state_dict(&state)?;
            other.step(gradients(&second, 3)?)?;
            if mesh.my_coordinate().is_some() {
                assert_eq!(full_values(&second)?, expected, "{placed:?}");
            }
        }
        // whole tensors are on all ranks, also those outside the mesh of a parameter
        let third = on(&row, &[Shard(0)])?;
        let mut third = ShardedOptimizer::new(named(&third), group)?;
        third.load_state_dict(&state)?;
        let full = third.state_dict()?.to_full()?;
        let expected = state.to_full()?;
        assert_eq!(numbers(&full.params["p1"].tensors["exp_avg"]), numbers(&expected.params["p1"].tensors["exp_avg"]));
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn a_parameter_that_is_moved_or_converted_keeps_its_state() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let shape = [(vec![5], vec![Shard(0)])];
        let (moved, still) = (params(&mesh, &shape)?, params(&mesh, &shape)?);
        let group = ParamGroup::new(Sgd { momentum: 0.5, ..Sgd::default() }).with_lr(0.25);
        let mut one = ShardedOptimizer::new(named(&moved), group.clone())?;
        let mut other = ShardedOptimizer::new(named(&still), group.clone())?;
        for t in 0..4 {
            one.step(gradients(&moved, t)?)?;
            other.step(gradients(&still, t)?)?;
            let placed = if t % 2 == 0 { Replicate } else { Placement::ragged(0, [1, 4]) };
            moved[0].set(&moved[0].get().redistribute([placed])?)?;
        }
        assert_eq!(full_values(&moved)?, full_values(&still)?);
        moved[0].set(&moved[0].get().to_dtype(DType::F32)?)?;
        one.step(gradients(&moved, 4)?)?;
        other.step(gradients(&still, 4)?)?;
        assert_eq!(one.state_dict()?.params["p0"].tensors["momentum_buffer"].dtype(), DType::F32);
        for (a, b) in full_values(&moved)?[0].iter().zip(&full_values(&still)?[0]) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
        // momentum that is disabled and enabled again starts at zero
        one.groups_mut()[0].algorithm = Sgd::default().into();
        one.step(gradients(&moved, 5)?)?;
        assert!(one.state_dict()?.params["p0"].tensors.is_empty());
        one.groups_mut()[0] = group;
        one.step(gradients(&moved, 6)?)?;
        let buffer = one.state_dict()?.params["p0"].tensors["momentum_buffer"].full_tensor()?;
        assert_eq!(numbers(&buffer), (0..5).map(|flat| gradient_value(0, 6, flat)).collect::<Vec<_>>());
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn mismatched_states_are_rejected_without_changes() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let layouts = [(vec![4, 2], vec![Shard(0)]), (vec![3], vec![Replicate])];
        let params = params(&mesh, &layouts)?;
        let group = ParamGroup::new(Adam::default());
        let mut optimizer = ShardedOptimizer::new(named(&params), group.clone())?;
        optimizer.step(gradients(&params, 0)?)?;
        let (good, before) = (optimizer.state_dict()?, full_values(&params)?);
        let refused = |optimizer: &mut ShardedOptimizer, change: &dyn Fn(&mut OptimizerState), parts: &[&str]| {
            let mut state = good.clone();
            state.steps = 99;
            state.params.get_mut("p0").unwrap().numbers.insert("step".into(), 50.0);
            change(&mut state);
            let mut messages = vec![optimizer.load_state_dict(&state).expect_err(parts[0]).to_string()];
            messages.push(optimizer.load_full_state(&state.to_full().unwrap()).expect_err(parts[0]).to_string());
            for message in messages {
                assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} in {message}");
            }
            let kept = optimizer.state_dict().unwrap();
            assert_eq!((kept.steps, kept.params["p0"].numbers["step"]), (1, 1.0));
        };
        let longer = DTensor::zeros((5, 2), DType::F64, &mesh, [Replicate])?;
        refused(&mut optimizer, &|s| drop(s.params.remove("p1")), &["no parameter `p1`", "all parameters"]);
        refused(
            &mut optimizer,
            &|s| drop(s.params.insert("q".into(), s.params["p1"].clone())),
            &["parameter `q`", "of the optimizer only"],
        );
        refused(
            &mut optimizer,
            &|s| drop(s.params.get_mut("p0").unwrap().tensors.insert("exp_avg".into(), longer.clone())),
            &["`exp_avg` of parameter `p0` with shape [5, 2]", "[4, 2]"],
        );
        refused(
            &mut optimizer,
            &|s| drop(s.params.get_mut("p1").unwrap().tensors.remove("exp_avg_sq")),
            &["no `exp_avg_sq` of parameter `p1`"],
        );
        refused(
            &mut optimizer,
            &|s| {
                let p1 = s.params.get_mut("p1").unwrap();
                p1.tensors.insert("exp_inf".into(), p1.tensors["exp_avg"].clone());
            },
            &["`exp_inf` of parameter `p1`"],
        );
        refused(
            &mut optimizer,
            &|s| s.params.get_mut("p1").unwrap().numbers.clear(),
            &["nothing as `step` of parameter `p1`"],
        );
        refused(&mut optimizer, &|s| s.groups.push(s.groups[0].clone()), &["2 group(s)", "needed 1"]);
        refused(&mut optimizer, &|s| s.groups[0].params.truncate(1), &["[\"p0\"] in group 0"]);
        refused(&mut optimizer, &|s| s.groups[0].group = ParamGroup::new(AdamW::default()), &["adamw", "adam"]);
        refused(&mut optimizer, &|s| s.groups[0].group.lr = -1.0, &["learning rate", "-1"]);
        optimizer.load_state_dict(&good)?;

        for (result, parts) in [
            (optimizer.add_param_group(named(&params[..1]), group.clone()), ["`p0` together with `p0`", "once"]),
            (
                optimizer.add_param_group([("x".into(), params[1].clone())], group.clone()),
                ["`x` together with `p1`", "once"],
            ),
            (optimizer.add_param_group([], ParamGroup { lr: f64::NAN, ..group.clone() }), ["learning rate", "NaN"]),
            (params[0].set(&DTensor::zeros(8, DType::F64, &mesh, [Replicate])?), ["[8]", "[4, 2]"]),
        ] {
            let message = result.unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} in {message}");
        }
        let bad: [Algorithm; 8] = [
            Sgd { nesterov: true, ..Sgd::default() }.into(),
            Adam { betas: (1.0, 0.9), ..Adam::default() }.into(),
            RmsProp { eps: -1.0, ..RmsProp::default() }.into(),
            Adadelta { rho: 1.5, ..Adadelta::default() }.into(),
            NAdam { momentum_decay: f64::NAN, ..NAdam::default() }.into(),
            Lion { betas: (0.9, -0.1), ..Lion::default() }.into(),
            Adafactor { d: 0.5, ..Adafactor::default() }.into(),
            Muon { ns_steps: 100, ..Muon::default() }.into(),
        ];
        for algorithm in bad {
            assert!(ShardedOptimizer::new(named(&params), algorithm.clone()).is_err(), "{algorithm:?}");
            // also when it is set later
            optimizer.groups_mut()[0].algorithm = algorithm;
            assert!(optimizer.step(gradients(&params, 1)?).is_err());
            optimizer.groups_mut()[0] = group.clone();
        }
        // gradients of outdated parameter values
        let stale = gradients(&params, 1)?;
        params.iter().try_for_each(|param| param.set(&param.get()))?;
        let message = optimizer.step(stale).unwrap_err().to_string();
        assert!(message.contains("none of them of a parameter"), "{message}");
        assert_eq!((full_values(&params)?, optimizer.steps(), optimizer.groups().len()), (before, 1, 1));
        // a parameter without a gradient stays, and so does its state
        optimizer.step(gradients(&params[..1], 1)?)?;
        let steps = optimizer.state_dict()?.params.into_values().map(|p| p.numbers["step"]).collect::<Vec<_>>();
        assert_eq!(steps, [2.0, 1.0]);
        assert_eq!(optimizer.param("p1").unwrap().shape(), [3]);
        assert!(optimizer.param("p2").is_none());
        assert_eq!(optimizer.params().map(|(name, _)| name).collect::<Vec<_>>(), ["p0", "p1"]);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn settings_round_trip_through_storage() {
    let muon = Muon { adjust_lr_fn: Some(AdjustLr::MatchRmsAdamw), ..Muon::default() };
    let others =
        [muon.into(), Adafactor::default().into(), Adafactor { eps: (Some(0.1), 0.2), ..Adafactor::default() }.into()];
    for algorithm in algorithms().into_iter().chain(others) {
        let group = ParamGroup::new(algorithm.clone()).with_lr(0.3).maximizing().with_master();
        let text = serde_json::to_string(&group).unwrap();
        assert_eq!(serde_json::from_str::<ParamGroup>(&text).unwrap(), group, "{text}");
        assert!(Algorithm::names().contains(&algorithm.name()));
        assert_eq!(Algorithm::by_name(algorithm.name()).unwrap().name(), algorithm.name());
    }
    // the format with type names, written by earlier versions
    let old = r#"{"AdamW":{"betas":[0.9,0.95],"eps":1e-8,"weight_decay":0.1,"amsgrad":false}}"#;
    let expected = Algorithm::from(AdamW { betas: (0.9, 0.95), weight_decay: 0.1, ..AdamW::default() });
    assert_eq!(serde_json::from_str::<Algorithm>(old).unwrap(), expected);
    let message = Algorithm::by_name("adamm").unwrap_err().to_string();
    assert!(message.contains("`adamm`") && message.contains("adamw, rmsprop"), "{message}");
    let message = expected.with_setting("momentum", 0.5).unwrap_err().to_string();
    assert!(message.contains("`momentum` of adamw") && message.contains("weight_decay"), "{message}");
}
