//! Slices, masks and index lists, read and written, in every placement on one mesh axis of 1, 2 and 3 ranks, against
//! PyTorch's results and gradients.
//!
//! `x` is `arange(60).reshape(3, 4, 5)`, written values are -1, -2, ..., and each tensor is compared by its shape and the
//! sum of its elements times 1, 2, 3, ....

// Negative ends count from the end here: `1..-1` is not an empty range.
#![allow(clippy::reversed_empty_ranges)]

use candle_core::{Device, Tensor};
use shardwise::ops::{Ellipsis, NewAxis, strided};
use shardwise::prelude::*;
use shardwise::tensor::Arange;

type Get = fn(&DTensor) -> Result<DTensor>;
type Set = fn(&mut DTensor, &DTensor) -> Result<()>;
type Fill = fn(&mut DTensor) -> Result<()>;

// Expected: shape, sum, sum of the gradient of x.
const GETS: &[(Get, &str, &[usize], f64, f64)] = &[
    (|x| x.i(1), "x.i(1)", &[4, 5], 6860.0, 7070.0),
    (|x| x.i((.., 2..9)), "x.i((.., 2..9))", &[3, 2, 5], 20290.0, 20755.0),
    (|x| x.i((.., 1..3, -1)), "x.i((.., 1..3, -1))", &[3, 2], 829.0, 850.0),
    (|x| x.i((-1, .., strided(1.., 2))), "x.i((-1, .., strided(1.., 2)))", &[4, 2], 1886.0, 1922.0),
    (|x| x.i((Ellipsis, 0)), "x.i((Ellipsis, 0))", &[3, 4], 2860.0, 2938.0),
    (|x| x.i((.., NewAxis, ..=1)), "x.i((.., NewAxis, ..=1))", &[3, 1, 2, 5], 15640.0, 16105.0),
    (|x| x.i(-2..), "x.i(-2..)", &[2, 4, 5], 37720.0, 38540.0),
    (|x| x.i((.., ..=-2)), "x.i((.., ..=-2))", &[3, 3, 5], 37785.0, 38820.0),
    (|x| x.i((strided(.., 2), 3, 1..=3)), "x.i((strided(.., 2), 3, 1..=3))", &[2, 3], 961.0, 982.0),
    (|x| x.i((.., 3..1)), "x.i((.., 3..1))", &[3, 0, 5], 0.0, 0.0),
    (|x| x.i([2, 0, -1]), "x.i([2, 0, -1])", &[3, 4, 5], 68180.0, 70010.0),
    (|x| x.i((.., [3, 0])), "x.i((.., [3, 0]))", &[3, 2, 5], 17215.0, 17680.0),
    (|x| x.i((1.., .., [4, -1, 0])), "x.i((1.., .., [4, -1, 0]))", &[2, 4, 3], 13908.0, 14208.0),
    (|x| x.i(([0, 2], [1, 3])), "x.i(([0, 2], [1, 3]))", &[2, 5], 2405.0, 2460.0),
    (|x| x.i(([0, 2], .., [1, 3])), "x.i(([0, 2], .., [1, 3]))", &[2, 4], 1448.0, 1484.0),
    (|x| x.i((.., [1, 3], [0, 4])), "x.i((.., [1, 3], [0, 4]))", &[3, 2], 853.0, 874.0),
    (|x| x.i((0, .., [1, 3])), "x.i((0, .., [1, 3]))", &[4, 2], 446.0, 482.0),
    (|x| x.i((.., NewAxis, [1, 3])), "x.i((.., NewAxis, [1, 3]))", &[3, 1, 2, 5], 19315.0, 19780.0),
    (|x| x.i(&x.gt(50.5)?), "x.i(&x.gt(50.5)?)", &[9], 2535.0, 2580.0),
    (|x| x.i(&flags(x, &[1, 0, 1])?), "x.i(&flags(x, &[1, 0, 1])?)", &[2, 4, 5], 33520.0, 34340.0),
    (|x| x.i((.., &flags(x, &[1, 0, 0, 1])?)), "x.i((.., &flags(x, &[1, 0, 0, 1])?))", &[3, 2, 5], 18340.0, 18805.0),
    (
        |x| x.i((.., .., &flags(x, &[0, 1, 0, 0, 1])?)),
        "x.i((.., .., &flags(x, &[0, 1, 0, 0, 1])?))",
        &[3, 4, 2],
        11878.0,
        12178.0,
    ),
    (|x| x.i(&x.i((.., .., 0))?.gt(20.5)?), "x.i(&x.i((.., .., 0))?.gt(20.5)?)", &[7, 5], 30030.0, 30660.0),
    (|x| x.i((1, &x.i((1, .., ..))?.lt(30.5)?)), "x.i((1, &x.i((1, .., ..))?.lt(30.5)?))", &[11], 1760.0, 1826.0),
    (|x| x.i((&flags(x, &[1, 0, 1])?, [1, 2])), "x.i((&flags(x, &[1, 0, 1])?, [1, 2]))", &[2, 5], 2205.0, 2260.0),
    (|x| x.i(&x.lt(-1.0)?), "x.i(&x.lt(-1.0)?)", &[0], 0.0, 0.0),
    (
        |x| x.i(&index(x, &[0, 1, 2, 0], &[2, 2])?),
        "x.i(&index(x, &[0, 1, 2, 0], &[2, 2])?)",
        &[2, 2, 4, 5],
        86040.0,
        89280.0,
    ),
    (|x| x.i((.., &index(x, &[3], &[])?)), "x.i((.., &index(x, &[3], &[])?))", &[3, 5], 5470.0, 5590.0),
];

