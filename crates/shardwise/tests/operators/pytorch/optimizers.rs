//! Steps recorded from `torch.optim` of PyTorch 2.15 in f64, repeated on uneven shards; moments of a wider type than the parameters.

use shardwise::Param;
use shardwise::checkpoint::{self, Format, SaveOptions};
use shardwise::optim::{Asgd, NAdam, ParamGroup, RAdam};
use shardwise::prelude::*;
use shardwise_test_suites::parameters::algorithms;
use shardwise_test_suites::scratch::Scratch;

use crate::pytorch::on;

fn start(i: usize) -> f64 {
    ((i * 7 + 3) % 11) as f64 / 4.0 - 1.25
}

fn gradient(i: usize, t: usize) -> f64 {
    ((i * 5 + t * 3 + 2) % 13) as f64 / 8.0 - 0.75
}

/// Group, the parameter after six steps, and the tolerance.
fn recorded() -> Vec<(ParamGroup, [f64; 6], f64)> {
    let group = |group: ParamGroup| ParamGroup { lr: 0.05, ..group };
    let nadam =
        NAdam { betas: (0.6, 0.66), eps: 1e-6, weight_decay: 0.1, decoupled_weight_decay: true, ..NAdam::default() };
    let radam = RAdam { weight_decay: 0.1, ..RAdam::default() };
    let rectified = RAdam { decoupled_weight_decay: true, betas: (0.6, 0.96), ..radam };
    let asgd = Asgd { lambd: 0.1, alpha: 0.5, t0: 1.0, weight_decay: 0.1 };
    // PyTorch keeps the learning rate of ASGD and the product of momenta of NAdam in f32
    let rounded = 1e-8;
    vec![
        (
            group(ParamGroup::new(nadam)),
            [
                -0.42432415348052466,
                1.152757948981358,
                0.19417580478985536,
                -0.6613096581970458,
                0.8211964573936107,
                0.11484807898068693,
            ],
            rounded,
        ),
        (
            group(ParamGroup::new(radam)),
            [
                -0.44473321005798633,
                1.2142390695943155,
                0.18676193560383725,
                -0.7090422721903461,
                0.9078179985910932,
                0.0740854339440006,
            ],
            1e-13,
        ),
        (
            group(ParamGroup::new(rectified)),
            [
                -0.45328314647267404,
                1.2202737980422105,
                0.1936150617164093,
                -0.6993201201338319,
                0.9120510718385608,
                0.0644925856109657,
            ],
            1e-13,
        ),
        (
            group(ParamGroup::new(asgd)),
            [
                -0.44063830467615056,
                1.1833218171935445,
                0.2178490148939162,
                -0.6697461288480553,
                0.8751538161707642,
                0.06663269545169698,
            ],
            rounded,
        ),
        (
            group(ParamGroup { maximize: true, ..ParamGroup::new(Asgd::default()) }),
            [
                -0.5312343114287542,
                1.2437126405723264,
                0.2687419932700811,
                -0.7874767276051474,
                1.0687184990384349,
                -0.06874849041560266,
            ],
            rounded,
        ),
    ]
}

/// The average of ASGD after the same steps.
const AVERAGE: [f64; 6] = [
    -0.4646050030644771,
    1.2106465598920992,
    0.21635743622176223,
    -0.6986729158951721,
    0.9166895366392241,
    0.040889624842132266,
];

fn assert_near(found: &[f64], expected: &[f64], tolerance: f64) {
    let near = found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= tolerance);
    assert!(near, "{found:?}, recorded {expected:?}");
}

#[test]
fn steps_of_nadam_radam_and_asgd_are_those_of_pytorch() {
    on(4, |world| {
        let mesh = world.mesh([("dp", 4)])?;
        let tensor = |f: &dyn Fn(usize) -> f64, placement| {
            DTensor::from_fn(6, DType::F64, &mesh, [placement], |index| f(index[0]))
        };
        for (group, expected, tolerance) in recorded() {
            let param = Param::new(&tensor(&start, Shard(0))?);
            let averages = group.algorithm.name() == "asgd" && !group.maximize;
            let mut optimizer = ShardedOptimizer::new([("w".to_string(), param.clone())], group)?;
            for t in 0..6 {
                // the gradient of a sum with constants is the constants
                let loss = param.get().mul(&tensor(&|i| gradient(i, t), Replicate)?)?.sum_all()?;
                optimizer.step(loss.backward()?)?;
            }
            assert_near(&param.get().full_tensor()?.to_vec1()?, &expected, tolerance);
            assert_eq!(param.get().placements(), [Shard(0)]);
            if averages {
                let state = optimizer.state_dict()?;
                assert_near(&state.params["w"].tensors["ax"].full_tensor()?.to_vec1()?, &AVERAGE, tolerance);
            }
        }
        Ok(())
    });
}

