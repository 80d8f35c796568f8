//! Optimizers on parameters in every kind of layout against the unsharded run and against the formulas, number by number.

#[path = "suites/values.rs"]
mod values;

use candle_core::{DType, Tensor};
use shardwise::optim::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Algorithm, FullState, NAdam, OptimizerState, ParamGroup, RmsProp, Schedule,
    Sgd, ShardedOptimizer, clip_grad_norm, clip_grad_value,
};
use shardwise::prelude::*;
use shardwise::{DryWorld, Param};

/// Every algorithm in all its forms.
fn algorithms() -> Vec<Algorithm> {
    let (sgd, rms) = (Sgd { weight_decay: 0.1, ..Sgd::default() }, RmsProp { weight_decay: 0.1, ..RmsProp::default() });
    let adam = Adam { weight_decay: 0.1, ..Adam::default() };
    vec![
        sgd.into(),
        Sgd { momentum: 0.9, dampening: 0.3, ..sgd }.into(),
        Sgd { momentum: 0.9, nesterov: true, ..sgd }.into(),
        Adagrad { lr_decay: 0.1, weight_decay: 0.1, initial_accumulator_value: 0.5, ..Adagrad::default() }.into(),
        adam.into(),
        Adam { amsgrad: true, betas: (0.5, 0.7), ..adam }.into(),
        AdamW::default().into(),
        AdamW { amsgrad: true, betas: (0.5, 0.7), ..AdamW::default() }.into(),
        rms.into(),
        RmsProp { momentum: 0.9, ..rms }.into(),
        RmsProp { centered: true, ..rms }.into(),
        RmsProp { momentum: 0.9, centered: true, ..rms }.into(),
        Adadelta { weight_decay: 0.1, ..Adadelta::default() }.into(),
        Adamax { weight_decay: 0.1, ..Adamax::default() }.into(),
        NAdam { weight_decay: 0.1, ..NAdam::default() }.into(),
    ]
}

/// Shapes of parameters, with a layout on two axes of two.
fn layouts() -> Vec<(Vec<usize>, [Placement; 2])> {
    vec![
        (vec![5, 3], [Shard(0), Shard(1)]),
        (vec![7], [Shard(0), Shard(0)]),
        (vec![7, 2], [Placement::ragged(0, [5, 2]), Replicate]),
        (vec![9, 2], [Replicate, Placement::StridedShard { dim: 0, split_factor: 3 }]),
        (vec![3, 40], [Replicate, Replicate]),
        (vec![], [Replicate, Replicate]),
        (vec![4], [Partial(ReduceOp::Sum), Replicate]),
        (vec![0, 3], [Shard(0), Replicate]),
        (vec![1], [Shard(0), Shard(0)]),
    ]
}

/// Layouts of gradients: as parameters, as pending sums, otherwise.
fn gradient_placements(shape: &[usize], t: usize) -> [Placement; 2] {
    match (t % 3, shape.is_empty()) {
        (0, _) => [Partial(ReduceOp::Sum), Partial(ReduceOp::Sum)],
        (1, false) => [Shard(0), Partial(ReduceOp::Sum)],
        _ => [Replicate, Replicate],
    }
}

fn start(i: usize, flat: usize) -> f64 {
    values::value(flat + 100 * i) / 16.0
}

fn slope(i: usize, t: usize, flat: usize) -> f64 {
    values::value(flat + 1000 * t + 100 * i + 17)
}

fn tensor(
    mesh: &DeviceMesh,
    shape: &[usize],
    placed: &[Placement],
    dtype: DType,
    f: &dyn Fn(usize) -> f64,
) -> Result<DTensor> {
    let layout = Layout::new(mesh.mesh(), shape, placed.to_vec())?;
    let local = values::local_of(&layout, mesh.world().rank(), f).to_dtype(dtype)?;
    DTensor::from_local_with_shape(&local, mesh, placed.to_vec(), shape)
}

