//! Optimizers that need the full matrix (Muon, Adafactor), and Lion: equal to the one-device run in every layout, to
//! PyTorch's results and to formulas written down here; their communication; and their state across world sizes.

mod recorded_steps;

use candle_core::{DType, Tensor};
use recorded_steps::{ADAFACTOR, MUON, muon_step, recorded_gradient, recorded_start};
use shardwise::checkpoint::{self, Format, SaveOptions};
use shardwise::optim::{
    Adafactor, AdjustLr, Algorithm, FullState, Lion, Muon, OptimizerState, ParamGroup, ParamState, ShardedOptimizer,
};
use shardwise::prelude::*;
use shardwise::{DryWorld, Param};
use shardwise_test_suites::parameters::{
    self, full_values, gradients, named, numbers, sharded_layouts, single_rank_mesh, tensor,
};
use shardwise_test_suites::scratch::Scratch;

type Placed = (Vec<usize>, Vec<Placement>);

fn optimizers() -> Vec<Algorithm> {
    vec![
        Muon::default().into(),
        Muon { nesterov: false, momentum: 0.8, adjust_lr_fn: Some(AdjustLr::SpectralUnclamped), ..Muon::default() }
            .into(),
        Adafactor::default().into(),
        Adafactor { eps: (Some(1e-3), 1e-2), d: 2.0, weight_decay: 0.1, ..Adafactor::default() }.into(),
        Lion { weight_decay: 0.1, ..Lion::default() }.into(),
    ]
}

/// Sums over a sharded dimension are added up in another order; all other results have the same bits.
fn tolerance(algorithm: &Algorithm, dtype: DType) -> f64 {
    match (algorithm.name(), dtype) {
        ("adafactor", DType::F64) => 1e-12,
        ("adafactor", _) => 1e-5,
        _ => 0.0,
    }
}

