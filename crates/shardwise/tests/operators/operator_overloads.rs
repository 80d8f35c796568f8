//! `+ - * /`, unary `-`, comparisons and `where` with tensors and scalars, in every placement on one mesh axis of 1, 2
//! and 3 ranks, against the unsharded result.

use candle_core::{Device, Tensor};
use shardwise::prelude::*;

fn on_each_world(run: impl Fn(&DeviceMesh) -> Result<()> + Clone + Send + Sync + 'static) {
    for ranks in 1..=3 {
        let run = run.clone();
        ThreadWorld::new(ranks).unwrap().run(move |world| run(&world.mesh([("a", world.size())])?)).unwrap();
    }
}

fn whole(shape: (usize, usize), first: f64) -> Result<Tensor> {
    let count = shape.0 * shape.1;
    let numbers: Vec<f64> = (0..count).map(|i| first + ((i * 7) % count) as f64 * 0.5).collect();
    Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?)
}

/// A tensor in every placement that holds the given values.
fn placed(mesh: &DeviceMesh, values: &Tensor) -> Result<Vec<DTensor>> {
    [Replicate, Shard(0), Shard(1), Partial(ReduceOp::Sum)]
        .into_iter()
        .map(|placement| DTensor::distribute_tensor(values, mesh, [placement], None))
        .collect()
}

#[track_caller]
fn same(found: &DTensor, expected: &Tensor) -> Result<()> {
    let full = found.full_tensor()?;
    assert_eq!(full.dims(), expected.dims());
    let flat = |t: &Tensor| t.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    for (a, b) in flat(&full)?.iter().zip(flat(expected)?) {
        assert!((a - b).abs() < 1e-12, "{a} instead of {b} from {}", found.layout());
    }
    Ok(())
}

#[test]
fn tensors_and_references_mix() {
    on_each_world(|mesh| {
        let (a, b) = (whole((5, 4), 1.0)?, whole((5, 4), -3.25)?);
        for x in placed(mesh, &a)? {
            for y in placed(mesh, &b)? {
                same(&(&x + &y)?, &(&a + &b)?)?;
                same(&(x.clone() - &y)?, &(&a - &b)?)?;
                same(&(&x * y.clone())?, &(&a * &b)?)?;
                same(&(x.clone() / y.clone())?, &(&a / &b)?)?;
                // the result of one operator together with a tensor
                same(&((&x * &y) + &x)?, &((&a * &b)? + &a)?)?;
                same(&(&x - (&y / &x))?, &(&a - (&b / &a)?)?)?;
                same(&((&x - &y) * y.clone())?, &((&a - &b)? * &b)?)?;
            }
            same(&(-&x)?, &a.neg()?)?;
            same(&(-x)?, &a.neg()?)?;
        }
        Ok(())
    });
}

#[test]
fn scalars_work_on_either_side() {
    on_each_world(|mesh| {
        let a = whole((5, 4), 1.0)?;
        for x in placed(mesh, &a)? {
            same(&(&x + 0.5)?, &(&a + 0.5)?)?;
            same(&(&x - 0.5)?, &(&a - 0.5)?)?;
            same(&(&x * 3)?, &(&a * 3.0)?)?;
            same(&(&x / 4)?, &(&a / 4.0)?)?;
            same(&(0.5 + &x)?, &(&a + 0.5)?)?;
            same(&(2 - &x)?, &(2.0 - &a)?)?;
            same(&(3.0 * x.clone())?, &(&a * 3.0)?)?;
            same(&(2.0 / &x)?, &(2.0 / &a)?)?;
            // one line of arithmetic without annotations
            same(&((&x * 2.0)? + 1)?.sqrt()?, &((&a * 2.0)? + 1.0)?.sqrt()?)?;
        }
        let n = DTensor::arange(0..6, DType::I64, mesh, [Shard(0)])?;
        assert_eq!(((&n * 3)? - 1)?.full_tensor()?.to_vec1::<i64>()?, [-1, 2, 5, 8, 11, 14]);
        assert_eq!((1.0 / (&n + 1)?)?.full_tensor()?.to_vec1::<f32>()?[3], 0.25);
        Ok(())
    });
}