/// Parameters `p0`, `p1`, ... in layouts on a mesh.
fn params(mesh: &DeviceMesh, layouts: &[(Vec<usize>, Vec<Placement>)]) -> Result<Vec<Param>> {
    let one = |(i, (shape, placed)): (usize, &(Vec<usize>, Vec<Placement>))| {
        Ok(Param::new(&tensor(mesh, shape, placed, DType::F64, &|flat| start(i, flat))?))
    };
    layouts.iter().enumerate().map(one).collect()
}

fn named(params: &[Param]) -> Vec<(String, Param)> {
    params.iter().enumerate().map(|(i, param)| (format!("p{i}"), param.clone())).collect()
}

/// The gradients of a step, in layouts that change from step to step.
fn gradients(params: &[Param], t: usize) -> Result<Gradients> {
    let mut all: Option<Gradients> = None;
    for (i, param) in params.iter().enumerate() {
        let leaf = param.get();
        let placed = match leaf.placements().len() {
            2 => gradient_placements(leaf.shape(), t).to_vec(),
            _ => vec![Partial(ReduceOp::Sum)],
        };
        let cotangent = tensor(leaf.device_mesh(), leaf.shape(), &placed, leaf.dtype(), &|flat| slope(i, t, flat))?;
        let one = leaf.backward_with(&cotangent)?;
        all = Some(match all {
            Some(all) => all.accumulate(one)?,
            None => one,
        });
    }
    Ok(all.unwrap())
}

fn numbers(t: &Tensor) -> Vec<f64> {
    if t.elem_count() == 0 {
        return Vec::new();
    }
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn whole(params: &[Param]) -> Result<Vec<Vec<f64>>> {
    params.iter().map(|param| Ok(numbers(&param.get().full_tensor()?))).collect()
}

/// On every rank by itself.
fn alone(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)
}

fn spread() -> Vec<(Vec<usize>, Vec<Placement>)> {
    layouts().into_iter().map(|(shape, placed)| (shape, placed.to_vec())).collect()
}

fn unspread() -> Vec<(Vec<usize>, Vec<Placement>)> {
    layouts().into_iter().map(|(shape, _)| (shape, vec![Replicate])).collect()
}

/// One element under an algorithm, as the formulas are written down.
struct Scalar {
    p: f64,
    state: [f64; 3],
    product: f64,
}

impl Scalar {
    fn step(&mut self, algorithm: &Algorithm, lr: f64, g: f64, t: i32) {
        let [a, b, c] = &mut self.state;
        let p = self.p;
        match *algorithm {
            Algorithm::Sgd(s) => {
                let mut g = g + s.weight_decay * p;
                if s.momentum != 0.0 {
                    *a = if t == 1 { g } else { s.momentum * *a + (1.0 - s.dampening) * g };
                    g = if s.nesterov { g + s.momentum * *a } else { *a };
                }
                self.p -= lr * g;
            }
            Algorithm::Adagrad(s) => {
                let g = g + s.weight_decay * p;
                if t == 1 {
                    *a = s.initial_accumulator_value;
                }
                *a += g * g;
                self.p -= lr / (1.0 + f64::from(t - 1) * s.lr_decay) * g / (a.sqrt() + s.eps);
            }
            Algorithm::Adam(_) | Algorithm::AdamW(_) => {
                let (betas, eps, amsgrad, g) = match *algorithm {
                    Algorithm::Adam(s) => (s.betas, s.eps, s.amsgrad, g + s.weight_decay * p),
                    Algorithm::AdamW(s) => {
                        self.p *= 1.0 - lr * s.weight_decay;
                        (s.betas, s.eps, s.amsgrad, g)
                    }
                    _ => unreachable!(),
                };
                *a = betas.0 * *a + (1.0 - betas.0) * g;
                *b = betas.1 * *b + (1.0 - betas.1) * g * g;
                *c = c.max(*b);
                let v = if amsgrad { *c } else { *b };
                let (m, v) = (*a / (1.0 - betas.0.powi(t)), v / (1.0 - betas.1.powi(t)));
                self.p -= lr * m / (v.sqrt() + eps);
            }
            Algorithm::RmsProp(s) => {
                let g = g + s.weight_decay * p;
                *a = s.alpha * *a + (1.0 - s.alpha) * g * g;
                let mut q = *a;
                if s.centered {
                    *b = s.alpha * *b + (1.0 - s.alpha) * g;
                    q -= *b * *b;
                }
                let mut u = g / (q.sqrt() + s.eps);
                if s.momentum != 0.0 {
                    *c = s.momentum * *c + u;
                    u = *c;
                }
                self.p -= lr * u;
            }
            Algorithm::Adadelta(s) => {
                let g = g + s.weight_decay * p;
                *a = s.rho * *a + (1.0 - s.rho) * g * g;
                let u = g * (*b + s.eps).sqrt() / (*a + s.eps).sqrt();
                *b = s.rho * *b + (1.0 - s.rho) * u * u;
                self.p -= lr * u;
            }
            Algorithm::Adamax(s) => {
                let g = g + s.weight_decay * p;
                *a = s.betas.0 * *a + (1.0 - s.betas.0) * g;
                *b = (s.betas.1 * *b).max(g.abs() + s.eps);
                self.p -= lr / (1.0 - s.betas.0.powi(t)) * *a / *b;
            }
            Algorithm::NAdam(s) => {
                let g = g + s.weight_decay * p;
                *a = s.betas.0 * *a + (1.0 - s.betas.0) * g;
                *b = s.betas.1 * *b + (1.0 - s.betas.1) * g * g;
                let mu = |t: i32| s.betas.0 * (1.0 - 0.96f64.powf(f64::from(t) * s.momentum_decay) / 2.0);
                self.product *= mu(t);
                let d = (*b / (1.0 - s.betas.1.powi(t))).sqrt() + s.eps;
                self.p -= lr * (1.0 - mu(t)) / (1.0 - self.product) * g / d;
                self.p -= lr * mu(t + 1) / (1.0 - self.product * mu(t + 1)) * *a / d;
            }
        }
    }
}