fn assert_near(found: &[f64], expected: &[f64], tolerance: f64, what: &dyn Fn() -> String) {
    assert_eq!(found.len(), expected.len(), "{}", what());
    for (found, expected) in found.iter().zip(expected) {
        let near = (found - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(near, "{}: {found}, expected {expected}", what());
    }
}

/// Matrices (and, for optimizers that take them, other tensors) in layouts on meshes of one axis or of two.
fn layouts(mesh: &DeviceMesh, algorithm: &Algorithm) -> Vec<Placed> {
    let mut all = Vec::new();
    let k = mesh.size();
    if mesh.ndim() == 2 {
        all.extend(sharded_layouts());
        for first in [Replicate, Shard(0), Shard(1)] {
            all.extend([Replicate, Shard(0), Shard(1)].map(|second| (vec![6, 5], vec![first.clone(), second])));
        }
    } else {
        for shape in [vec![5, 3], vec![3, 7], vec![6, 6], vec![2, 3, 4], vec![5], vec![]] {
            let mut placements = vec![Replicate];
            placements.extend((0..shape.len()).map(|dim| Shard(dim as isize)));
            if let Some(&n) = shape.first() {
                let mut sizes = vec![0; k];
                (sizes[0], sizes[k - 1]) = (n / 3, n - n / 3);
                if k > 1 {
                    placements.push(Placement::ragged(0, sizes));
                }
                placements.push(Placement::StridedShard { dim: 0, split_factor: 2 });
            }
            all.extend(placements.into_iter().map(|placement| (shape.clone(), vec![placement])));
        }
    }
    all.retain(|(shape, _)| algorithm.check_shape(shape).is_ok());
    all
}

fn params(mesh: &DeviceMesh, layouts: &[Placed], dtype: DType) -> Result<Vec<Param>> {
    let one = |(i, (shape, placed)): (usize, &Placed)| {
        Ok(Param::new(&tensor(mesh, shape, placed, dtype, &|flat| parameters::initial_value(i, flat))?))
    };
    layouts.iter().enumerate().map(one).collect()
}

/// The same tensors on one rank.
fn unsharded(layouts: &[Placed]) -> Vec<Placed> {
    layouts.iter().map(|(shape, _)| (shape.clone(), vec![Replicate])).collect()
}

#[test]
fn results_do_not_depend_on_the_layout_on_one_to_four_ranks() {
    for axes in [vec![1], vec![2], vec![3], vec![4], vec![2, 2]] {
        let ranks = axes.iter().product();
        let run = move |world: World| {
            let (mesh, one) = (world.mesh(axes.clone())?, single_rank_mesh(&world)?);
            for algorithm in optimizers() {
                for (dtype, maximize) in [(DType::F64, false), (DType::F32, true)] {
                    let layouts = layouts(&mesh, &algorithm);
                    let group = ParamGroup { lr: 0.05, maximize, ..ParamGroup::new(algorithm.clone()) };
                    let sharded = params(&mesh, &layouts, dtype)?;
                    let single = params(&one, &unsharded(&layouts), dtype)?;
                    let mut optimizer = ShardedOptimizer::new(named(&sharded), group.clone())?;
                    let mut reference = ShardedOptimizer::new(named(&single), group.clone())?;
                    for t in 0..3 {
                        optimizer.step(gradients(&sharded, t)?)?;
                        reference.step(gradients(&single, t)?)?;
                        for (i, (found, expected)) in
                            full_values(&sharded)?.iter().zip(full_values(&single)?).enumerate()
                        {
                            let what = || format!("{:?} under {group:?} on {axes:?}, step {t}", layouts[i]);
                            assert_near(found, &expected, tolerance(&algorithm, dtype), &what);
                        }
                    }
                    let (state, expected) = (optimizer.state_dict()?.to_full()?, of_one_rank(&reference.state_dict()?));
                    assert_same_state(&state, &expected, tolerance(&algorithm, dtype));
                    let before: Vec<Layout> = params(&mesh, &layouts, dtype)?.iter().map(Param::layout).collect();
                    let after: Vec<Layout> = sharded.iter().map(Param::layout).collect();
                    assert_eq!(after, before.iter().map(Layout::reduced).collect::<Vec<_>>());
                }
            }
            Ok(())
        };
        ThreadWorld::new(ranks).unwrap().run(run).unwrap();
    }
}

/// The state of an optimizer on a mesh of this rank only.
fn of_one_rank(state: &OptimizerState) -> FullState {
    let of_param = |(name, param): (&String, &ParamState)| {
        let tensors = param.tensors.iter().map(|(kind, tensor)| (kind.clone(), tensor.to_local().unwrap())).collect();
        (name.clone(), ParamState { numbers: param.numbers.clone(), tensors })
    };
    let params = state.params.iter().map(of_param).collect();
    FullState { steps: state.steps, schedule: state.schedule, groups: state.groups.clone(), params }
}

fn assert_same_state(found: &FullState, expected: &FullState, tolerance: f64) {
    for (name, expected) in &expected.params {
        let found: &ParamState<Tensor> = &found.params[name];
        assert_eq!(found.numbers, expected.numbers, "{name}");
        assert!(found.tensors.keys().eq(expected.tensors.keys()), "{name}");
        for (kind, expected) in &expected.tensors {
            assert_eq!(found.tensors[kind].dims(), expected.dims());
            let what = || format!("{kind} of {name}");
            // Second moments are as large as squares of gradients.
            assert_near(&numbers(&found.tensors[kind]), &numbers(expected), tolerance * 1e3, &what);
        }
    }
}

#[test]
fn steps_match_the_recorded_steps_of_torch_optim() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        for (shape, group, expected, tolerances) in
            MUON.iter().map(|case| case.parts()).chain(ADAFACTOR.iter().map(|case| case.parts()))
        {
            for (dtype, tolerance) in [DType::F64, DType::F32].into_iter().zip(tolerances) {
                for placement in [Replicate, Shard(0), Shard(-1)] {
                    if shape.is_empty() && placement != Replicate {
                        continue;
                    }
                    let placed = [placement.clone()];
                    let value = tensor(&mesh, &shape, &placed, dtype, &recorded_start)?;
                    let param = Param::new(&value);
                    let mut optimizer = ShardedOptimizer::new([("w".to_string(), param.clone())], group.clone())?;
                    for t in 0..3 {
                        let gradient = tensor(&mesh, &shape, &placed, dtype, &|flat| recorded_gradient(flat, t))?;
                        optimizer.step(param.get().backward_from(&gradient)?)?;
                    }
                    let found = numbers(&param.get().full_tensor()?);
                    assert_near(&found, expected, tolerance, &|| format!("{group:?} {dtype:?} {placement}"));
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn muon_follows_its_formula() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 3)])?;
        for settings in [Muon::default(), Muon { nesterov: false, momentum: 0.5, ns_steps: 2, ..Muon::default() }] {
            for (shape, placed) in [([9, 4], Shard(0)), ([4, 9], Shard(0)), ([9, 4], Shard(1)), ([7, 7], Replicate)] {
                for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 1e-4)] {
                    let layouts = [(shape.to_vec(), vec![placed.clone()])];
                    let params = params(&mesh, &layouts, dtype)?;
                    let group = ParamGroup::new(settings).with_lr(0.2);
                    let mut optimizer = ShardedOptimizer::new(named(&params), group)?;
                    let count = shape[0] * shape[1];
                    let mut expected: Vec<f64> = (0..count).map(|flat| parameters::initial_value(0, flat)).collect();
                    let mut momentum = vec![0.0; count];
                    for t in 0..4 {
                        optimizer.step(gradients(&params, t)?)?;
                        let slope: Vec<f64> = (0..count).map(|flat| parameters::gradient_value(0, t, flat)).collect();
                        muon_step(&settings, 0.2, shape, &mut expected, &mut momentum, &slope);
                        assert_near(&full_values(&params)?[0], &expected, tolerance, &|| {
                            format!("{settings:?} {shape:?} {t}")
                        });
                    }
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(3).unwrap().run(run).unwrap();
}

/// Bytes that a step sends beyond those of the gradient, which has the layout of the parameter already.
fn sent(
    mesh: &DeviceMesh,
    algorithm: &Algorithm,
    shape: &[usize],
    placed: &[Placement],
) -> Result<Vec<(String, usize)>> {
    let param = Param::new(&tensor(mesh, shape, placed, DType::F32, &|flat| parameters::initial_value(0, flat))?);
    let mut optimizer = ShardedOptimizer::new([("w".to_string(), param.clone())], algorithm.clone())?;
    let gradient = tensor(mesh, shape, placed, DType::F32, &|flat| parameters::gradient_value(0, 0, flat))?;
    let gradients = param.get().backward_from(&gradient)?;
    mesh.world().trace().clear();
    optimizer.step(gradients)?;
    Ok(mesh.world().trace().records().iter().map(|record| (record.call.to_string(), record.bytes)).collect())
}

#[test]
fn muon_gathers_the_matrix_once_and_adafactor_exchanges_statistics() {
    let (n, m) = (24, 12);
    for k in 2..=4 {
        let run = move |world: World| {
            let mesh = world.mesh([("a", k)])?;
            let (muon, adafactor) = (Algorithm::from(Muon::default()), Algorithm::from(Adafactor::default()));
            let call = |name: &str, bytes: usize| (name.to_string(), bytes);
            // an all-reduce of sums, which are communicated in f64
            let sums = |count: usize| call("all_reduce", 2 * 8 * count * (k - 1) / k);
            for dim in [0, 1] {
                let gathered = call("all_gather", n * m * 4 / k * (k - 1));
                assert_eq!(sent(&mesh, &muon, &[n, m], &[Shard(dim)])?, [gathered], "{dim} of {k}");
            }
            // by column, over rows: the mean of the row factors, and the sizes of parameter and update
            assert_eq!(sent(&mesh, &adafactor, &[n, m], &[Shard(0)])?, [sums(m), sums(1), sums(1), sums(1)]);
            assert_eq!(sent(&mesh, &adafactor, &[n, m], &[Shard(1)])?, [sums(n), sums(1), sums(1)]);
            assert_eq!(sent(&mesh, &adafactor, &[n], &[Shard(0)])?, [sums(1), sums(1)]);
            for algorithm in [&muon, &adafactor] {
                assert_eq!(sent(&mesh, algorithm, &[n, m], &[Replicate])?, []);
            }
            let lion = Lion::default().into();
            assert_eq!(sent(&mesh, &lion, &[n, m], &[Shard(0)])?, []);
            if k == 4 {
                let square = world.mesh([("a", 2), ("b", 2)])?;
                for placed in [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)]] {
                    let sent: usize = sent(&square, &muon, &[n, m], &placed)?.iter().map(|(_, bytes)| bytes).sum();
                    assert_eq!(sent, n * m * 4 * 3 / 4, "{placed:?}");
                }
            }
            Ok(())
        };
        ThreadWorld::new(k).unwrap().run(run).unwrap();
    }
}

