//! Order statistics, sorting and distinct elements of long sharded dimensions, which are found by counting and by exchange: the unsharded
//! answers, for less than the elements.

use candle_core::{Device, Tensor};
use shardwise::ops::QuantileInterpolation;
use shardwise::prelude::*;
use shardwise_test_suites::values;

/// Numbers with ties; of floating-point types also zeros of both signs, infinities and, if asked for, NaN.
fn numbers(shape: &[usize], dtype: DType, nan: bool) -> Tensor {
    let count: usize = shape.iter().product();
    let value = |i: usize| {
        let h = values::hash(&[i, 77]);
        match (h >> 40) % 200 {
            0 if nan => f64::NAN,
            1 if dtype.is_float() => f64::INFINITY,
            2 if dtype.is_float() => f64::NEG_INFINITY,
            3 if dtype.is_float() => -0.0,
            4..40 => 0.0,
            _ if matches!(dtype, DType::U8 | DType::U32) => (h % 200) as f64,
            _ => (h % 6000) as f64 - 2900.0,
        }
    };
    let all: Vec<f64> = (0..count).map(value).collect();
    Tensor::from_vec(all, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Whether two tensors have equal elements; NaN equal each other.
fn same(a: &DTensor, b: &DTensor) -> Result<bool> {
    let numbers = |t: &DTensor| Ok::<_, Error>(t.full_tensor()?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?);
    let (x, y) = (numbers(a)?, numbers(b)?);
    Ok(a.shape() == b.shape()
        && x.len() == y.len()
        && x.iter().zip(&y).all(|(x, y)| x == y || x.is_nan() && y.is_nan()))
}

/// Even shards, and on two ranks strided ones, on three uneven ones of which one is empty.
fn placements(ranks: usize, n: usize) -> [Placement; 2] {
    let uneven = Placement::ragged(0, vec![n / 5, 0, n - n / 5]);
    [Shard(0), if ranks == 2 { Placement::StridedShard { dim: 0, split_factor: 2 } } else { uneven }]
}

type Call = fn(&DTensor) -> Result<Vec<DTensor>>;

fn pair((a, b): (DTensor, DTensor)) -> Result<Vec<DTensor>> {
    Ok(vec![a, b])
}

/// Calls on a tensor whose first dimension is sharded.
const CALLS: &[(&str, Call)] = &[
    ("kthvalue", |x| pair(x.kthvalue(x.shape()[0] / 3, 0, false)?)),
    ("kthvalue, last", |x| pair(x.kthvalue(x.shape()[0], 0, true)?)),
    ("median", |x| pair(x.median(0, false)?)),
    ("nanmedian", |x| pair(x.nanmedian(0, true)?)),
    ("mode", |x| pair(x.mode(0, false)?)),
    ("sort", |x| pair(x.sort(0, false)?)),
    ("sort, descending", |x| pair(x.sort(0, true)?)),
    ("argsort", |x| Ok(vec![x.argsort(0, false)?])),
    ("unique", |x| {
        let found = x.unique(None)?;
        Ok(vec![found.values, found.inverse, found.counts])
    }),
];

#[test]
fn long_dimensions_give_the_unsharded_answers_in_every_type() {
    for ranks in [2, 3] {
        let run = move |world: World| {
            let mesh = world.mesh([("a", ranks)])?;
            let types = [DType::F32, DType::F64, DType::BF16, DType::I64, DType::U8];
            for (dtype, nan) in types.into_iter().flat_map(|t| [(t, false), (t, t.is_float())]) {
                let whole = numbers(&[9001], dtype, nan);
                let expected = DTensor::distribute_tensor(&whole, &mesh, [Replicate], None)?;
                for placement in placements(ranks, 9001) {
                    let x = DTensor::distribute_tensor(&whole, &mesh, [placement.clone()], None)?;
                    for (name, call) in CALLS {
                        for (got, expected) in call(&x)?.iter().zip(call(&expected)?) {
                            assert!(same(got, &expected)?, "{name} of {dtype:?}, {placement}, NaN: {nan}");
                        }
                    }
                }
            }
            Ok(())
        };
        ThreadWorld::new(ranks).unwrap().run(run).unwrap();
    }
}

#[test]
fn lines_beside_each_other_and_quantiles_are_found_by_counting() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        for (dtype, nan) in [(DType::F32, true), (DType::F64, false)] {
            let whole = numbers(&[40_000, 2], dtype, nan);
            let expected = DTensor::distribute_tensor(&whole, &mesh, [Replicate, Replicate], None)?;
            let q = DTensor::distribute_tensor(
                &Tensor::new(&[0.1, 0.5], &Device::Cpu)?.to_dtype(dtype)?,
                &mesh,
                [Replicate, Replicate],
                None,
            )?;
            for placements in [[Shard(0), Replicate], [Shard(0), Shard(1)], [Shard(0), Shard(0)]] {
                let x = DTensor::distribute_tensor(&whole, &mesh, placements.clone(), None)?;
                for (name, call) in &CALLS[..4] {
                    for (got, expected) in call(&x)?.iter().zip(call(&expected)?) {
                        assert!(same(got, &expected)?, "{name} of {dtype:?}, {placements:?}");
                    }
                }
                use QuantileInterpolation::{Higher, Linear, Lower, Midpoint, Nearest};
                for how in [Linear, Lower, Higher, Midpoint, Nearest] {
                    let (got, wanted) =
                        (x.quantile(&q, Some(0), false, how)?, expected.quantile(&q, Some(0), false, how)?);
                    assert!(same(&got, &wanted)?, "quantile {how:?} of {dtype:?}, {placements:?}");
                    let (got, wanted) =
                        (x.nanquantile(&q, Some(0), true, how)?, expected.nanquantile(&q, Some(0), true, how)?);
                    assert!(same(&got, &wanted)?, "nanquantile {how:?} of {dtype:?}, {placements:?}");
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn gradients_go_to_the_elements_that_were_found() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let whole = numbers(&[20_000], DType::F64, false);
        let q = DTensor::full(0.3, (), DType::F64, &mesh, [Replicate])?;
        let gradient = |placement: Placement| -> Result<DTensor> {
            let x = DTensor::distribute_tensor(&whole, &mesh, [placement], None)?.requires_grad();
            let median = x.median(0, false)?.0;
            let quantile = x.quantile(&q, None, false, QuantileInterpolation::Linear)?;
            let third = x.kthvalue(7000, 0, false)?.0;
            let sum = median.add(&quantile.mul_scalar(2.0)?)?.add(&third.mul_scalar(3.0)?)?;
            Ok(sum.backward()?.get(&x)?.clone())
        };
        let (got, expected) = (gradient(Shard(0))?, gradient(Replicate)?);
        assert_eq!(expected.sum_all()?.item::<f64>()?, 6.0);
        assert!(same(&got, &expected)?);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn counts_and_distinct_elements_are_sent_instead_of_the_elements() {
    // f64 on four ranks: per call, the bytes that all ranks together may send as a share of what gathering the elements sends.
    let most = [
        ("kthvalue", 0.06),
        ("kthvalue, last", 0.06),
        ("median", 0.06),
        ("nanmedian", 0.06),
        ("sort", 0.3),
        ("sort, descending", 0.3),
        ("argsort", 0.3),
        ("unique", 0.15),
    ];
    let (ranks, n) = (4, 100_000);
    let run = move |world: World| {
        let mesh = world.mesh([("a", ranks)])?;
        let x = DTensor::distribute_tensor(&numbers(&[n], DType::F64, false), &mesh, [Shard(0)], None)?;
        let mut sent = Vec::new();
        for (name, _) in most {
            world.trace().clear();
            let call = CALLS.iter().find(|(known, _)| *known == name).expect("a call").1;
            call(&x)?;
            sent.push(world.trace().records().iter().map(|r| r.bytes).sum::<usize>());
        }
        Ok((sent, x.sort(0, false)?.0.placements().to_vec()))
    };
    let of_ranks = ThreadWorld::new(ranks).unwrap().run(run).unwrap();
    assert!(of_ranks.iter().all(|(_, placements)| *placements == [Shard(0)]), "a sorted line is sharded evenly");
    let gathered = (ranks - 1) * n * 8;
    for (i, (name, share)) in most.iter().enumerate() {
        let sent: usize = of_ranks.iter().map(|(sent, _)| sent[i]).sum();
        println!("{name} sends {:.3} of what a gather sends", sent as f64 / gathered as f64);
        assert!((sent as f64) < share * gathered as f64, "{name} sends {sent} bytes of {gathered}");
    }
}
