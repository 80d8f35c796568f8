//! Convolutions and transposed convolutions with PyTorch's options, against values and gradients that PyTorch computed, for all
//! placements of input and weight on one mesh axis. Each line of `data/convolutions.jsonl` is one call; operands are filled with
//! small integers by a formula, so that all sums are exact.

use serde_json::Value;
use shardwise::ops::{ConvOptions, ConvTransposeOptions, PerDim};
use shardwise::prelude::*;

fn numbers(case: &Value, key: &str) -> Vec<usize> {
    case[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
}

fn integers(case: &Value, key: &str) -> Vec<f64> {
    case[key].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect()
}

/// An option: a number, an array, or the default.
fn option(case: &Value, key: &str, default: usize) -> PerDim {
    match &case[key] {
        Value::Null => default.into(),
        Value::Number(n) => (n.as_u64().unwrap() as usize).into(),
        _ => match numbers(case, key)[..] {
            [a, b] => [a, b].into(),
            [a, b, c] => [a, b, c].into(),
            _ => panic!("{case}"),
        },
    }
}

fn filled(mesh: &DeviceMesh, shape: &[usize], modulus: usize, placement: Placement) -> Result<DTensor> {
    let value = |i: usize| (i * 5 % modulus) as f64 - (modulus / 2) as f64;
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    let tensor = candle_core::Tensor::from_vec(values, shape, &candle_core::Device::Cpu)?;
    DTensor::distribute_tensor(&tensor, mesh, [placement], None)
}

fn apply(case: &Value, x: &DTensor, w: &DTensor, bias: Option<&DTensor>) -> Result<DTensor> {
    let [stride, padding, dilation] =
        [("stride", 1), ("padding", 0), ("dilation", 1)].map(|(key, default)| option(case, key, default));
    let groups = case["groups"].as_u64().unwrap_or(1) as usize;
    let options = ConvOptions { stride, padding, dilation, groups };
    let output_padding = option(case, "output_padding", 0);
    let transposed = ConvTransposeOptions { stride, padding, output_padding, dilation, groups };
    match case["op"].as_str().unwrap() {
        "conv1d" => x.conv1d(w, bias, options),
        "conv2d" => x.conv2d(w, bias, options),
        "conv3d" => x.conv3d(w, bias, options),
        "conv_transpose1d" => x.conv_transpose1d(w, bias, transposed),
        "conv_transpose2d" => x.conv_transpose2d(w, bias, transposed),
        _ => x.conv_transpose3d(w, bias, transposed),
    }
}

fn values(x: &DTensor) -> Result<Vec<f64>> {
    Ok(x.full_tensor()?.flatten_all()?.to_vec1::<f64>()?)
}

#[test]
fn convolutions_and_their_gradients_equal_those_of_pytorch() {
    for ranks in [1, 2, 3] {
        launch(ranks, move |world| {
            let lines = include_str!("../data/convolutions.jsonl").lines();
            let cases: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(cases.len(), 11);
            let mesh = world.mesh([("a", ranks)])?;
            for case in &cases {
                let (xs, ws, shape) = (numbers(case, "x"), numbers(case, "w"), numbers(case, "shape"));
                let inputs = [Replicate, Shard(0), Shard(1), Shard(2), Shard(-1)];
                for (of_x, of_w) in inputs.iter().flat_map(|x| [Replicate, Shard(0), Shard(1)].map(|w| (x.clone(), w)))
                {
                    let name = format!("{case} with {of_x:?} and {of_w:?} on {ranks} ranks");
                    let x = filled(&mesh, &xs, 7, of_x)?.requires_grad();
                    let w = filled(&mesh, &ws, 5, of_w)?.requires_grad();
                    let bias = filled(&mesh, &shape[1..2], 3, Replicate)?;
                    let y = apply(case, &x, &w, case["bias"].as_bool().unwrap().then_some(&bias))?;
                    assert_eq!(y.shape(), shape, "{name}");
                    assert_eq!(values(&y)?, integers(case, "y"), "{name}");
                    let g = filled(&mesh, &shape, 3, Replicate)?;
                    let grads = y.mul(&g)?.sum_all()?.backward()?;
                    assert_eq!(values(grads.get(&x)?)?, integers(case, "dx"), "gradient of the input of {name}");
                    assert_eq!(values(grads.get(&w)?)?, integers(case, "dw"), "gradient of the weight of {name}");
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn gradients_of_convolutions_and_pools_have_gradients() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        for placement in [Replicate, Shard(0), Shard(2)] {
            let of = |shape: &[usize], modulus: usize| filled(&mesh, shape, modulus, placement.clone());
            let (x, v) = (of(&[2, 2, 6, 5], 7)?.requires_grad(), of(&[2, 2, 6, 5], 11)?);
            let w = filled(&mesh, &[3, 2, 3, 2], 5, Replicate)?.requires_grad();
            let options = ConvOptions { stride: [2, 1], padding: [1, 0], dilation: [1, 2], groups: 1 };
            let y = x.conv2d(&w, None, options)?;
            let g = of(y.shape(), 3)?.requires_grad();
            let first = y.mul(&g)?.sum_all()?.backward_graph()?;
            // The form is linear in each tensor: replacing the input by `v` gives the second gradients.
            let second = first.get(&x)?.mul(&v)?.sum_all()?.backward()?;
            let replaced = v.conv2d(&w, None, options)?;
            assert_eq!(values(second.get(&g)?)?, values(&replaced)?, "{placement:?}");
            let expected = replaced.mul(&g.detach())?.sum_all()?.backward()?;
            assert_eq!(values(second.get(&w)?)?, values(expected.get(&w)?)?, "{placement:?}");

            let y = x.avg_pool2d(2, Some(1), 1)?;
            let g = of(y.shape(), 3)?.requires_grad();
            let first = y.mul(&g)?.sum_all()?.backward_graph()?;
            let second = first.get(&x)?.mul(&v)?.sum_all()?.backward()?;
            assert_eq!(values(second.get(&g)?)?, values(&v.avg_pool2d(2, Some(1), 1)?)?, "{placement:?}");

            let y = x.max_pool2d(3, Some(2), 1)?;
            let g = of(y.shape(), 3)?.requires_grad();
            let first = y.mul(&g)?.sum_all()?.backward_graph()?;
            let second = first.get(&x)?.mul(&x.detach())?.sum_all()?.backward()?;
            assert_eq!(values(second.get(&g)?)?, values(&y)?, "{placement:?}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_gradient_of_batch_norm_has_the_gradient_of_its_formula() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        for placement in [Replicate, Shard(0), Shard(1), Shard(2)] {
            let x = filled(&mesh, &[4, 3, 5], 13, placement)?.requires_grad();
            let w = filled(&mesh, &[3], 3, Replicate)?.add_scalar(2.5)?.detach().requires_grad();
            let (g, v) = (filled(&mesh, &[4, 3, 5], 7, Replicate)?, filled(&mesh, &[4, 3, 5], 11, Replicate)?);
            let formula = || -> Result<DTensor> {
                let centred = x.sub(&x.mean(&[0, 2], true)?)?;
                let scale = centred.square()?.mean(&[0, 2], true)?.add_scalar(1e-3)?.rsqrt()?;
                centred.mul(&scale)?.mul(&w.reshape(&[-1, 1])?)
            };
            let fused = x.batch_norm(None, Some(&w), None, 1e-3)?;
            let gradients = |y: &DTensor| -> Result<[Vec<f64>; 4]> {
                let first = y.mul(&g)?.sum_all()?.backward_graph()?;
                let second = first.get(&x)?.mul(&v)?.sum_all()?.backward()?;
                let all = [first.get(&x)?, first.get(&w)?, second.get(&x)?, second.get(&w)?];
                Ok([values(all[0])?, values(all[1])?, values(all[2])?, values(all[3])?])
            };
            let (found, expected) = (gradients(&fused)?, gradients(&formula()?)?);
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                assert!((found - expected).abs() <= 1e-9 * (1.0 + expected.abs()), "{found} for {expected}");
            }
            // The fused backward pass, which is not recorded.
            let once = x.batch_norm(None, Some(&w), None, 1e-3)?.mul(&g)?.sum_all()?.backward()?;
            let once = [values(once.get(&x)?)?, values(once.get(&w)?)?];
            for (found, expected) in once.iter().flatten().zip(expected[..2].iter().flatten()) {
                assert!((found - expected).abs() <= 1e-9 * (1.0 + expected.abs()), "{found} for {expected}");
            }
        }
        Ok(())
    })
    .unwrap();
}
