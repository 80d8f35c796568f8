//! States: on chosen ranks, of every element type, of optimizers.

use shardwise::nn::{FsdpModule, Linear};
use shardwise::plan::fully_shard;
use shardwise::prelude::*;
use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};

use super::{RANKS, all_elements, counted, counting, elements, line, square};

pub(super) fn full_state(world: &World) -> Result<String> {
    let mesh = line(world)?;
    let model = Linear::without_bias(&Builder::new(&mesh).dtype(DType::F64), 8, 64)?;
    model.weight.set(&counting(&mesh, &[64, 8], [Replicate])?)?;
    fully_shard(&model, &mesh, &["tp"])?;
    for chosen in [2, 0, 3] {
        world.memory().reset_peak();
        let before = world.memory().peak();
        let state = model.full_state_dict(world, chosen)?;
        assert_eq!(state.is_some(), world.rank() == chosen);
        // No other rank holds the 4 kB of the full tensor at any time.
        assert!(world.rank() == chosen || world.memory().peak() - before < 64 * 8 * 8 / 2);
        for tensor in state.iter().flat_map(|state| state.values()) {
            assert_eq!(elements(tensor)?, counted(512));
        }
    }
    Ok("only on the chosen rank, 2, 0 or 3; other ranks hold no full tensor".into())
}

pub(super) fn gathered_types(world: &World) -> Result<String> {
    let mesh = line(world)?;
    let rows = ChunkShardingSpec::over_ranks(0, 0..RANKS)?;
    for (dtype, value) in [(DType::F64, 1.0 + 2_f64.powi(-40)), (DType::I64, 2_f64.powi(40) + 1.0)] {
        let x = ShardedTensor::full(rows.clone(), value, (8, 2), dtype, &mesh)?;
        let whole = x.gather(0)?;
        assert_eq!(whole.is_some(), world.rank() == 0);
        if let Some(whole) = whole {
            assert_eq!((whole.dtype(), elements(&whole)?), (dtype, vec![value; 16]));
        }
    }
    Ok("f64 and i64 exact".into())
}

pub(super) fn sharded_optimizer_state(world: &World) -> Result<String> {
    let build = |mesh: &DeviceMesh, placements: [Placement; 2]| -> Result<(Linear, ShardedOptimizer)> {
        mesh.manual_seed(6);
        let model = Linear::without_bias(&Builder::new(mesh).placed(move |_, _| placements.to_vec()), 4, 8)?;
        let optimizer = AdamW::default().over(&model)?;
        Ok((model, optimizer))
    };
    // A sum of integers, so that all layouts have the same gradient; another one in every step, so that the state matters.
    let step = |model: &Linear, optimizer: &mut ShardedOptimizer, number: usize| -> Result<()> {
        let row = |i: &[usize]| ((i[0] * 3 + i[1] + 2 * number) % 5) as f64 - 2.0;
        let x = DTensor::from_fn((4, 4), DType::F32, model.weight.get().device_mesh(), [Shard(0), Replicate], row)?;
        optimizer.step(model.forward(&x)?.sum_all()?.backward()?)
    };
    let mesh = square(world)?;
    let (model, mut optimizer) = build(&mesh, [Shard(0), Replicate])?;
    (0..2).try_for_each(|number| step(&model, &mut optimizer, number))?;
    let state = optimizer.state_dict()?;
    let (other, mut resumed) = build(&mesh, [Shard(1), Shard(0)])?;
    other.weight.set(&model.weight.get())?;
    resumed.load_state_dict(&state)?;
    step(&model, &mut optimizer, 2)?;
    step(&other, &mut resumed, 2)?;
    assert_eq!(all_elements(&other.weight.get())?, all_elements(&model.weight.get())?);
    Ok("read, loaded in another layout, and continued with the same bits".into())
}