/// Steps `range`, from values and a state if there are any.
fn train(
    optimizer: &mut ShardedOptimizer,
    params: &[Param],
    range: std::ops::Range<usize>,
) -> Result<(FullState, Vec<Tensor>)> {
    for t in range {
        optimizer.step(gradients(params, t)?)?;
    }
    let values = params.iter().map(|param| param.get().full_tensor()).collect::<Result<_>>()?;
    Ok((optimizer.state_dict()?.to_full()?, values))
}

#[test]
fn a_state_saved_by_two_ranks_resumes_on_three_in_another_layout() {
    let shapes = [vec![6, 5], vec![5, 7], vec![8, 3]];
    for (i, algorithm) in optimizers().into_iter().enumerate() {
        let scratch = Scratch::new(&format!("matrices-{i}"));
        let layouts_of = |placed: [Placement; 3]| -> Vec<Placed> {
            shapes.iter().cloned().zip(placed).map(|(shape, placement)| (shape, vec![placement])).collect()
        };
        let whole = layouts_of([Replicate, Replicate, Replicate]);
        let by_two = layouts_of([Shard(0), Shard(1), Replicate]);
        let by_three = layouts_of([Shard(1), Placement::ragged(0, [1, 0, 4]), Shard(0)]);
        let group = ParamGroup::new(algorithm.clone()).with_lr(0.05);
        let (given, layout) = (group.clone(), whole.clone());
        let alone = ThreadWorld::new(1).unwrap().run(move |world| {
            let params = params(&world.mesh([("a", 1)])?, &layout, DType::F64)?;
            train(&mut ShardedOptimizer::new(named(&params), given.clone())?, &params, 0..6)
        });
        let (expected_state, expected) = alone.unwrap().swap_remove(0);
        let (given, path) = (group.clone(), scratch.0.clone());
        let half = ThreadWorld::new(2).unwrap().run(move |world| {
            let mesh = world.mesh([("a", 2)])?;
            let params = params(&mesh, &by_two, DType::F64)?;
            let mut optimizer = ShardedOptimizer::new(named(&params), given.clone())?;
            let half = train(&mut optimizer, &params, 0..3)?;
            for format in [Format::Native, Format::Dcp] {
                let options = SaveOptions { format, ..SaveOptions::default() };
                checkpoint::save_from_with(&world, path.join(format!("{format:?}")), (&optimizer, &mesh), &options)?;
            }
            Ok(half)
        });
        let (half, values) = half.unwrap().swap_remove(1);
        let path = scratch.0.clone();
        let ends = ThreadWorld::new(3).unwrap().run(move |world| {
            let mesh = world.mesh([("a", 3)])?;
            let mut ends = Vec::new();
            for way in ["memory", "Native", "Dcp"] {
                let params = params(&mesh, &by_three, DType::F64)?;
                for (param, value) in params.iter().zip(&values) {
                    let placed = param.layout().placements().to_vec();
                    param.set(&DTensor::distribute_tensor(value, &mesh, placed, None)?)?;
                }
                // loaded settings replace the settings that the optimizer was created with
                let mut optimizer = ShardedOptimizer::new(named(&params), group.clone().with_lr(7.0))?;
                match way {
                    "memory" => optimizer.load_full_state(&half)?,
                    _ => drop(checkpoint::load_into(&world, path.join(way), (&mut optimizer, &mesh))?),
                }
                assert_eq!((optimizer.steps(), optimizer.groups()[0].lr), (3, 0.05));
                assert_eq!(optimizer.groups()[0].algorithm, group.algorithm);
                ends.push(train(&mut optimizer, &params, 3..6)?);
            }
            Ok(ends)
        });
        for (state, found) in ends.unwrap().swap_remove(2) {
            for (found, expected) in found.iter().zip(&expected) {
                let tolerance = tolerance(&algorithm, DType::F64);
                assert_near(&numbers(found), &numbers(expected), tolerance, &|| format!("{algorithm:?}"));
                assert_same_state(&state, &expected_state, tolerance);
            }
        }
    }
}