#[test]
fn every_algorithm_follows_its_formula_and_does_not_see_the_layout() {
    let run = |world: World| {
        let (mesh, one) = (world.mesh([("a", 2), ("b", 2)])?, alone(&world)?);
        for (algorithm, maximize) in algorithms().into_iter().flat_map(|a| [(a, false), (a, true)]) {
            let group = ParamGroup { lr: 0.05, maximize, ..ParamGroup::new(algorithm) };
            let (sharded, single) = (params(&mesh, &spread())?, params(&one, &unspread())?);
            let mut optimizer = ShardedOptimizer::new(named(&sharded), group)?;
            let mut reference = ShardedOptimizer::new(named(&single), group)?;
            let layouts: Vec<Layout> = sharded.iter().map(|p| p.layout().settled()).collect();
            for t in 0..5 {
                optimizer.step(gradients(&sharded, t)?)?;
                reference.step(gradients(&single, t)?)?;
                assert_eq!(whole(&sharded)?, whole(&single)?, "{group:?} after step {t}");
            }
            assert_eq!(layouts, sharded.iter().map(Param::layout).collect::<Vec<_>>());
            for (i, found) in whole(&single)?.iter().enumerate() {
                for (flat, &found) in found.iter().enumerate() {
                    let mut scalar = Scalar { p: start(i, flat), state: [0.0; 3], product: 1.0 };
                    let sign = if maximize { -1.0 } else { 1.0 };
                    (0..5).for_each(|t| scalar.step(&algorithm, 0.05, sign * slope(i, t, flat), t as i32 + 1));
                    let close = (found - scalar.p).abs() <= 1e-12 * scalar.p.abs().max(1.0);
                    assert!(close, "{group:?}: element {flat} of {i} is {found}, formula {}", scalar.p);
                }
            }
            // the states are the same, too
            let (state, expected) = (optimizer.state_dict()?.to_full()?, reference.state_dict()?);
            for (name, expected) in &expected.params {
                assert_eq!(state.params[name].numbers, expected.numbers);
                let kinds =
                    |keys: std::collections::btree_map::Keys<'_, String, Tensor>| keys.cloned().collect::<Vec<_>>();
                let mut listed = algorithm.tensors().to_vec();
                listed.sort_unstable();
                assert_eq!(kinds(state.params[name].tensors.keys()), listed);
                for (kind, expected) in &expected.tensors {
                    let got = &state.params[name].tensors[kind];
                    assert_eq!(numbers(got), numbers(expected.to_local()), "{kind} of {name}, {group:?}");
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

/// Steps `range` of an optimizer that goes on from a state.
fn go_on(
    mesh: &DeviceMesh,
    layouts: &[(Vec<usize>, Vec<Placement>)],
    algorithm: Algorithm,
    from: Option<&(FullState, Vec<Tensor>)>,
    range: std::ops::Range<usize>,
) -> Result<(FullState, Vec<Tensor>)> {
    let params = params(mesh, layouts)?;
    // what is loaded counts, not what the optimizer is made with
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
fn a_state_of_four_ranks_goes_on_in_three_as_if_it_had_never_stopped() {
    for algorithm in algorithms() {
        let layouts = spread;
        let four = |from: Option<(FullState, Vec<Tensor>)>, range: std::ops::Range<usize>| {
            let run = move |world: World| {
                let mesh = world.mesh([("a", 2), ("b", 2)])?;
                go_on(&mesh, &layouts(), algorithm, from.as_ref(), range.clone())
            };
            ThreadWorld::new(4).unwrap().run(run).unwrap().swap_remove(3)
        };
        let (expected_state, expected) = four(None, 0..6);
        let half = four(None, 0..3);
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
            let layouts: Vec<_> = spread().into_iter().enumerate().map(other).collect();
            go_on(&mesh, &layouts, algorithm, Some(&half), 3..6)
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
        let mut optimizer = ShardedOptimizer::new(named(&first), group)?;
        (0..3).try_for_each(|t| optimizer.step(gradients(&first, t)?))?;
        let state = optimizer.state_dict()?;
        optimizer.step(gradients(&first, 3)?)?;
        let expected = whole(&first)?;
        for (mesh, placed) in [
            (&square, vec![Replicate, Shard(0)]),
            (&square, vec![Replicate, Replicate]),
            (&row, vec![Shard(0)]),
            (&row, vec![Replicate]),
        ] {
            let second = on(mesh, &placed)?;
            let mut other = ShardedOptimizer::new(named(&second), group)?;
            // the same values as after three steps
            let mut again = ShardedOptimizer::new(named(&second), group)?;
            (0..3).try_for_each(|t| again.step(gradients(&second, t)?))?;
            other.load_state_dict(&state)?;
            other.step(gradients(&second, 3)?)?;
            if mesh.my_coordinate().is_some() {
                assert_eq!(whole(&second)?, expected, "{placed:?}");
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
        let mut one = ShardedOptimizer::new(named(&moved), group)?;
        let mut other = ShardedOptimizer::new(named(&still), group)?;
        for t in 0..4 {
            one.step(gradients(&moved, t)?)?;
            other.step(gradients(&still, t)?)?;
            let placed = if t % 2 == 0 { Replicate } else { Placement::ragged(0, [1, 4]) };
            moved[0].set(&moved[0].get().redistribute([placed])?)?;
        }
        assert_eq!(whole(&moved)?, whole(&still)?);
        moved[0].set(&moved[0].get().to_dtype(DType::F32)?)?;
        one.step(gradients(&moved, 4)?)?;
        other.step(gradients(&still, 4)?)?;
        assert_eq!(one.state_dict()?.params["p0"].tensors["momentum_buffer"].dtype(), DType::F32);
        for (a, b) in whole(&moved)?[0].iter().zip(&whole(&still)?[0]) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
        // momentum that is switched off and on begins anew
        one.groups_mut()[0].algorithm = Sgd::default().into();
        one.step(gradients(&moved, 5)?)?;
        assert!(one.state_dict()?.params["p0"].tensors.is_empty());
        one.groups_mut()[0] = group;
        one.step(gradients(&moved, 6)?)?;
        let buffer = one.state_dict()?.params["p0"].tensors["momentum_buffer"].full_tensor()?;
        assert_eq!(numbers(&buffer), (0..5).map(|flat| slope(0, 6, flat)).collect::<Vec<_>>());
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn half_precision_parameters_learn_slowly_only_with_a_finer_copy() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        for dtype in [DType::BF16, DType::F16] {
            let param = || -> Result<Param> { Ok(Param::new(&tensor(&mesh, &[700], &[Shard(0)], dtype, &|_| 1.0)?)) };
            let (coarse, fine) = (param()?, param()?);
            let group = ParamGroup::new(Sgd::default()).with_lr(1e-5);
            let mut without = ShardedOptimizer::new([("w".into(), coarse.clone())], group)?;
            let mut with = ShardedOptimizer::new([("w".into(), fine.clone())], group.with_master())?;
            for _ in 0..50 {
                without.step(coarse.get().sum_all()?.backward()?)?;
                with.step(fine.get().sum_all()?.backward()?)?;
            }
            let state = with.state_dict()?;
            let mut again = ShardedOptimizer::new([("w".into(), fine.clone())], group.with_master())?;
            again.load_state_dict(&state)?;
            for _ in 0..450 {
                without.step(coarse.get().sum_all()?.backward()?)?;
                again.step(fine.get().sum_all()?.backward()?)?;
            }
            assert_eq!((coarse.dtype(), fine.dtype()), (dtype, dtype));
            assert!(whole(&[coarse])?[0].iter().all(|&x| x == 1.0));
            assert!(whole(&[fine])?[0].iter().all(|&x| (x - 0.995).abs() < 2e-3));
            let master = again.state_dict()?.params["w"].tensors["master_param"].full_tensor()?;
            assert_eq!(master.dtype(), DType::F32);
            assert!(numbers(&master).iter().all(|x| (x - 0.995).abs() < 1e-5));
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let layouts = [(vec![4, 2], vec![Shard(0)]), (vec![3], vec![Replicate])];
        let params = params(&mesh, &layouts)?;
        let group = ParamGroup::new(Adam::default());
        let mut optimizer = ShardedOptimizer::new(named(&params), group)?;
        optimizer.step(gradients(&params, 0)?)?;
        let (good, before) = (optimizer.state_dict()?, whole(&params)?);
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
            (optimizer.add_param_group(named(&params[..1]), group), ["`p0` beside `p0`", "once"]),
            (optimizer.add_param_group([("x".into(), params[1].clone())], group), ["`x` beside `p1`", "once"]),
            (optimizer.add_param_group([], ParamGroup { lr: f64::NAN, ..group }), ["learning rate", "NaN"]),
            (params[0].set(&DTensor::zeros(8, DType::F64, &mesh, [Replicate])?), ["[8]", "[4, 2]"]),
        ] {
            let message = result.unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} in {message}");
        }
        let bad: [Algorithm; 5] = [
            Sgd { nesterov: true, ..Sgd::default() }.into(),
            Adam { betas: (1.0, 0.9), ..Adam::default() }.into(),
            RmsProp { eps: -1.0, ..RmsProp::default() }.into(),
            Adadelta { rho: 1.5, ..Adadelta::default() }.into(),
            NAdam { momentum_decay: f64::NAN, ..NAdam::default() }.into(),
        ];
        for algorithm in bad {
            assert!(ShardedOptimizer::new(named(&params), ParamGroup::new(algorithm)).is_err(), "{algorithm:?}");
            // also when it is set later
            optimizer.groups_mut()[0].algorithm = algorithm;
            assert!(optimizer.step(gradients(&params, 1)?).is_err());
            optimizer.groups_mut()[0] = group;
        }
        // gradients of values that are no longer current
        let stale = gradients(&params, 1)?;
        params.iter().try_for_each(|param| param.set(&param.get()))?;
        let message = optimizer.step(stale).unwrap_err().to_string();
        assert!(message.contains("none of them of a parameter"), "{message}");
        assert_eq!((whole(&params)?, optimizer.steps(), optimizer.groups().len()), (before, 1, 1));
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
fn clipping_counts_every_element_of_every_mesh_once() {
    let run = |world: World| {
        let square = world.mesh([("a", 2), ("b", 2)])?;
        let pair = world.device_mesh(Mesh::from_ranks([("c", 2)], vec![2, 1])?)?;
        let mut all = params(&square, &spread())?;
        all.extend(params(&pair, &[(vec![5], vec![Shard(0)]), (vec![3, 3], vec![Replicate])])?);
        let extra = Param::new(&tensor(&square, &[3], &[Replicate, Shard(0)], DType::F64, &|_| 1.0)?);
        let values: Vec<Vec<f64>> = all
            .iter()
            .enumerate()
            .map(|(i, param)| (0..param.shape().iter().product()).map(|flat| slope(i, 1, flat)).collect())
            .collect();
        let flat = || values.iter().flatten().map(|x| x.abs());
        for norm_type in [1.0, 2.0, 3.0, 0.5, f64::INFINITY] {
            let expected = match norm_type {
                f64::INFINITY => flat().fold(0.0, f64::max),
                p => flat().map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p),
            };
            for max_norm in [expected / 3.0, expected * 2.0] {
                let extra_gradient = extra.get().mul_scalar(7.0)?.sum_all()?.backward()?;
                let given = gradients(&all, 1)?.accumulate(extra_gradient)?;
                let (clipped, norm) = clip_grad_norm(given, &all, max_norm, norm_type)?;
                assert!((norm - expected).abs() <= 1e-12 * expected, "{norm}, expected {expected}");
                let factor = (max_norm / (expected + 1e-6)).min(1.0);
                for (param, values) in all.iter().zip(&values) {
                    let leaf = param.get();
                    let got = clipped.get(&leaf)?;
                    assert_eq!(got.layout(), &leaf.layout().settled());
                    if leaf.device_mesh().my_coordinate().is_some() {
                        let fits = |(a, b): (&f64, &f64)| (a - b * factor).abs() <= 1e-12 * b.abs();
                        assert!(numbers(&got.full_tensor()?).iter().zip(values).all(fits));
                    }
                }
                assert_eq!(numbers(&clipped.get(&extra.get())?.full_tensor()?), [7.0; 3]);
            }
        }
        let clamped = clip_grad_value(gradients(&all, 1)?, &all, 3.5)?;
        for (param, values) in all.iter().zip(&values) {
            let got = clamped.get(&param.get())?;
            if got.device_mesh().my_coordinate().is_some() {
                let expected: Vec<f64> = values.iter().map(|x| x.clamp(-3.5, 3.5)).collect();
                assert_eq!(numbers(&got.full_tensor()?), expected);
            }
        }
        let none: [&Param; 0] = [];
        for (result, part) in [
            (clip_grad_norm(gradients(&all, 1)?, &all, 1.0, 0.0).map(drop), "norm type 0"),
            (clip_grad_norm(gradients(&all, 1)?, &all, f64::NAN, 2.0).map(drop), "max_norm NaN"),
            (clip_grad_norm(gradients(&all, 1)?, none, 1.0, 2.0).map(drop), "found none"),
            (clip_grad_value(gradients(&all, 1)?, &all, -1.0).map(drop), "clip value"),
        ] {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(part), "{part} in {message}");
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn gradients_of_one_mesh_travel_together() {
    let run = |world: World| {
        let square = world.mesh([("a", 2), ("b", 2)])?;
        let pair = world.mesh([("c", 2)])?;
        let mut all = params(&square, &vec![(vec![5], vec![Replicate, Replicate]); 6])?;
        all.extend(params(&pair, &vec![(vec![4], vec![Shard(0)]); 6])?);
        let mut optimizer = ShardedOptimizer::new(named(&all), ParamGroup::new(Sgd::default()))?;
        let gradients = gradients(&all, 0)?;
        world.trace().clear();
        optimizer.step(gradients)?;
        let calls: Vec<&str> = world.trace().records().iter().map(|record| record.call).collect();
        let expected = if world.rank() < 2 { vec!["all_reduce", "reduce_scatter"] } else { vec!["all_reduce"] };
        assert_eq!(calls, expected, "rank {}", world.rank());
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

/// A few steps; what is communicated and how much memory is used must not depend on data.
fn program(world: &World) -> Result<(usize, usize)> {
    let mesh = world.mesh([("a", 2), ("b", 2)])?;
    let all = params(&mesh, &spread())?;
    let mut optimizer = ShardedOptimizer::new(named(&all), ParamGroup::new(Adam::default()))?;
    let before = world.memory().current();
    for t in 0..2 {
        let (clipped, _) = clip_grad_norm(gradients(&all, t)?, &all, 0.1, 2.0)?;
        optimizer.step(clipped)?;
    }
    let state = optimizer.state_dict()?;
    optimizer.load_state_dict(&state)?;
    optimizer.load_full_state(&state.to_full()?)?;
    drop(state);
    Ok((before, world.memory().current()))
}

#[test]
fn a_dry_run_counts_the_state_and_lists_the_collectives_of_the_real_run() {
    let real = ThreadWorld::new(4).unwrap().run(|world| {
        let used = program(&world)?;
        let calls: Vec<_> = world.trace().records().iter().map(|r| (r.call, r.bytes)).collect();
        Ok((used, calls, world.memory().peak()))
    });
    for (rank, (used, calls, peak)) in real.unwrap().into_iter().enumerate() {
        let dry = DryWorld::new(4).unwrap().as_rank(rank).unwrap().run(|world| program(&world)).unwrap();
        assert_eq!(dry.value, used);
        assert_eq!(dry.records.iter().map(|r| (r.call, r.bytes)).collect::<Vec<_>>(), calls);
        assert_eq!(dry.peak_bytes, peak);
        // two tensors in f64 per parameter, of this rank's part only
        let mesh = Mesh::new([("a", 2), ("b", 2)]).unwrap();
        let part = |(shape, placed): (Vec<usize>, Vec<Placement>)| {
            Layout::new(&mesh, shape, placed).unwrap().local_shape(rank).iter().product::<usize>()
        };
        assert_eq!(used.1 - used.0, spread().into_iter().map(part).sum::<usize>() * 16);
    }
}

#[test]
fn schedules_rise_and_fall() {
    let (warmup, total, end) = (4, 12, 0.1);
    let (linear, cosine) = (Schedule::Linear { warmup, total, end }, Schedule::Cosine { warmup, total, end });
    for schedule in [linear, cosine] {
        let rates: Vec<f64> = (0..20).map(|step| schedule.lr(step, 2.0)).collect();
        assert_eq!(rates[..5], [0.5, 1.0, 1.5, 2.0, 2.0]);
        assert!(rates[4..13].windows(2).all(|pair| pair[0] > pair[1]), "{rates:?}");
        assert!(rates[12..].iter().all(|rate| (rate - 0.2).abs() < 1e-12));
        assert!((rates[8] - 1.1).abs() < 1e-12); // half way down
    }
    assert!(cosine.lr(6, 2.0) > linear.lr(6, 2.0) && cosine.lr(10, 2.0) < linear.lr(10, 2.0));
    assert_eq!(Schedule::Constant.lr(1 << 40, 0.3), 0.3);
    assert_eq!(Schedule::Linear { warmup: 0, total: 0, end: 0.5 }.lr(0, 1.0), 0.5);
    let run = move |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let param = Param::new(&DTensor::zeros(3, DType::F64, &mesh, [Shard(0)])?);
        let mut optimizer = ShardedOptimizer::new([("w".into(), param.clone())], ParamGroup::new(Sgd::default()))?;
        optimizer.set_schedule(cosine);
        optimizer.groups_mut()[0].lr = 0.5;
        let mut expected = 0.0;
        for step in 0..15 {
            optimizer.step(param.get().sum_all()?.backward()?)?;
            expected -= cosine.lr(step, 0.5);
            assert!((param.get().full_tensor()?.to_vec1::<f64>()?[2] - expected).abs() < 1e-12);
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn settings_survive_being_stored() {
    for algorithm in algorithms() {
        let group = ParamGroup::new(algorithm).with_lr(0.3).maximizing().with_master();
        let text = serde_json::to_string(&group).unwrap();
        assert_eq!(serde_json::from_str::<ParamGroup>(&text).unwrap(), group, "{text}");
    }
}