/// The write, its text and the shape of the value; sums of the result and of both gradients.
type SetCase = (Set, &'static str, &'static [usize], f64, f64, f64);

const SETS: &[SetCase] = &[
    (|x, v| x.set(1, v), "x.set(1, &v)", &[4, 5], 46250.0, 54540.0, 7070.0),
    (|x, v| x.set((.., 1..3, -1), v), "x.set((.., 1..3, -1), &v)", &[3, 2], 63350.0, 65835.0, 850.0),
    (|x, v| x.set((.., 1..3), v), "x.set((.., 1..3), &v)", &[5], 33935.0, 37655.0, 2805.0),
    (|x, v| x.set((.., NewAxis, ..=1), v), "x.set((.., NewAxis, ..=1), &v)", &[3, 1, 2, 1], 41475.0, 46055.0, 3515.0),
    (
        |x, v| x.set((strided(.., 2), .., strided(1.., 2)), v),
        "x.set((strided(.., 2), .., strided(1.., 2)), &v)",
        &[2, 4, 2],
        45032.0,
        52010.0,
        5636.0,
    ),
    (
        |x, v| x.set((Ellipsis, strided(.., 3)), v),
        "x.set((Ellipsis, strided(.., 3)), &v)",
        &[1],
        43176.0,
        45006.0,
        720.0,
    ),
    (|x, v| x.set([2, 0], v), "x.set([2, 0], &v)", &[2, 4, 5], 320.0, 19270.0, 18340.0),
    (|x, v| x.set((.., [3, 0]), v), "x.set((.., [3, 0]), &v)", &[3, 2, 5], 17560.0, 36155.0, 17680.0),
    (|x, v| x.set((1.., .., [4, 0]), v), "x.set((1.., .., [4, 0]), &v)", &[4, 2], 41120.0, 45402.0, 3100.0),
    (|x, v| x.set(([0, 2], [1, 3]), v), "x.set(([0, 2], [1, 3]), &v)", &[2, 5], 52690.0, 56650.0, 2460.0),
    (|x, v| x.set(([0, 2], .., [1, 3]), v), "x.set(([0, 2], .., [1, 3]), &v)", &[2, 4], 59520.0, 62590.0, 1484.0),
    (|x, v| x.set((.., [1, 3], [0, 4]), v), "x.set((.., [1, 3], [0, 4]), &v)", &[3, 2], 62876.0, 65382.0, 874.0),
    (|x, v| x.set(&x.clone().gt(50.5)?, v), "x.set(&x.clone().gt(50.5)?, &v)", &[9], 41620.0, 45526.0, 2580.0),
    (
        |x, v| x.set(&flags(&x.clone(), &[1, 0, 1])?, v),
        "x.set(&flags(&x.clone(), &[1, 0, 1])?, &v)",
        &[2, 4, 5],
        -15680.0,
        19270.0,
        34340.0,
    ),
    (
        |x, v| x.set((.., &flags(&x.clone(), &[1, 0, 0, 1])?), v),
        "x.set((.., &flags(&x.clone(), &[1, 0, 0, 1])?), &v)",
        &[2, 5],
        29585.0,
        36155.0,
        5655.0,
    ),
    (|x, v| x.set(&x.clone().gt(50.5)?, v), "x.set(&x.clone().gt(50.5)?, &v)", &[1], 43696.0, 45526.0, 504.0),
];

