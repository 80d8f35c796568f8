//! Elements and offsets of uneven shards, and views of them.

use shardwise::prelude::*;

use super::{RANKS, all_elements, calls, counted, counting, elements, line, square};
use shardwise::candle_core::{Device, Tensor};

pub(super) fn nested_shards(world: &World) -> Result<String> {
    let mesh = square(world)?;
    for rows in 1..10 {
        let x = counting(&mesh, &[rows, 3], [Shard(0), Shard(0)])?;
        world.trace().clear();
        let whole = x.redistribute([Replicate, Replicate])?;
        assert_eq!(calls(world), ["all_gather"]);
        assert_eq!(elements(&whole.to_local()?)?, counted(rows * 3), "{rows} rows");
    }
    Ok("exact for 1 to 9 rows on 2 x 2 ranks, in one all-gather".into())
}

pub(super) fn view_of_columns(world: &World) -> Result<String> {
    let x = counting(&line(world)?, &[12, 8], [Shard(1)])?;
    let y = x.view(&[-1, 6])?;
    assert_eq!(y.shape(), [16, 6]);
    assert_eq!(all_elements(&y)?, counted(96));
    Ok("exact".into())
}

pub(super) fn view_over_two_axes(world: &World) -> Result<String> {
    let mesh = square(world)?;
    let x = counting(&mesh, &[2, 8, 4], [Shard(1), Shard(1)])?.requires_grad();
    let weight = |i: &[usize]| ((i[0] * 32 + i[1] * 4 + i[2]) % 7) as f64;
    let weight = DTensor::from_fn([2, 8, 4].as_slice(), DType::F64, &mesh, [Shard(1), Shard(1)], weight)?;
    world.trace().clear();
    let flat = x.view(&[16, 4])?;
    let y = flat.view(&[2, 8, 4])?;
    let moved = calls(world).len();
    // Two mistakes may cancel.
    assert_eq!((all_elements(&flat)?, all_elements(&y)?), (counted(64), counted(64)));
    let gradients = (&y * &weight)?.sum_all()?.backward()?;
    let expected: Vec<f64> = (0..64).map(|i| f64::from(i % 7)).collect();
    assert_eq!(all_elements(gradients.get(&x)?)?, expected);
    assert!(moved <= 1, "{moved} collectives");
    Ok(format!("values and gradients exact; {moved} exchange for both views"))
}

pub(super) fn uneven_from_local(world: &World) -> Result<String> {
    let part = |rank: usize| -> Result<Tensor> {
        let columns = 2 + rank;
        let local: Vec<f64> = (0..2 * columns).map(|i| i as f64 + 0.125 * rank as f64).collect();
        Ok(Tensor::from_vec(local, (2, columns), &Device::Cpu)?)
    };
    let x = DTensor::from_local(&part(world.rank())?, &line(world)?, [Shard(1)])?;
    let parts = (0..RANKS).map(part).collect::<Result<Vec<_>>>()?;
    assert_eq!(all_elements(&x)?, elements(&Tensor::cat(&parts, 1)?)?);
    Ok("exact, as ragged shards of 2, 3, 4 and 5 columns".into())
}

pub(super) fn offsets(world: &World) -> Result<String> {
    let mesh = square(world)?;
    for size in 1..10 {
        let x = counting(&mesh, &[size], [Shard(0), Shard(0)])?;
        let (layout, mut covered) = (x.layout(), 0);
        for rank in 0..RANKS {
            let (offset, len) = (layout.global_offset(rank)[0], layout.local_shape(rank)[0]);
            // Shards follow each other, and an empty one is outside.
            assert_eq!(offset, if len == 0 { size } else { covered }, "{size} elements, rank {rank}");
            covered += len;
        }
        assert_eq!(covered, size);
        let (offset, local) = (layout.global_offset(world.rank())[0], elements(&x.to_local()?)?);
        assert_eq!(local, counted(size)[offset..offset + local.len()]);
    }
    Ok("the offsets are those of the elements for 1 to 9 elements on 2 x 2 ranks".into())
}

pub(super) fn strided_shards(world: &World) -> Result<String> {
    check_strided(world, |s| vec![[Replicate, s.clone()], [s, Replicate]])?;
    Ok("exact for 1 to 12 elements, 1 to 4 chunks, on either axis".into())
}

pub(super) fn nested_strided_shards(world: &World) -> Result<String> {
    check_strided(world, |s| vec![[s.clone(), Shard(0)], [s.clone(), s]])?;
    Ok("exact for 1 to 12 elements, 1 to 4 chunks and 2 layouts".into())
}

/// Checks layouts with a strided shard: parts, and the gathered tensor.
fn check_strided(world: &World, layouts: fn(Placement) -> Vec<[Placement; 2]>) -> Result<()> {
    let mesh = square(world)?;
    for (size, split) in (1..13).flat_map(|size| (1..5).map(move |split| (size, split))) {
        for placements in layouts(Placement::strided(0, split)) {
            let x = counting(&mesh, &[size], [Replicate, Replicate])?.redistribute(placements.clone())?;
            assert_eq!(all_elements(&x)?, counted(size), "{placements:?}");
            let held = x.layout().global_indices(world.rank(), 0);
            assert_eq!(elements(&x.to_local()?)?, held.iter().map(|&i| i as f64).collect::<Vec<_>>());
        }
    }
    Ok(())
}