/// As [`gradient`], with digits that f32 does not have.
fn fine_gradient(i: usize, t: usize) -> f64 {
    gradient(i, t) + ((i + 1) * (t + 1)) as f64 * 1e-10
}

/// AdamW on f32 parameters of 6 elements with gradients and moments in f64: parameter, first and second moment after some steps, in exact
/// arithmetic up to f64 and rounded to f32 after every step.
fn wide_adamw(steps: usize) -> [Vec<f64>; 3] {
    let settings = AdamW::default();
    let ((first, second), lr) = (settings.betas, 0.05);
    let mut found = [(0..6).map(start).collect(), vec![0.0; 6], vec![0.0; 6]];
    let [p, m, v] = &mut found;
    for t in 0..steps {
        for i in 0..6 {
            let g = fine_gradient(i, t);
            m[i] = first * m[i] + (1.0 - first) * g;
            v[i] = second * v[i] + (1.0 - second) * (g * g);
            let (bias1, bias2) = (1.0 - first.powi(t as i32 + 1), 1.0 - second.powi(t as i32 + 1));
            let denominator = (v[i] / bias2).sqrt() + settings.eps;
            let new: f64 = p[i] * (1.0 - lr * settings.weight_decay) - lr / bias1 * m[i] / denominator;
            p[i] = f64::from(new as f32);
        }
    }
    found
}

/// The same after six steps of PyTorch's AdamW, which rounds the parameter after the decay and after the step.
const WIDE_STEPS: [[f64; 6]; 3] = [
    [
        -0.3861059844493866,
        1.1912089586257935,
        0.15798452496528625,
        -0.6597842574119568,
        0.8361045122146606,
        0.16743505001068115,
    ],
    [
        -0.05012574982170308,
        -0.007363874643406192,
        0.016369250534890696,
        -0.06461099928681238,
        0.10977587589148448,
        -0.10869562393021859,
    ],
    [
        0.001169206293826141,
        0.0011063316075086286,
        0.0016675072275851893,
        0.0010288614026157294,
        0.0014180836728413997,
        0.001418567068259634,
    ],
];

#[test]
fn the_arithmetic_of_wide_moments_is_that_of_pytorch() {
    for ((found, expected), tolerance) in wide_adamw(6).iter().zip(&WIDE_STEPS).zip([1e-6, 1e-16, 1e-16]) {
        assert_near(found, expected, tolerance);
    }
}

/// A parameter of f32 whose gradient is f64, and steps of an optimizer on it.
fn wide_param(mesh: &DeviceMesh, placement: Placement) -> Result<Param> {
    let param = Param::new(&DTensor::from_fn(6, DType::F32, mesh, [placement], |index| start(index[0]))?);
    param.set_grad_dtype(Some(DType::F64))?;
    param.set_forward_dtype(Some(DType::F64), None);
    Ok(param)
}

fn wide_steps(param: &Param, optimizer: &mut ShardedOptimizer, steps: std::ops::Range<usize>) -> Result<()> {
    for t in steps {
        let mesh = param.get().device_mesh().clone();
        let by = DTensor::from_fn(6, DType::F64, &mesh, [Replicate], |index| fine_gradient(index[0], t))?;
        let gradients = param.forward_value()?.mul(&by)?.sum_all()?.backward()?;
        assert_eq!(gradients.get(&param.get())?.dtype(), DType::F64);
        optimizer.step(gradients)?;
    }
    Ok(())
}