const FILLS: &[(Fill, &str, f64, f64)] = &[
    (|x| x.set((.., 1..3, -1), 2.5), "x.set((.., 1..3, -1), 2.5)", 64687.5, 65835.0),
    (|x| x.set((strided(.., 2), 1), -1), "x.set((strided(.., 2), 1), -1)", 60120.0, 61950.0),
    (|x| x.set(&x.clone().gt(50.5)?, 0.5), "x.set(&x.clone().gt(50.5)?, 0.5)", 44452.0, 45526.0),
    (
        |x| x.set((.., &flags(&x.clone(), &[1, 0, 0, 1])?), 7),
        "x.set((.., &flags(&x.clone(), &[1, 0, 0, 1])?), 7)",
        41645.0,
        36155.0,
    ),
    (|x| x.set((.., [3, 0]), 1.0), "x.set((.., [3, 0]), 1.0)", 36155.0, 36155.0),
];

fn on_each_world(run: impl Fn(&DeviceMesh) -> Result<()> + Clone + Send + Sync + 'static) {
    for ranks in 1..=3 {
        let run = run.clone();
        ThreadWorld::new(ranks).unwrap().run(move |world| run(&world.mesh([("a", world.size())])?)).unwrap();
    }
}

fn replicated(like: &DTensor, tensor: &Tensor) -> Result<DTensor> {
    DTensor::distribute_tensor(tensor, like.device_mesh(), [Replicate], None)
}

fn flags(like: &DTensor, set: &[u8]) -> Result<DTensor> {
    replicated(like, &Tensor::new(set, &Device::Cpu)?)
}

fn index(like: &DTensor, indices: &[i64], shape: &[usize]) -> Result<DTensor> {
    replicated(like, &Tensor::new(indices, &Device::Cpu)?.reshape(shape)?)
}

/// `x` in every placement of one axis.
fn leaves(mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
    let whole = Tensor::arange(0.0, 60.0, &Device::Cpu)?.reshape((3, 4, 5))?;
    let ragged = Placement::ragged(
        1,
        match mesh.size() {
            1 => vec![4],
            2 => vec![1, 3],
            _ => vec![0, 3, 1],
        },
    );
    let placements = [Replicate, Shard(0), Shard(1), Shard(2), ragged, Partial(ReduceOp::Sum)];
    let leaf = |p: Placement| Ok(DTensor::distribute_tensor(&whole, mesh, [p], None)?.requires_grad());
    placements.into_iter().map(leaf).collect()
}

/// The sum of the elements times 1, 2, 3, ....
fn weighed(x: &DTensor) -> Result<DTensor> {
    let n = x.elem_count();
    let shape: Vec<isize> = x.shape().iter().map(|&n| n as isize).collect();
    let weights = DTensor::arange(1..n as i64 + 1, DType::F64, x.device_mesh(), [Replicate])?.reshape(&shape)?;
    x.mul(&weights)?.sum_all()
}

fn number(x: &DTensor) -> Result<f64> {
    x.item::<f64>()
}

#[test]
fn indexed_reads_and_their_gradients_match_pytorch() {
    on_each_world(|mesh| {
        for (get, text, shape, sum, gradient) in GETS {
            for x in leaves(mesh)? {
                let at = format!("{text} of {}", x.layout());
                let y = get(&x)?;
                assert_eq!(y.shape(), *shape, "{at}");
                let loss = weighed(&y)?;
                assert_eq!(number(&loss)?, *sum, "{at}");
                let found = loss.backward()?;
                assert_eq!(number(&weighed(found.get(&x)?)?)?, *gradient, "gradient of {at}");
            }
        }
        Ok(())
    });
}

