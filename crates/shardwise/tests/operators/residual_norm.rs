//! Residual addition with the norm of the sum in one pass, against the two operators; and sums of gradients that are written over
//! one of their terms, which nothing else may notice.

use shardwise::nn::{Builder, Forward, LayerNorm, Module, RmsNorm};
use shardwise::prelude::*;
use shardwise::{BackwardOptions, DTensor};

fn numbers(t: &DTensor) -> Result<Vec<f64>> {
    Ok(t.full_tensor()?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

fn filled(shape: &[usize], dtype: DType, mesh: &DeviceMesh, place: Placement, phase: f64) -> Result<DTensor> {
    let value = move |i: &[usize]| {
        let at = i.iter().fold(phase, |sum, &i| 7.31 * sum + i as f64);
        (at * 12.9898).sin() * 1.5
    };
    DTensor::from_fn(shape, dtype, mesh, [place], value)
}

/// Computes sum and norm, from x, branch, weight and bias.
type AddNorm = fn(&[DTensor]) -> Result<(DTensor, DTensor)>;

/// One pass and two passes of both norms.
const FORMS: [[AddNorm; 2]; 2] = [
    [
        |x| x[0].add_layer_norm(&x[1], Some(&x[2]), Some(&x[3]), 1e-5),
        |x| {
            let sum = x[0].add(&x[1])?;
            let normal = sum.layer_norm(1, Some(&x[2]), Some(&x[3]), 1e-5)?;
            Ok((sum, normal))
        },
    ],
    [
        |x| x[0].add_rms_norm(&x[1], Some(&x[2]), 1e-5),
        |x| {
            let sum = x[0].add(&x[1])?;
            let normal = sum.rms_norm(1, Some(&x[2]), 1e-5)?;
            Ok((sum, normal))
        },
    ],
];

/// Which of the two outputs a loss uses.
const USED: [[bool; 2]; 3] = [[true, true], [true, false], [false, true]];

/// Both outputs and the gradients of all inputs, for a loss of the outputs that are used.
fn computed(form: AddNorm, inputs: &[DTensor], used: [bool; 2]) -> Result<Vec<Vec<f64>>> {
    let leaves: Vec<DTensor> = inputs.iter().map(DTensor::requires_grad).collect();
    let (sum, normal) = form(&leaves)?;
    let weighted = |t: &DTensor| t.mul(&t.detach().sin()?)?.sum_all();
    let loss = match used {
        [true, true] => weighted(&sum)?.add(&weighted(&normal)?)?,
        [true, false] => weighted(&sum)?,
        _ => weighted(&normal)?,
    };
    let gradients = loss.backward()?;
    let mut found = vec![numbers(&sum)?, numbers(&normal)?];
    for leaf in &leaves {
        found.push(gradients.get(leaf).map_or(Ok(Vec::new()), numbers)?);
    }
    Ok(found)
}

#[test]
fn one_pass_gives_what_two_passes_give() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        for (dtype, bound) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 4e-2)] {
            for places in [
                [Replicate, Replicate],
                [Shard(0), Shard(0)],
                [Shard(1), Shard(1)],
                [Shard(2), Shard(2)],
                [Shard(0), Replicate],
                [Shard(0), Partial(ReduceOp::Sum)],
                [Partial(ReduceOp::Sum), Replicate],
            ] {
                // Weights of FSDP are sharded, too.
                let weights = if places[0] == Shard(1) { Shard(0) } else { Replicate };
                let inputs = [
                    filled(&[3, 4, 6], dtype, &mesh, places[0].clone(), 0.1)?,
                    filled(&[3, 4, 6], dtype, &mesh, places[1].clone(), 0.2)?,
                    filled(&[6], dtype, &mesh, weights.clone(), 0.3)?,
                    filled(&[6], dtype, &mesh, weights.clone(), 0.4)?,
                ];
                for [one, two] in FORMS {
                    for used in USED {
                        let (found, expected) = (computed(one, &inputs, used)?, computed(two, &inputs, used)?);
                        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                            assert_eq!(found.len(), expected.len());
                            for (x, y) in found.iter().zip(expected) {
                                let near = (x - y).abs() <= bound * (1.0 + y.abs());
                                assert!(near, "{i}: {x} and not {y}: {dtype:?} {places:?} {used:?}");
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn one_pass_communicates_nothing_where_rows_are_whole() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let x = filled(&[4, 6], DType::F32, &mesh, Shard(0), 0.1)?.requires_grad();
        let branch = filled(&[4, 6], DType::F32, &mesh, Shard(0), 0.2)?;
        world.trace().clear();
        let (sum, normal) = x.add_rms_norm(&branch, None, 1e-5)?;
        assert_eq!((sum.placements(), normal.placements()), (&[Shard(0)][..], &[Shard(0)][..]));
        assert!(world.trace().records().is_empty());
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn second_derivatives_are_those_of_two_passes() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        for [one, two] in FORMS {
            let second = |form: AddNorm| {
                let inputs = [
                    filled(&[3, 5], DType::F64, &mesh, Shard(0), 0.1)?,
                    filled(&[3, 5], DType::F64, &mesh, Shard(0), 0.2)?,
                    filled(&[5], DType::F64, &mesh, Replicate, 0.3)?,
                    filled(&[5], DType::F64, &mesh, Replicate, 0.4)?,
                ];
                let leaves: Vec<DTensor> = inputs.iter().map(DTensor::requires_grad).collect();
                let (sum, normal) = form(&leaves)?;
                let loss = sum.mul(&normal)?.square()?.sum_all()?;
                let options = BackwardOptions { create_graph: true, ..Default::default() };
                let first = loss.backward_with(options)?;
                let again = first.get(&leaves[0])?.square()?.sum_all()?.backward()?;
                leaves[..3].iter().map(|leaf| numbers(again.get(leaf)?)).collect::<Result<Vec<_>>>()
            };
            for (found, expected) in second(one)?.iter().zip(second(two)?) {
                assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() <= 1e-9 * (1.0 + y.abs())));
            }
        }
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn layers_use_one_pass_and_hooks_see_the_sum() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let x = filled(&[4, 6], DType::F32, &mesh, Shard(0), 0.1)?;
        let branch = filled(&[4, 6], DType::F32, &mesh, Shard(0), 0.2)?;
        let layer = LayerNorm::new(&Builder::new(&mesh), 6, 1e-5)?;
        let rms = RmsNorm::new(&Builder::new(&mesh), 6, 1e-5)?;
        let expected = x.add(&branch)?;
        let (sum, normal) = layer.forward_residual(&x, &branch)?;
        assert_eq!((numbers(&sum)?, numbers(&normal)?), (numbers(&expected)?, numbers(&layer.forward(&expected)?)?));
        let (sum, normal) = rms.forward_residual(&x, &branch)?;
        assert_eq!((numbers(&sum)?, numbers(&normal)?), (numbers(&expected)?, numbers(&rms.forward(&expected)?)?));
        rms.hooks.on_input(|sum| sum.mul_scalar(0.0));
        let (sum, normal) = rms.forward_residual(&x, &branch)?;
        assert_eq!((numbers(&sum)?, numbers(&normal)?), (numbers(&expected)?, vec![0.0; 24]));
        assert_eq!(rms.named_parameters().len(), 1);
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn sums_of_gradients_change_no_other_tensor() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        let leaf = |phase: f64| filled(&[6, 8], DType::F32, &mesh, Shard(0), phase).map(|x| x.requires_grad());
        let (a, b): (DTensor, DTensor) = (leaf(0.1)?, leaf(0.2)?);
        // Both leaves get the same tensor as gradient; adding to that of one must not change that of the other.
        let pass = || {
            let both = a.add(&b)?;
            both.add(&both.square()?)?.add(&both.exp()?)?.sum_all()?.backward()
        };
        let once = numbers(pass()?.get(&a)?)?;
        let first = pass()?;
        let kept = first.get(&b)?.clone();
        let only_a = a.mul_scalar(2.0)?.sum_all()?.backward()?;
        let sums = first.accumulate(only_a)?;
        assert_eq!(numbers(&kept)?, once);
        assert_eq!(numbers(sums.get(&b)?)?, once);
        let plus_two: Vec<f64> = once.iter().map(|x| f64::from(*x as f32 + 2.0)).collect();
        assert_eq!(numbers(sums.get(&a)?)?, plus_two);
        // A second pass through a kept graph finds what the first one found, also from a cotangent that it adds to.
        let cotangent = filled(&[6, 8], DType::F32, &mesh, Shard(0), 0.5)?.square()?;
        let before = numbers(&cotangent)?;
        let x = a.mul_scalar(1.0)?;
        let y = x.add(&x.rms_norm(1, None, 1e-5)?)?.add(&x.sin()?)?;
        let options = || BackwardOptions { cotangent: Some(&cotangent), retain_graph: true, ..Default::default() };
        let (one, two) = (y.backward_with(options())?, y.backward_with(options())?);
        assert_eq!(numbers(one.get(&a)?)?, numbers(two.get(&a)?)?);
        assert_eq!(numbers(&cotangent)?, before);
        Ok(())
    };
    launch(2, run).unwrap();
}

#[test]
fn products_add_to_the_gradients_of_shared_inputs() {
    // Three linear layers and a norm of one input, as in a transformer block: against sums of separate gradients.
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2)])?;
        for place in [Replicate, Shard(0), Shard(1)] {
            let x = filled(&[2, 3, 8], DType::F64, &mesh, place.clone(), 0.1)?.requires_grad();
            let weights = (0..3)
                .map(|i| filled(&[8, 8], DType::F64, &mesh, Replicate, 0.2 + f64::from(i)))
                .collect::<Result<Vec<_>>>()?;
            let bias = filled(&[8], DType::F64, &mesh, Replicate, 0.9)?;
            let branch = |i: usize, x: &DTensor| match i {
                3 => x.rms_norm(1, Some(&bias), 1e-5),
                2 => x.linear(&weights[2], None),
                i => x.linear(&weights[i], Some(&bias)),
            };
            let loss = |t: DTensor| t.mul(&t.detach().sin()?)?.sum_all();
            let mut expected = vec![0.0; 48];
            for i in 0..4 {
                let one = numbers(loss(branch(i, &x)?)?.backward()?.get(&x)?)?;
                expected.iter_mut().zip(one).for_each(|(sum, x)| *sum += x);
            }
            let y = x.mul_scalar(1.0)?; // not a leaf, so that its gradients are summed on the way
            let all = (0..4).map(|i| loss(branch(i, &y)?)).reduce(|a, b| a?.add(&b?)).expect("four")?;
            for (x, y) in numbers(all.backward()?.get(&x)?)?.iter().zip(&expected) {
                assert!((x - y).abs() <= 1e-10 * (1.0 + y.abs()), "{x} and not {y}: {place:?}");
            }
        }
        Ok(())
    };
    launch(2, run).unwrap();
}