#[test]
fn a_partial_sum_stays_partial_under_linear_operators() {
    ThreadWorld::new(3)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("a", 3)])?;
            let x = DTensor::ones((3, 2), DType::F64, &mesh, [Shard(0)])?.sum(&[0], false)?;
            world.trace().clear();
            let y = (-((&x * 2.0)? - &x)?)?;
            assert_eq!(y.placements(), [Partial(ReduceOp::Sum)]);
            assert!(world.trace().records().is_empty());
            assert_eq!(y.full_tensor()?.to_vec1::<f64>()?, [-3.0, -3.0]);
            Ok(())
        })
        .unwrap();
}

#[test]
fn gradients_go_through_operators() {
    on_each_world(|mesh| {
        let a = whole((5, 4), 1.0)?;
        for x in placed(mesh, &a)? {
            let x = x.requires_grad();
            // y = (2 - x) * x / 4 + 1 / x, dy/dx = (2 - 2x) / 4 - 1 / x^2
            let y = (((2.0 - &x)? * &x)? / 4.0 + (1.0 / &x)?)?;
            let found = y.sum_all()?.backward()?;
            let expected = ((((2.0 - (&a * 2.0)?)? / 4.0)?) - a.sqr()?.recip()?)?;
            same(found.get(&x)?, &expected)?;
        }
        Ok(())
    });
}

#[test]
fn comparisons_and_where_take_scalars() {
    on_each_world(|mesh| {
        let a = whole((5, 4), -2.0)?;
        for x in placed(mesh, &a)? {
            same(&x.gt(0.0)?, &a.gt(0.0)?)?;
            same(&x.ge(1.5)?, &a.ge(1.5)?)?;
            same(&x.lt(2)?, &a.lt(2.0)?)?;
            same(&x.le(&x)?, &a.le(&a)?)?;
            same(&x.eq(1.5f32)?, &a.eq(1.5)?)?;
            same(&x.ne(1.5)?, &a.ne(1.5)?)?;
            same(&x.maximum(0.25)?, &a.maximum(0.25)?)?;
            same(&x.minimum(1)?, &a.minimum(1.0)?)?;
            same(&x.add(1.0)?.pow(2.0)?, &(&a + 1.0)?.sqr()?)?;
            same(&x.where_(&x.gt(0.0)?, 0.0)?, &a.relu()?)?;
            same(&x.gt(0.0)?.where_cond(0.5, &x)?, &a.gt(0.0)?.where_cond(&(a.zeros_like()? + 0.5)?, &a)?)?;
            same(&x.gt(0.0)?.where_cond(1, 0)?, &a.gt(0.0)?)?;
        }
        let x = DTensor::zeros(3, DType::U8, mesh, [Shard(0)])?;
        assert_eq!(x.gt(0.0)?.where_cond(1, 0)?.dtype(), DType::I64);
        assert_eq!(x.gt(0.0)?.where_cond(1.0, 0)?.dtype(), DType::F32);
        Ok(())
    });
}

#[test]
fn scalars_follow_the_type_promotion_of_pytorch() {
    on_each_world(|mesh| {
        // 0.1 in f32 is what an f32 tensor is compared with
        let x = DTensor::full(0.1, 4, DType::F32, mesh, [Shard(0)])?;
        assert_eq!(x.eq(0.1)?.full_tensor()?.to_vec1::<u8>()?, [1; 4]);
        assert_eq!(x.maximum(0.5)?.dtype(), DType::F32);
        let n = DTensor::full(200, 4, DType::U8, mesh, [Shard(0)])?;
        // not wrapped into u8
        assert_eq!(n.lt(300)?.full_tensor()?.to_vec1::<u8>()?, [1; 4]);
        assert_eq!(n.gt(-1)?.full_tensor()?.to_vec1::<u8>()?, [1; 4]);
        assert_eq!(n.gt(199.5)?.full_tensor()?.to_vec1::<u8>()?, [1; 4]);
        assert_eq!((n.maximum(201)?.dtype(), n.maximum(200.5)?.dtype()), (DType::U8, DType::F32));
        Ok(())
    });
}

#[test]
fn an_error_names_the_line_of_the_operator() {
    ThreadWorld::new(2)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("a", 2)])?;
            let (x, y) =
                (DTensor::ones(3, DType::F32, &mesh, [Shard(0)])?, DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?);
            let line = line!() + 1;
            let error = (&x + &y).unwrap_err().to_string();
            assert!(error.contains(&format!("operator_overloads.rs:{line}")), "{error}");
            assert!(((&x + &y) * &x).unwrap_err().to_string().contains("add"));
            Ok(())
        })
        .unwrap();
}