#[test]
fn half_precision_parameters_have_master_weights() {
    let run = |world: World| {
        let (mesh, one) = (world.mesh([("a", 2)])?, single_rank_mesh(&world)?);
        for algorithm in optimizers() {
            let layouts = [(vec![5, 3], vec![Shard(0)]), (vec![4, 6], vec![Shard(1)])];
            let (sharded, single) =
                (params(&mesh, &layouts, DType::BF16)?, params(&one, &unsharded(&layouts), DType::BF16)?);
            let group = ParamGroup::new(algorithm.clone()).with_lr(1e-4).with_master();
            let mut optimizer = ShardedOptimizer::new(named(&sharded), group.clone())?;
            let mut reference = ShardedOptimizer::new(named(&single), group)?;
            for t in 0..4 {
                optimizer.step(gradients(&sharded, t)?)?;
                reference.step(gradients(&single, t)?)?;
            }
            let (state, expected) = (optimizer.state_dict()?.to_full()?, of_one_rank(&reference.state_dict()?));
            assert_same_state(&state, &expected, tolerance(&algorithm, DType::F32));
            for ((name, state), param) in state.params.iter().zip(&sharded) {
                let (copy, value) = (&state.tensors["master_param"], param.get().full_tensor()?);
                assert_eq!((copy.dtype(), value.dtype()), (DType::F32, DType::BF16), "{name}");
                assert_eq!(numbers(&copy.to_dtype(DType::BF16)?), numbers(&value), "{name}");
                assert_ne!(numbers(copy), numbers(&value), "{name} of {algorithm:?}");
            }
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn ranks_outside_the_mesh_of_a_parameter_step_without_a_shard() {
    let run = |world: World| {
        let (pair, one) = (world.device_mesh(Mesh::from_ranks([("c", 2)], vec![2, 0])?)?, single_rank_mesh(&world)?);
        for algorithm in optimizers() {
            let layouts = [(vec![5, 3], vec![Shard(0)]), (vec![4, 6], vec![Shard(1)])];
            let sharded = params(&pair, &layouts, DType::F64)?;
            let single = params(&one, &unsharded(&layouts), DType::F64)?;
            let mut optimizer = ShardedOptimizer::new(named(&sharded), algorithm.clone())?;
            let mut reference = ShardedOptimizer::new(named(&single), algorithm.clone())?;
            for t in 0..3 {
                optimizer.step(gradients(&sharded, t)?)?;
                reference.step(gradients(&single, t)?)?;
            }
            let state = optimizer.state_dict()?;
            optimizer.load_state_dict(&state)?;
            if pair.my_coordinate().is_some() {
                for (found, expected) in full_values(&sharded)?.iter().zip(full_values(&single)?) {
                    assert_near(found, &expected, tolerance(&algorithm, DType::F64), &|| format!("{algorithm:?}"));
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(3).unwrap().run(run).unwrap();
}

/// A few steps and a state that is saved and loaded; what is communicated must not depend on data.
fn program(world: &World) -> Result<usize> {
    let mesh = world.mesh([("a", 2), ("b", 2)])?;
    for algorithm in optimizers() {
        let params = params(&mesh, &layouts(&mesh, &algorithm), DType::F32)?;
        let mut optimizer = ShardedOptimizer::new(named(&params), algorithm)?;
        (0..2).try_for_each(|t| optimizer.step(gradients(&params, t)?))?;
        let state = optimizer.state_dict()?;
        optimizer.load_full_state(&state.to_full()?)?;
    }
    Ok(world.memory().current())
}

#[test]
fn a_dry_run_lists_the_collectives_of_the_real_run() {
    let real = ThreadWorld::new(4).unwrap().run(|world| {
        let used = program(&world)?;
        Ok((used, world.trace().records().iter().map(|r| (r.call, r.bytes)).collect::<Vec<_>>()))
    });
    for (rank, (used, calls)) in real.unwrap().into_iter().enumerate() {
        let dry = DryWorld::new(4).unwrap().as_rank(rank).unwrap().run(|world| program(&world)).unwrap();
        assert_eq!(dry.value, used);
        assert_eq!(dry.records.iter().map(|r| (r.call, r.bytes)).collect::<Vec<_>>(), calls);
    }
}

#[test]
fn invalid_parameters_and_settings_are_rejected() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let layouts = [(vec![4, 2], vec![Shard(0)]), (vec![3], vec![Replicate])];
        let params = params(&mesh, &layouts, DType::F32)?;
        let refused = ShardedOptimizer::new(named(&params), Muon::default()).err().expect("a vector");
        let Error::Invalid(invalid) = &refused else { panic!("{refused}") };
        assert_eq!((invalid.found.as_str(), invalid.what), ("`p1` with shape [3]", "parameter for muon"));
        assert!(refused.to_string().contains("a matrix (2 dimensions)"), "{refused}");
        // another group takes it
        let mut both = ShardedOptimizer::new(named(&params[..1]), Muon::default())?;
        assert!(both.add_param_group(named(&params).split_off(1), Muon::default()).is_err());
        both.add_param_group(named(&params).split_off(1), Adafactor::default())?;
        both.step(gradients(&params, 0)?)?;
        let state = both.state_dict()?;
        assert!(state.params["p1"].tensors.keys().eq(["variance"]));
        let (_, layout) = both.state_layout("p0", "momentum_buffer")?.expect("a momentum");
        assert_eq!(layout, params[0].layout());
        assert!(both.state_layout("p0", "variance")?.is_none() && both.state_layout("p2", "variance")?.is_none());

        let mut optimizer = ShardedOptimizer::new(named(&params), Adafactor::default())?;
        optimizer.step(gradients(&params, 1)?)?;
        let mut state: OptimizerState = optimizer.state_dict()?;
        assert_eq!(state.params["p0"].tensors["row_var"].layout().to_string(), "[4, 1] on a=2: S(0)");
        let longer = DTensor::zeros((4, 2), DType::F32, &mesh, [Replicate])?;
        state.params.get_mut("p0").expect("a parameter").tensors.insert("row_var".into(), longer);
        let message = optimizer.load_state_dict(&state).unwrap_err().to_string();
        assert!(message.contains("`row_var` of parameter `p0` with shape [4, 2]"), "{message}");
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}
