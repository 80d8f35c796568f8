//! Scenarios of PyTorch's `test_view_ops.py` and `test_cute_view_propagation.py`: views that move nothing.

use shardwise::prelude::*;
use shardwise_test_suites::counting::{counted, counted_both_ways};

use crate::pytorch::{assert_close, list, on, replicated, tensor};

fn placements(text: &str) -> Vec<Placement> {
    Placement::parse_list(text).unwrap()
}

/// A view of a tensor: its shape, placements, the new shape, and the placements of the result (as a layout of that shape).
type View = (&'static [usize], &'static str, &'static [isize], &'static str);

/// Checks views that must move nothing and keep every element.
fn check(world: &World, mesh: &DeviceMesh, views: &[View]) -> Result<()> {
    for (shape, from, new, to) in views {
        let x = tensor(mesh, shape, &placements(from))?.requires_grad();
        let (y, grads, calls) = counted_both_ways(world, || x.reshape(new))?;
        let uneven = ["SS(0,6),SS(0,12)"].contains(to) && (shape[2] % 2 > 0);
        assert!(calls[0].is_empty(), "{shape:?} as {from} to {new:?}: {calls:?}");
        // the inverse view of two strided shards needs equal parts to stay in place
        assert!(calls[1].len() <= usize::from(uneven), "{shape:?} as {from} to {new:?}: {calls:?}");
        let expected = Layout::new(mesh.mesh(), y.shape(), placements(to))?;
        let same =
            |rank: usize| (0..y.ndim()).all(|d| y.layout().global_indices(rank, d) == expected.global_indices(rank, d));
        assert!((0..mesh.size()).all(same), "{shape:?} as {from} to {new:?} is {}, expected {to}", y.layout());
        assert_eq!(list(&y)?, list(&x)?, "{shape:?} as {from} to {new:?}");
        assert_eq!(list(grads.get(&x)?)?, vec![1.0; x.elem_count()]);
    }
    Ok(())
}

#[test]
fn rows_that_ranks_do_not_divide_are_viewed_in_place() {
    on(6, |world| {
        let mesh = world.mesh([("a", 6)])?;
        for rows in [7, 1] {
            let x = tensor(&mesh, &[rows, 8], &[Shard(0)])?;
            for new in [vec![rows, 2, 4], vec![rows, 4, 2], vec![rows, 8]] {
                let signed: Vec<isize> = new.iter().map(|&n| n as isize).collect();
                let (y, calls) = counted(&world, || x.reshape(&signed))?;
                assert!(calls.is_empty(), "{rows} rows: {calls:?}");
                assert_eq!(y.local_shape()[0], x.local_shape()[0], "{}", y.layout());
                assert_eq!(list(&y)?, list(&x)?);
            }
        }
        check(
            &world,
            &mesh,
            &[
                (&[1, 8], "S(0)", &[1, 2, 4], "S(0)"),
                (&[2, 1, 6], "S(1)", &[2, 1, 2, 3], "S(1)"),
                (&[1, 1, 6], "S(1)", &[1, 1, 3, 2], "S(1)"),
            ],
        )?;
        // a shard without a place in the new shape is gathered
        let x = tensor(&mesh, &[1, 8], &[Shard(0)])?;
        assert_eq!(list(&x.reshape(&[8])?)?, list(&x)?);
        Ok(())
    });
}

#[test]
fn flattening_a_sharded_dimension_is_a_strided_shard() {
    on(6, |world| {
        let (line, square) = (world.mesh([("a", 6)])?, world.mesh([("a", 3), ("b", 2)])?);
        check(
            &world,
            &line,
            &[
                (&[6, 5, 3], "S(1)", &[30, 3], "SS(0,6)"),
                (&[6, 6, 3], "S(1)", &[36, 3], "SS(0,6)"),
                (&[6, 7, 3], "S(1)", &[42, 3], "SS(0,6)"),
                (&[36, 3], "SS(0,6)", &[6, 6, 3], "S(1)"),
                (&[6, 256], "S(0)", &[1536], "S(0)"),
            ],
        )?;
        // a strided shard that another axis divides once more
        let x = tensor(&square, &[24, 36, 2], &placements("SS(0,2),S(0)"))?;
        let (y, calls) = counted(&world, || x.reshape(&[864, 2]))?;
        assert!(calls.is_empty() && list(&y)? == list(&x)?, "{calls:?}");
        check(
            &world,
            &square,
            &[
                (&[6, 6, 4, 3], "S(1),S(2)", &[144, 3], "SS(0,6),SS(0,12)"),
                (&[6, 6, 3, 3], "S(1),S(2)", &[108, 3], "SS(0,6),SS(0,12)"),
                (&[6, 6, 5, 3], "S(1),S(2)", &[180, 3], "SS(0,6),SS(0,12)"),
                (&[216, 3], "R,SS(0,36)", &[6, 6, 6, 3], "R,S(2)"),
                (&[216, 3], "SS(0,6),SS(0,12)", &[6, 6, 6, 3], "S(1),S(2)"),
                (&[24, 36], "S(0),S(0)", &[864], "S(0),S(0)"),
                (&[42, 24, 36], "P(sum),S(0)", &[1008, 36], "P(sum),S(0)"),
            ],
        )
    });
}

