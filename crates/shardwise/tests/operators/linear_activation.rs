//! A linear layer and its activation in one pass, against the two operators.

use shardwise::DTensor;
use shardwise::nn::{Activation, Builder, Forward, Linear};
use shardwise::prelude::*;

const ACTIVATIONS: [Activation; 8] = [
    Activation::Relu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Silu,
    Activation::QuickGelu,
    Activation::ReluSquared,
    Activation::Tanh,
    Activation::Sigmoid,
];

fn two_passes(x: &DTensor, activation: Activation) -> Result<DTensor> {
    match activation {
        Activation::Relu => x.relu(),
        Activation::Gelu => x.gelu(),
        Activation::GeluTanh => x.gelu_tanh(),
        Activation::Silu => x.silu(),
        Activation::QuickGelu => x.mul(&x.mul_scalar(1.702)?.sigmoid()?),
        Activation::ReluSquared => x.relu()?.square(),
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => x.sigmoid(),
        other => panic!("{other:?} is not in this test"),
    }
}

fn numbers(t: &DTensor) -> Result<Vec<f64>> {
    Ok(t.full_tensor()?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

fn filled(shape: &[usize], dtype: DType, mesh: &DeviceMesh, place: &Placement, phase: f64) -> Result<DTensor> {
    let value = move |i: &[usize]| {
        let at = i.iter().fold(phase, |sum, &i| 7.31 * sum + i as f64);
        (at * 12.9898).sin() * 1.5
    };
    DTensor::from_fn(shape, dtype, mesh, [place.clone()], value)
}

/// The result and the gradients of x, weight and bias.
fn computed(inputs: &[DTensor], run: &dyn Fn(&[DTensor]) -> Result<DTensor>) -> Result<Vec<Vec<f64>>> {
    let leaves: Vec<DTensor> = inputs.iter().map(DTensor::requires_grad).collect();
    let result = run(&leaves)?;
    let gradients = result.mul(&result.detach().sin()?)?.sum_all()?.backward()?;
    let mut found = vec![numbers(&result)?];
    for leaf in &leaves {
        found.push(numbers(gradients.get(leaf).expect("a gradient"))?);
    }
    Ok(found)
}

/// The same bits, in both directions, for every activation, type and placement; with and without a bias.
#[test]
fn one_pass_gives_the_bits_of_two() {
    let run = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let places = [
            [Replicate, Replicate, Replicate],
            [Shard(0), Replicate, Replicate],
            [Shard(1), Replicate, Replicate],
            [Replicate, Shard(0), Shard(0)],
            [Shard(2), Shard(1), Replicate],
            [Shard(0), Shard(0), Shard(0)],
            [Partial(ReduceOp::Sum), Replicate, Replicate],
        ];
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            for [x, weight, bias] in &places {
                let inputs = [
                    filled(&[3, 5, 6], dtype, &mesh, x, 0.1)?,
                    filled(&[7, 6], dtype, &mesh, weight, 0.2)?,
                    filled(&[7], dtype, &mesh, bias, 0.3)?,
                ];
                for activation in ACTIVATIONS {
                    for inputs in [&inputs[..], &inputs[..2]] {
                        let one = computed(inputs, &|x| x[0].linear_activation(&x[1], x.get(2), activation))?;
                        let two = computed(inputs, &|x| two_passes(&x[0].linear(&x[1], x.get(2))?, activation))?;
                        assert_eq!(one, two, "{activation:?} of {dtype:?}, {x} {weight} {bias}");
                        let unrecorded = inputs[0].linear_activation(&inputs[1], inputs.get(2), activation)?;
                        assert_eq!(numbers(&unrecorded)?, two[0], "{activation:?} of {dtype:?} without gradients");
                    }
                }
            }
        }
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn one_pass_is_one_operator_that_communicates_nothing_where_features_are_whole() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let x = filled(&[64, 256], DType::F32, &mesh, &Shard(0), 0.1)?;
        let weight = filled(&[512, 256], DType::F32, &mesh, &Replicate, 0.2)?;
        world.trace().clear();
        let y = x.linear_activation(&weight, None, Activation::Gelu)?;
        assert_eq!(y.placements(), [Shard(0)]);
        assert!(world.trace().records().is_empty());
        // A weight that has to be gathered is gathered for the one operator, with and without gradients.
        let sharded = filled(&[8, 256], DType::F32, &mesh, &Shard(0), 0.2)?;
        for weight in [sharded.clone(), sharded.requires_grad()] {
            world.trace().clear();
            x.linear_activation(&weight, None, Activation::Gelu)?;
            let report = world.trace().report();
            let operators: Vec<&str> = report.0.iter().map(|(operator, ..)| *operator).collect();
            assert_eq!(operators, ["linear_activation"]);
        }
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn gradients_of_gradients_are_those_of_two_passes() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let second = |one_pass: bool| -> Result<Vec<Vec<f64>>> {
            let x = filled(&[4, 6], DType::F32, &mesh, &Shard(0), 0.1)?.requires_grad();
            let weight = filled(&[5, 6], DType::F32, &mesh, &Replicate, 0.2)?.requires_grad();
            let y = match one_pass {
                true => x.linear_activation(&weight, None, Activation::Silu)?,
                false => x.linear(&weight, None)?.silu()?,
            };
            let first = y.square()?.sum_all()?.backward_graph()?;
            let loss = first.get(&x).expect("a gradient").square()?.sum_all()?;
            let gradients = loss.backward()?;
            [&x, &weight].into_iter().map(|leaf| numbers(gradients.get(leaf).expect("a gradient"))).collect()
        };
        for (one, two) in second(true)?.iter().zip(second(false)?) {
            for (one, two) in one.iter().zip(two) {
                assert!((one - two).abs() <= 1e-5 * (1.0 + two.abs()), "{one} and not {two}");
            }
        }
        Ok(())
    };
    launch(2, run).unwrap();
}

/// A hook on the output of a layer sees what it always saw: the output before the activation.
#[test]
fn hooks_see_the_output_before_the_activation() {
    let run = |world: World| {
        let mesh = world.mesh([("tp", 2)])?;
        let layer = Linear::new(&Builder::new(&mesh), 6, 5)?;
        let x = filled(&[4, 6], DType::F32, &mesh, &Replicate, 0.1)?;
        let fused = layer.forward_activation(&x, Activation::Relu)?;
        assert_eq!(numbers(&fused)?, numbers(&layer.forward(&x)?.relu()?)?);
        layer.hooks.on_output(|y| y.add_scalar(-100.0));
        assert!(numbers(&layer.forward_activation(&x, Activation::Relu)?)?.iter().all(|&y| y == 0.0));
        Ok(())
    };
    launch(2, run).unwrap();
}