#[test]
fn moments_of_f32_parameters_can_be_f64_and_are_saved_and_loaded_as_such() {
    let scratch = Scratch::new("wide-moments");
    let path = scratch.0.clone();
    let group = || ParamGroup::new(AdamW::default()).with_lr(0.05).with_state_dtype(DType::F64);
    let check = |param: &Param, optimizer: &ShardedOptimizer, steps: usize| -> Result<()> {
        let [p, m, v] = wide_adamw(steps);
        assert_eq!(param.dtype(), DType::F32);
        // Equal bits: an element differs only if f64 rounding moved it over the middle of two f32 numbers.
        assert_eq!(crate::pytorch::list(&param.get())?, p);
        let state = optimizer.state_dict()?;
        for (name, expected) in [("exp_avg", m), ("exp_avg_sq", v)] {
            let tensor = &state.params["w"].tensors[name];
            assert_eq!(tensor.dtype(), DType::F64, "{name}");
            assert_near(&crate::pytorch::list(tensor)?, &expected, 1e-16);
            // f32 moments would be further away
            assert!(expected.iter().any(|x| (f64::from(*x as f32) - x).abs() > 1e-13));
        }
        Ok(())
    };
    let to = path.clone();
    on(4, move |world| {
        let mesh = world.mesh([("dp", 4)])?;
        let param = wide_param(&mesh, Shard(0))?;
        let mut optimizer = ShardedOptimizer::new([("w".to_string(), param.clone())], group())?;
        wide_steps(&param, &mut optimizer, 0..3)?;
        check(&param, &optimizer, 3)?;
        for format in [Format::Native, Format::Dcp] {
            let options = SaveOptions { format, ..SaveOptions::default() };
            checkpoint::save_from_with(&world, to.join(format!("{format:?}")), (&optimizer,), &options)?;
        }
        wide_steps(&param, &mut optimizer, 3..6)?;
        check(&param, &optimizer, 6)
    });
    on(3, move |world| {
        let mesh = world.mesh([("dp", 3)])?;
        for format in [Format::Native, Format::Dcp] {
            let at = path.join(format!("{format:?}"));
            for wide in [true, false] {
                let param = wide_param(&mesh, Placement::ragged(0, [1, 5, 0]))?;
                let [p, ..] = wide_adamw(3);
                param.set(&DTensor::from_fn(6, DType::F32, &mesh, [Shard(0)], |index| p[index[0]])?)?;
                let group = if wide { group() } else { ParamGroup::new(AdamW::default()) };
                let mut optimizer = ShardedOptimizer::new([("w".to_string(), param.clone())], group)?;
                checkpoint::load_into(&world, &at, (&mut optimizer,))?;
                if wide {
                    wide_steps(&param, &mut optimizer, 3..6)?;
                    check(&param, &optimizer, 6)?;
                } else {
                    // the type is a choice of the optimizer that loads
                    let state = optimizer.state_dict()?;
                    assert_eq!(state.params["w"].tensors["exp_avg"].dtype(), DType::F32);
                    assert_eq!(optimizer.groups()[0].state_dtype, None);
                }
            }
        }
        Ok(())
    });
}

#[test]
fn every_optimizer_keeps_state_in_f64_and_steps_alike_in_every_layout() {
    on(4, |world| {
        let mesh = world.mesh([("dp", 4)])?;
        let one = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        for algorithm in algorithms() {
            let run = |mesh: &DeviceMesh, placement: Placement| -> Result<Vec<f64>> {
                let param = wide_param(mesh, placement)?;
                let group = ParamGroup::new(algorithm.clone()).with_lr(0.05).with_state_dtype(DType::F64);
                let mut optimizer = ShardedOptimizer::new([("w".to_string(), param.clone())], group)?;
                wide_steps(&param, &mut optimizer, 0..4)?;
                let state = optimizer.state_dict()?;
                assert!(state.params["w"].tensors.values().all(|tensor| tensor.dtype() == DType::F64));
                crate::pytorch::list(&param.get())
            };
            assert_eq!(run(&mesh, Shard(0))?, run(&one, Replicate)?, "{algorithm:?}");
        }
        let w = |dtype: DType| Ok::<_, Error>(Param::new(&DTensor::ones(4, dtype, &mesh, [Shard(0)])?));
        for (param, state, part) in
            [(DType::F32, DType::BF16, "needed f32 or f64"), (DType::F64, DType::F32, "`w` with")]
        {
            let group = ParamGroup::new(AdamW::default()).with_state_dtype(state);
            let refused = ShardedOptimizer::new([("w".to_string(), w(param)?)], group).map(drop);
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(part) && message.contains(state.as_str()), "{message}");
        }
        Ok(())
    });
}

#[test]
fn one_optimizer_steps_parameters_of_several_meshes() {
    on(4, |world| {
        let (flat, square) = (world.mesh([("all", 4)])?, world.mesh([("dp", 2), ("tp", 2)])?);
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let placed = [(&flat, vec![Shard(0)]), (&square, vec![Shard(0), Shard(1)])];
        let stepped = |meshes: [(&DeviceMesh, Vec<Placement>); 2]| -> Result<Vec<Vec<f64>>> {
            let mut params = Vec::new();
            for (i, (mesh, placements)) in meshes.into_iter().enumerate() {
                let value = DTensor::from_fn((5, 3), DType::F64, mesh, placements, |at| start(at[0] * 3 + at[1] + i))?;
                params.push((format!("layer{i}"), Param::new(&value)));
            }
            let group = ParamGroup { lr: 0.05, ..ParamGroup::new(AdamW::default()) };
            let mut optimizer = ShardedOptimizer::new(params.clone(), group)?;
            for step in 0..3 {
                let mut loss: Option<Gradients> = None;
                for (_, param) in &params {
                    let x = param.get();
                    let grads = (&x * (step as f64 + 1.0))?.square()?.sum_all()?.backward()?;
                    loss = Some(match loss {
                        Some(before) => before.accumulate(grads)?,
                        None => grads,
                    });
                }
                optimizer.step(loss.expect("two parameters"))?;
            }
            params.iter().map(|(_, param)| crate::pytorch::list(&param.get())).collect()
        };
        let found = stepped(placed)?;
        let expected = stepped([(&alone, vec![Replicate]), (&alone, vec![Replicate])])?;
        assert_eq!(found, expected);
        Ok(())
    });
}