#[test]
fn squeezing_and_adding_dimensions_keeps_shards_and_partial_sums() {
    on(6, |world| {
        let mesh = world.mesh([("a", 3), ("b", 2)])?;
        let x = tensor(&mesh, &[1, 8], &placements("P(sum),S(1)"))?;
        let ((y, all), calls) =
            counted(&world, || Ok((x.squeeze(Some(0))?, [x.atleast_1d()?, x.atleast_2d()?, x.atleast_3d()?])))?;
        assert!(calls.is_empty(), "{calls:?}");
        assert_eq!((y.shape(), y.placements()), (&[8][..], &placements("P(sum),S(0)")[..]));
        assert_eq!(all.iter().map(DTensor::ndim).collect::<Vec<_>>(), [2, 2, 3]);
        let number = tensor(&mesh, &[], &[Replicate, Replicate])?;
        assert_eq!((number.atleast_1d()?.shape(), number.atleast_3d()?.shape()), (&[1][..], &[1, 1, 1][..]));
        let vector = tensor(&mesh, &[12], &[Shard(0), Replicate])?;
        let (row, calls) = counted(&world, || vector.atleast_2d())?;
        assert_eq!((row.shape(), row.placements()), (&[1, 12][..], &[Shard(1), Replicate][..]));
        assert!(calls.is_empty());
        Ok(())
    });
}

#[test]
fn unbinding_a_sharded_dimension_is_one_exchange() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let whole = tensor(&mesh, &[4, 8], &[Replicate])?;
        for (placement, most) in [(Shard(0), 1), (Shard(1), 0), (Replicate, 0), (Partial(ReduceOp::Sum), 0)] {
            let x = tensor(&mesh, &[4, 8], std::slice::from_ref(&placement))?.requires_grad();
            let (rows, calls) = counted(&world, || x.unbind(0))?;
            assert!(calls.len() <= most, "{placement}: {calls:?}");
            for (i, row) in rows.iter().enumerate() {
                assert_eq!(list(row)?, list(&whole.select(0, i as isize)?)?, "{placement}");
            }
            // only two of the slices have a gradient
            let loss = ((&rows[1] * 2.0)? + &rows[3])?.sum_all()?;
            let (grads, calls) = counted(&world, || loss.backward())?;
            assert!(calls.len() <= most, "{placement}: {calls:?}");
            let expected = [[0.0; 8], [2.0; 8], [0.0; 8], [1.0; 8]].concat();
            assert_eq!(list(grads.get(&x)?)?, expected);
        }
        assert!(tensor(&mesh, &[0, 3], &[Replicate])?.unbind(0)?.is_empty());
        Ok(())
    });
}

#[test]
fn reshaping_groups_dimensions_as_pytorch_does() {
    on(6, |world| {
        let (line, square) = (world.mesh([("a", 6)])?, world.mesh([("a", 3), ("b", 2)])?);
        let pairs: [(&[usize], &[isize]); 9] = [
            (&[2, 3], &[3, 2]),
            (&[3, 4, 5], &[12, 5]),
            (&[2, 3, 4, 5, 7], &[12, 70]),
            (&[2, 3, 4, 5, 7], &[2, 3, 140]),
            (&[3, 24], &[1, 3, 2, 4, 1, 3, 1]),
            (&[1, 1, 3, 2, 1, 1], &[6, 1, 1, 1]),
            (&[1, 1, 12, 1, 1, 1, 2, 5, 1], &[3, 4, 1, 10]),
            (&[8, 256], &[8, 2, 128]),
            (&[4, 4], &[2, 8]),
        ];
        for (shape, new) in pairs {
            for dim in 0..shape.len() as isize {
                for x in [
                    tensor(&line, shape, &[Shard(dim)])?,
                    tensor(&square, shape, &[Shard(dim), Shard(shape.len() as isize - 1 - dim)])?,
                    tensor(&square, shape, &[Partial(ReduceOp::Sum), Shard(dim)])?,
                ] {
                    let y = x.reshape(new)?;
                    assert_eq!(y.shape().iter().map(|&n| n as isize).collect::<Vec<_>>(), new);
                    assert_eq!(list(&y)?, list(&x)?, "{} to {new:?}", x.layout());
                }
            }
        }
        // rows that divide, and rows and columns that do not, as one dimension
        for (shape, dim, moves) in [([6, 256], 0, false), ([6, 256], 1, true), ([8, 256], 0, true)] {
            let x = tensor(&line, &shape, &[Shard(dim)])?;
            let (y, calls) = counted(&world, || x.flatten(0, -1))?;
            assert!(moves || calls.is_empty(), "{calls:?}");
            assert_eq!(list(&y)?, list(&x)?);
        }
        Ok(())
    });
}