#[test]
fn indexed_writes_and_their_gradients_match_pytorch() {
    on_each_world(|mesh| {
        for (set, text, shape, sum, gradient, of_value) in SETS {
            for leaf in leaves(mesh)? {
                for placement in [Replicate, Shard(0)] {
                    let at = format!("{text} of {} with a value in {placement}", leaf.layout());
                    let n = shape.iter().product::<usize>() as i64;
                    let v = DTensor::arange(Arange::new(-1, -n - 1, -1), DType::F64, mesh, [Replicate])?;
                    let v = v.reshape(&shape.iter().map(|&n| n as isize).collect::<Vec<_>>())?;
                    let v = v.redistribute([placement])?.requires_grad();
                    let mut x = leaf.clone();
                    set(&mut x, &v)?;
                    let loss = weighed(&x)?;
                    assert_eq!(number(&loss)?, *sum, "{at}");
                    let found = loss.backward()?;
                    assert_eq!(number(&weighed(found.get(&leaf)?)?)?, *gradient, "gradient of {at}");
                    assert_eq!(number(&weighed(found.get(&v)?)?)?, *of_value, "gradient of the value in {at}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn indexed_reads_and_writes_on_two_mesh_axes_match_pytorch() {
    ThreadWorld::new(4)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("a", 2), ("b", 2)])?;
            let whole = Tensor::arange(0.0, 60.0, &Device::Cpu)?.reshape((3, 4, 5))?;
            let strided = Placement::StridedShard { dim: 1, split_factor: 2 };
            for placements in [
                [Shard(0), Shard(1)],
                [Shard(0), Shard(0)],
                [Shard(2), Shard(1)],
                [Partial(ReduceOp::Sum), Shard(0)],
                [Replicate, strided],
            ] {
                let leaf = DTensor::distribute_tensor(&whole, &mesh, placements, None)?.requires_grad();
                let both = [Replicate, Replicate];
                let weighed = |x: &DTensor| -> Result<DTensor> {
                    let shape: Vec<isize> = x.shape().iter().map(|&n| n as isize).collect();
                    let last = x.elem_count() as i64 + 1;
                    x.mul(&DTensor::arange(1..last, DType::F64, &mesh, both.clone())?.reshape(&shape)?)?.sum_all()
                };
                for (get, text, shape, sum, gradient) in GETS.iter().filter(|case| !case.1.contains("flags")) {
                    if text.contains("index(") {
                        continue; // helpers for one axis
                    }
                    let at = format!("{text} of {}", leaf.layout());
                    let y = get(&leaf)?;
                    assert_eq!(y.shape(), *shape, "{at}");
                    let loss = weighed(&y)?;
                    assert_eq!(number(&loss)?, *sum, "{at}");
                    assert_eq!(number(&weighed(loss.backward()?.get(&leaf)?)?)?, *gradient, "gradient of {at}");
                }
                for (set, text, shape, sum, gradient, of_value) in SETS.iter().filter(|case| !case.1.contains("flags"))
                {
                    let at = format!("{text} of {}", leaf.layout());
                    let n = shape.iter().product::<usize>() as i64;
                    let v = DTensor::arange(Arange::new(-1, -n - 1, -1), DType::F64, &mesh, [Shard(0), Replicate])?;
                    let v = v.reshape(&shape.iter().map(|&n| n as isize).collect::<Vec<_>>())?.requires_grad();
                    let mut x = leaf.clone();
                    set(&mut x, &v)?;
                    let loss = weighed(&x)?;
                    assert_eq!(number(&loss)?, *sum, "{at}");
                    let found = loss.backward()?;
                    assert_eq!(number(&weighed(found.get(&leaf)?)?)?, *gradient, "gradient of {at}");
                    assert_eq!(number(&weighed(found.get(&v)?)?)?, *of_value, "gradient of the value in {at}");
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn scalars_are_written_as_in_pytorch() {
    on_each_world(|mesh| {
        for (fill, text, sum, gradient) in FILLS {
            for leaf in leaves(mesh)? {
                let mut x = leaf.clone();
                fill(&mut x)?;
                let loss = weighed(&x)?;
                assert_eq!(number(&loss)?, *sum, "{text} of {}", leaf.layout());
                let found = loss.backward()?;
                assert_eq!(number(&weighed(found.get(&leaf)?)?)?, *gradient, "gradient of {text} of {}", leaf.layout());
            }
        }
        Ok(())
    });
}

#[test]
fn slices_communicate_nothing() {
    ThreadWorld::new(3)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("a", 3)])?;
            for x in leaves(&mesh)?.iter().take(5) {
                world.trace().clear();
                let y = x.i((1.., strided(.., 2), 1..-1))?;
                let z = y.i((.., NewAxis, 0..1))?;
                assert_eq!(z.shape(), [2, 1, 1, 3]);
                let mut w = x.clone();
                w.set((1.., strided(.., 2)), 0.0)?;
                w.set((.., 0, 1..3), 1.5)?;
                assert!(world.trace().records().is_empty(), "{}: {:?}", x.layout(), world.trace().records());
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_mask_communicates_only_the_number_of_selected_elements() {
    ThreadWorld::new(3)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("a", 3)])?;
            let x = leaves(&mesh)?.swap_remove(1);
            let mask = x.gt(20.5)?;
            world.trace().clear();
            let y = x.i(&mask)?;
            let calls: Vec<(&str, usize)> = world.trace().records().iter().map(|r| (r.call, r.bytes)).collect();
            assert_eq!(calls.iter().map(|c| c.0).collect::<Vec<_>>(), ["all_gather"], "{calls:?}");
            assert!(calls[0].1 <= 16, "{calls:?}");
            assert_eq!(y.layout().to_string(), "[39] on a=3: S(0;0,19,20)");
            // the gradient moves nothing either
            world.trace().clear();
            let gradient = y.backward_from(&y.ones_like()?)?;
            assert_eq!(gradient.get(&x)?.placements(), [Shard(0)]);
            assert!(world.trace().records().is_empty());
            // a mask that broadcasts, and a single number
            let rows = flags(&x, &[1, 0, 0, 1])?.unsqueeze(-1)?;
            assert_eq!(number(&x.masked_select(&rows)?.sum_all()?)?, number(&x.i((.., [0, 3]))?.sum_all()?)?);
            assert_eq!(x.sum_all()?.masked_select(&x.sum_all()?.gt(0.0)?)?.full_tensor()?.to_vec1::<f64>()?, [1770.0]);
            // rows of which every rank holds one
            assert_eq!(mask.nonzero()?.i(0)?.full_tensor()?.to_vec1::<i64>()?, [1, 0, 1]);
            assert_eq!(mask.nonzero()?.placements()[0].shard_dim(), Some(0));
            Ok(())
        })
        .unwrap();
}

#[test]
fn invalid_indices_are_errors_with_the_reason() {
    ThreadWorld::new(2)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("a", 2)])?;
            let x = leaves(&mesh)?.swap_remove(1);
            let error = |r: Result<DTensor>| r.unwrap_err().to_string();
            assert!(error(x.i((.., .., .., 0))).contains("indices for 4 dimensions"));
            assert!(error(x.i((Ellipsis, Ellipsis))).contains("2 ellipses"));
            assert!(error(x.i((.., 4))).contains("index 4"));
            assert!(error(x.i(strided(.., 0))).contains("step 0"));
            assert!(error(x.i((.., &flags(&x, &[1, 0])?))).contains("a mask of shape [2]"));
            let mut y = x;
            assert!(y.set((.., 4), 0.0).unwrap_err().to_string().contains("index 4"));
            let wide = DTensor::ones(7, DType::F64, &mesh, [Replicate])?;
            assert!(y.set((.., 1), &wide).unwrap_err().to_string().contains("broadcasts to [3, 5]"));
            Ok(())
        })
        .unwrap();
}
