//! Random numbers and what depends on them.

use shardwise::models::{DataParallelMode, GptConfig, ParallelismConfig, batch_placements, build};
use shardwise::optim::ParamGroup;
use shardwise::prelude::*;

use super::{all_elements, alone, distance, line, square};

pub(super) fn random_numbers(world: &World) -> Result<String> {
    let draws = |mesh: DeviceMesh, placements: Vec<Placement>| -> Result<[Vec<f64>; 2]> {
        mesh.manual_seed(7);
        let normal = DTensor::randn((6, 8), &mesh, placements.clone())?;
        let kept = DTensor::ones((6, 8), DType::F32, &mesh, placements)?.dropout(0.3, true)?;
        Ok([all_elements(&normal)?, all_elements(&kept)?])
    };
    let one = draws(alone(world)?, vec![Replicate])?;
    for placement in [Replicate, Shard(0), Shard(1), Placement::block_cyclic(1, 3)] {
        assert_eq!(draws(line(world)?, vec![placement])?, one);
    }
    for placements in
        [vec![Shard(0), Shard(1)], vec![Shard(1), Shard(0)], vec![Shard(0), Shard(0)], vec![Replicate, Shard(1)]]
    {
        assert_eq!(draws(square(world)?, placements)?, one);
    }
    Ok("the same bits on one rank and in 8 layouts on 4, dropout included".into())
}

pub(super) fn training_loss(world: &World) -> Result<String> {
    let config = GptConfig {
        vocab_size: 32,
        seq_len: 6,
        d_model: 16,
        n_layers: 2,
        n_heads: 4,
        d_ff: 40,
        dropout: 0.2,
        ..GptConfig::default()
    };
    let losses = |mesh: &DeviceMesh, parallelism: ParallelismConfig| -> Result<Vec<f64>> {
        mesh.manual_seed(3);
        let model = build(&config, &parallelism.plan(&config, mesh.mesh())?, mesh, DType::F64)?;
        let mut optimizer = ParamGroup::new(AdamW::default()).with_lr(0.01).over(&model)?;
        let step = |step: usize| {
            let tokens = |shift: usize| move |i: &[usize]| ((i[0] * 11 + (i[1] + shift) * 7 + step * 5) % 32) as f64;
            let tokens = |shift| DTensor::from_fn((8, 6), DType::I64, mesh, batch_placements(mesh), tokens(shift));
            let loss = model.loss(&tokens(0)?, &tokens(1)?)?;
            optimizer.step(loss.backward()?)?;
            Ok(loss.item::<f32>()?.into())
        };
        (0..3).map(step).collect()
    };
    let plan = |data_parallel, tensor_parallel, sequence_parallel| ParallelismConfig {
        data_parallel,
        tensor_parallel,
        sequence_parallel,
    };
    let (replicated, sharded) = (DataParallelMode::Replicate, DataParallelMode::FullyShard);
    let one = world.device_mesh(Mesh::from_ranks([("dp", 1)], vec![world.rank()])?)?;
    let expected = losses(&one, plan(replicated, false, false))?;
    let ways = [
        (world.mesh([("dp", 4)])?, plan(replicated, false, false)),
        (world.mesh([("dp", 4)])?, plan(sharded, false, false)),
        (world.mesh([("tp", 4)])?, plan(replicated, true, true)),
        (square(world)?, plan(sharded, true, false)),
    ];
    for (mesh, parallelism) in ways {
        let found = losses(&mesh, parallelism)?;
        assert!(distance(&found, &expected) < 1e-6, "{found:?} on {}, {expected:?} on one rank", mesh.mesh());
    }
    Ok("losses of a GPT with dropout within 1e-6 of one rank, after 3 steps in 4 layouts".into())
}