#[test]
fn moved_repeated_and_expanded_dimensions_keep_their_shards() {
    type View = fn(&DTensor) -> Result<DTensor>;
    // the view, the shape, and per dimension of the input where it is in the result; none if it has to be whole
    type Case = (&'static str, View, &'static [usize], &'static [Option<isize>]);
    let cases: [Case; 13] = [
        ("expand", |x| x.expand(&[42, 24, 36]), &[24, 36], &[Some(1), Some(2)]),
        ("expand", |x| x.expand(&[12, 24, 24, 36]), &[24, 1, 36], &[Some(1), None, Some(3)]),
        ("expand", |x| x.expand(&[-1, 24, -1]), &[24, 1, 36], &[Some(0), None, Some(2)]),
        ("movedim", |x| x.movedim(1, 2), &[12, 24, 36], &[Some(0), Some(2), Some(1)]),
        ("movedims", |x| x.movedims(&[0, 1], &[2, 0]), &[12, 24, 36], &[Some(2), Some(0), Some(1)]),
        ("movedims", |x| x.movedims(&[-1, 0], &[0, -1]), &[12, 24, 36], &[Some(2), Some(1), Some(0)]),
        ("permute", |x| x.permute(&[2, 0, 1]), &[12, 24, 36], &[Some(1), Some(2), Some(0)]),
        ("permute", |x| x.permute(&[-1, -2, -3]), &[12, 24, 36], &[Some(2), Some(1), Some(0)]),
        ("transpose", |x| x.transpose(0, -1), &[12, 24, 36], &[Some(2), Some(1), Some(0)]),
        ("repeat", |x| x.repeat(&[1, 2, 1, 1, 2]), &[24, 36], &[Some(3), None]),
        ("tile", |x| x.tile(&[2, 1]), &[24, 36], &[None, Some(1)]),
        ("unsqueeze", |x| x.unsqueeze(1), &[42, 24, 36], &[Some(0), Some(2), Some(3)]),
        ("unsqueeze", |x| x.unsqueeze(-1), &[42, 24, 36], &[Some(0), Some(1), Some(2)]),
    ];
    on(6, move |world| {
        let mesh = world.mesh([("a", 3), ("b", 2)])?;
        for (name, view, shape, places) in cases {
            let whole = tensor(&mesh, shape, &[Replicate, Replicate])?;
            let expected = view(&whole)?;
            for (dim, place) in places.iter().enumerate() {
                let Some(place) = place else { continue };
                for other in [Replicate, Partial(ReduceOp::Sum)] {
                    let what = format!("{name} of {shape:?} sharded on {dim}, {other}");
                    let x = tensor(&mesh, shape, &[Shard(dim as isize), other.clone()])?;
                    let (y, calls) = counted(&world, || view(&x))?;
                    assert!(calls.is_empty(), "{what}: {calls:?}");
                    assert_eq!(y.placements(), [Shard(*place), other.clone()], "{what}");
                    assert_close(&y, &expected, &what);
                }
            }
            // a dimension that is repeated may be sharded too
            for dim in 0..shape.len() as isize {
                let x = tensor(&mesh, shape, &[Replicate, Shard(dim)])?;
                assert_close(&view(&x)?, &view(&replicated(&x)?)?, name);
            }
        }
        let x = tensor(&mesh, &[24, 36], &[Shard(0), Replicate])?;
        for sizes in [&[24, 35][..], &[36], &[-1, 24, 36]] {
            assert!(x.expand(sizes).is_err(), "{sizes:?}");
        }
        Ok(())
    });
}
