//! Optimizers on parameters in every kind of layout, against the unsharded run and against the formulas element by element.

use candle_core::{DType, Tensor};
use shardwise::optim::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, Algorithm, Asgd, Lion, NAdam, ParamGroup, RAdam, RmsProp, Schedule, Sgd,
    ShardedOptimizer, clip_grad_norm, clip_grad_value,
};
use shardwise::prelude::*;
use shardwise::{DryWorld, Param};
use shardwise_test_suites::parameters::{
    algorithms, full_values, gradient_value, gradients, initial_value, named, numbers, params, replicated_layouts,
    sharded_layouts, single_rank_mesh, tensor,
};

/// One element updated by the formula of an algorithm.
struct Scalar {
    p: f64,
    state: [f64; 3],
    product: f64,
}

impl Scalar {
    fn step(&mut self, algorithm: &Algorithm, lr: f64, g: f64, t: i32) {
        let [a, b, c] = &mut self.state;
        let p = self.p;
        if let Some(s) = algorithm.downcast_ref::<Sgd>() {
            let mut g = g + s.weight_decay * p;
            if s.momentum != 0.0 {
                *a = if t == 1 { g } else { s.momentum * *a + (1.0 - s.dampening) * g };
                g = if s.nesterov { g + s.momentum * *a } else { *a };
            }
            self.p -= lr * g;
        } else if let Some(s) = algorithm.downcast_ref::<Adagrad>() {
            let g = g + s.weight_decay * p;
            if t == 1 {
                *a = s.initial_accumulator_value;
            }
            *a += g * g;
            self.p -= lr / (1.0 + f64::from(t - 1) * s.lr_decay) * g / (a.sqrt() + s.eps);
        } else if ["adam", "adamw"].contains(&algorithm.name()) {
            let (betas, eps, amsgrad, g) = match (algorithm.downcast_ref::<Adam>(), algorithm.downcast_ref::<AdamW>()) {
                (Some(s), _) => (s.betas, s.eps, s.amsgrad, g + s.weight_decay * p),
                (_, Some(s)) => {
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
        } else if let Some(s) = algorithm.downcast_ref::<RmsProp>() {
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
        } else if let Some(s) = algorithm.downcast_ref::<Adadelta>() {
            let g = g + s.weight_decay * p;
            *a = s.rho * *a + (1.0 - s.rho) * g * g;
            let u = g * (*b + s.eps).sqrt() / (*a + s.eps).sqrt();
            *b = s.rho * *b + (1.0 - s.rho) * u * u;
            self.p -= lr * u;
        } else if let Some(s) = algorithm.downcast_ref::<Adamax>() {
            let g = g + s.weight_decay * p;
            *a = s.betas.0 * *a + (1.0 - s.betas.0) * g;
            *b = (s.betas.1 * *b).max(g.abs() + s.eps);
            self.p -= lr / (1.0 - s.betas.0.powi(t)) * *a / *b;
        } else if let Some(s) = algorithm.downcast_ref::<NAdam>() {
            let g = if s.decoupled_weight_decay { g } else { g + s.weight_decay * p };
            if s.decoupled_weight_decay {
                self.p *= 1.0 - lr * s.weight_decay;
            }
            *a = s.betas.0 * *a + (1.0 - s.betas.0) * g;
            *b = s.betas.1 * *b + (1.0 - s.betas.1) * g * g;
            let mu = |t: i32| s.betas.0 * (1.0 - 0.96f64.powf(f64::from(t) * s.momentum_decay) / 2.0);
            self.product *= mu(t);
            let d = (*b / (1.0 - s.betas.1.powi(t))).sqrt() + s.eps;
            self.p -= lr * (1.0 - mu(t)) / (1.0 - self.product) * g / d;
            self.p -= lr * mu(t + 1) / (1.0 - self.product * mu(t + 1)) * *a / d;
        } else if let Some(s) = algorithm.downcast_ref::<RAdam>() {
            let g = if s.decoupled_weight_decay { g } else { g + s.weight_decay * p };
            if s.decoupled_weight_decay {
                self.p *= 1.0 - lr * s.weight_decay;
            }
            *a = s.betas.0 * *a + (1.0 - s.betas.0) * g;
            *b = s.betas.1 * *b + (1.0 - s.betas.1) * g * g;
            let m = *a / (1.0 - s.betas.0.powi(t));
            let rho = 2.0 / (1.0 - s.betas.1) - 1.0;
            let rho_t = rho - 2.0 * f64::from(t) * s.betas.1.powi(t) / (1.0 - s.betas.1.powi(t));
            let rectified = (rho_t - 4.0) * (rho_t - 2.0) * rho / ((rho - 4.0) * (rho - 2.0) * rho_t);
            self.p -= match rho_t > 5.0 {
                true => lr * m * rectified.sqrt() * (1.0 - s.betas.1.powi(t)).sqrt() / (b.sqrt() + s.eps),
                false => lr * m,
            };
        } else if let Some(s) = algorithm.downcast_ref::<Asgd>() {
            let before = f64::from(t - 1);
            let (eta, mu) = (lr / (1.0 + s.lambd * lr * before).powf(s.alpha), 1.0 / (before - s.t0).max(1.0));
            let g = g + s.weight_decay * p;
            self.p = p * (1.0 - s.lambd * eta) - eta * g;
            *a += mu * (self.p - *a);
        } else if let Some(s) = algorithm.downcast_ref::<Lion>() {
            let c = s.betas.0 * *a + (1.0 - s.betas.0) * g;
            let direction = if c == 0.0 { 0.0 } else { c.signum() };
            self.p = p * (1.0 - lr * s.weight_decay) - lr * direction;
            *a = s.betas.1 * *a + (1.0 - s.betas.1) * g;
        } else {
            panic!("no formula for {algorithm:?}");
        }
    }
}

#[test]
fn every_algorithm_follows_its_formula_in_every_layout() {
    let run = |world: World| {
        let (mesh, one) = (world.mesh([("a", 2), ("b", 2)])?, single_rank_mesh(&world)?);
        for (algorithm, maximize) in algorithms().into_iter().flat_map(|a| [(a.clone(), false), (a, true)]) {
            let group = ParamGroup { lr: 0.05, maximize, ..ParamGroup::new(algorithm.clone()) };
            let (sharded, single) = (params(&mesh, &sharded_layouts())?, params(&one, &replicated_layouts())?);
            let mut optimizer = ShardedOptimizer::new(named(&sharded), group.clone())?;
            let mut reference = ShardedOptimizer::new(named(&single), group.clone())?;
            let layouts: Vec<Layout> = sharded.iter().map(|p| p.layout().reduced()).collect();
            for t in 0..5 {
                optimizer.step(gradients(&sharded, t)?)?;
                reference.step(gradients(&single, t)?)?;
                assert_eq!(full_values(&sharded)?, full_values(&single)?, "{group:?} after step {t}");
            }
            assert_eq!(layouts, sharded.iter().map(Param::layout).collect::<Vec<_>>());
            for (i, found) in full_values(&single)?.iter().enumerate() {
                for (flat, &found) in found.iter().enumerate() {
                    let mut scalar = Scalar { p: initial_value(i, flat), state: [0.0; 3], product: 1.0 };
                    let sign = if maximize { -1.0 } else { 1.0 };
                    (0..5).for_each(|t| scalar.step(&algorithm, 0.05, sign * gradient_value(i, t, flat), t as i32 + 1));
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
                let shape = expected.tensors.values().next().map_or(&[][..], DTensor::shape);
                let mut listed: Vec<_> = algorithm.state(shape)?.iter().map(|tensor| tensor.name).collect();
                listed.sort_unstable();
                assert_eq!(kinds(state.params[name].tensors.keys()), listed);
                for (kind, expected) in &expected.tensors {
                    let got = &state.params[name].tensors[kind];
                    assert_eq!(numbers(got), numbers(&expected.to_local()?), "{kind} of {name}, {group:?}");
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn small_steps_of_half_precision_parameters_need_master_weights() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        for dtype in [DType::BF16, DType::F16] {
            let param = || -> Result<Param> { Ok(Param::new(&tensor(&mesh, &[700], &[Shard(0)], dtype, &|_| 1.0)?)) };
            let (coarse, fine) = (param()?, param()?);
            let group = ParamGroup::new(Sgd::default()).with_lr(1e-5);
            let mut without = ShardedOptimizer::new([("w".into(), coarse.clone())], group.clone())?;
            let mut with = ShardedOptimizer::new([("w".into(), fine.clone())], group.clone().with_master())?;
            for _ in 0..50 {
                without.step(coarse.get().sum_all()?.backward()?)?;
                with.step(fine.get().sum_all()?.backward()?)?;
            }
            let state = with.state_dict()?;
            let mut again = ShardedOptimizer::new([("w".into(), fine.clone())], group.clone().with_master())?;
            again.load_state_dict(&state)?;
            for _ in 0..450 {
                without.step(coarse.get().sum_all()?.backward()?)?;
                again.step(fine.get().sum_all()?.backward()?)?;
            }
            assert_eq!((coarse.dtype(), fine.dtype()), (dtype, dtype));
            assert!(full_values(&[coarse])?[0].iter().all(|&x| x == 1.0));
            assert!(full_values(&[fine])?[0].iter().all(|&x| (x - 0.995).abs() < 2e-3));
            let master = again.state_dict()?.params["w"].tensors["master_param"].full_tensor()?;
            assert_eq!(master.dtype(), DType::F32);
            assert!(numbers(&master).iter().all(|x| (x - 0.995).abs() < 1e-5));
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn clipping_counts_every_element_of_every_mesh_once() {
    let run = |world: World| {
        let square = world.mesh([("a", 2), ("b", 2)])?;
        let pair = world.device_mesh(Mesh::from_ranks([("c", 2)], vec![2, 1])?)?;
        let mut all = params(&square, &sharded_layouts())?;
        all.extend(params(&pair, &[(vec![5], vec![Shard(0)]), (vec![3, 3], vec![Replicate])])?);
        let extra = Param::new(&tensor(&square, &[3], &[Replicate, Shard(0)], DType::F64, &|_| 1.0)?);
        let values: Vec<Vec<f64>> = all
            .iter()
            .enumerate()
            .map(|(i, param)| (0..param.shape().iter().product()).map(|flat| gradient_value(i, 1, flat)).collect())
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
                    assert_eq!(got.layout(), &leaf.layout().reduced());
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
        // ranks may know of different parameters, as stages of a pipeline do
        let own = params(&single_rank_mesh(&world)?, &[(vec![], vec![Replicate])])?;
        let gradient = own[0].get().mul_scalar(world.rank() as f64 + 1.0)?.backward()?;
        assert_eq!(clip_grad_norm(gradient, &own, 1.0, 2.0)?.1, 30f64.sqrt());
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
fn gradients_of_one_mesh_are_reduced_in_one_bucket() {
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
    let all = params(&mesh, &sharded_layouts())?;
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
        assert_eq!(used.1 - used.0, sharded_layouts().into_iter().map(part).sum::<usize>() * 16);
    }
}

#[test]
fn schedules_warm_up_and_decay() {
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
    let wsd = Schedule::WarmupStableDecay { warmup, decay: 4, total, end };
    let rates: Vec<f64> = (0..14).map(|step| wsd.lr(step, 2.0)).collect();
    assert_eq!(rates[..9], [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
    let expected = [2.0, 1.55, 1.1, 0.65, 0.2, 0.2];
    assert!(rates[8..].iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{rates:?}");
    // A longer run has the same rates until the decay begins.
    let longer = Schedule::WarmupStableDecay { warmup, decay: 4, total: 30, end };
    assert!((0..9).all(|step| longer.lr(step, 2.0) == wsd.lr(step, 2.0)));
    // A decay longer than the run leaves the warmup.
    let short = Schedule::WarmupStableDecay { warmup, decay: 99, total, end };
    assert!((0..14).all(|step| short.lr(step, 2.0) == linear.lr(step, 2.0)));
    let sqrt = Schedule::InverseSqrt { warmup };
    assert_eq!((0..4).map(|step| sqrt.lr(step, 2.0)).collect::<Vec<_>>(), [0.5, 1.0, 1.5, 2.0]);
    assert_eq!((sqrt.lr(15, 2.0), sqrt.lr(63, 2.0)), (1.0, 0.5));
    assert_eq!(Schedule::InverseSqrt { warmup: 0 }.lr(3, 1.0), 0.5);
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
