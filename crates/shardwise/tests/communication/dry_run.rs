//! Dry runs: the collectives and the memory of a program without its data, equal to those of the real run.

use std::time::{Duration, Instant};

use shardwise::comm::{CommRecord, record_operator};
use shardwise::prelude::*;
use shardwise::{DryWorld, explicit_communication_only};
use shardwise_test_suites::own_process::is_alone;

/// Sizes of a transformer whose weights are sharded over two axes.
#[derive(Clone, Copy)]
struct Model {
    layers: usize,
    width: usize,
    hidden: usize,
    vocabulary: usize,
}

/// Gathers every weight as a forward pass would, and reduces and scatters its gradient as a backward pass would.
fn step(world: &World, axes: [(&'static str, usize); 3], model: Model) -> Result<usize> {
    let mesh = world.mesh(axes)?;
    let (d, h) = (model.width, model.hidden);
    let weights: Vec<(usize, usize)> = std::iter::once((model.vocabulary, d))
        .chain((0..model.layers).flat_map(|_| [(d, d), (d, d), (d, d), (d, d), (h, d), (h, d), (d, h)]))
        .chain([(model.vocabulary, d)])
        .collect();
    let sharded = [Replicate, Shard(0), Shard(1)];
    let parameters = weights
        .iter()
        .map(|&shape| DTensor::zeros(shape, DType::BF16, &mesh, sharded.clone()))
        .collect::<Result<Vec<_>>>()?;
    for weight in &parameters {
        let gathered = weight.redistribute([Replicate, Replicate, Shard(1)])?;
        let sum = Partial(ReduceOp::Sum);
        let local = gathered.to_local()?.clone();
        let gradient = DTensor::from_local_with_shape(&local, &mesh, [sum.clone(), sum, Shard(1)], weight.shape())?;
        drop(gathered);
        gradient.redistribute(sharded.clone())?;
    }
    // Parts of one size everywhere, a strided move, and a write: what dry runs could get wrong.
    let part = candle_core::Tensor::zeros((4, 2), DType::F32, &candle_core::Device::Cpu)?;
    let whole = DTensor::from_local(&part, &mesh, [Shard(0), Replicate, Shard(1)])?;
    let strided = Placement::StridedShard { dim: 0, split_factor: 2 };
    let mut moved = whole.redistribute([strided, Replicate, Shard(0)])?;
    moved.fill_range(&[1..3, 0..2], 1.0)?;
    Ok(weights.iter().map(|(a, b)| a * b).sum())
}

fn summary(records: &[CommRecord]) -> Vec<(&'static str, Vec<usize>, usize)> {
    records.iter().map(|r| (r.call, r.group.to_vec(), r.bytes)).collect()
}

#[test]
fn seventy_billion_parameters_on_16384_ranks_take_seconds_and_no_memory() {
    if !is_alone(module_path!(), "seventy_billion_parameters_on_16384_ranks_take_seconds_and_no_memory") {
        return;
    }
    let model = Model { layers: 80, width: 8192, hidden: 28672, vocabulary: 128_256 };
    let start = Instant::now();
    let run = DryWorld::new(16_384)
        .unwrap()
        .run(|world| step(&world, [("dp", 128), ("fsdp", 16), ("tp", 8)], model))
        .unwrap();
    let elapsed = start.elapsed();
    assert!(run.value >= 70_000_000_000, "{} parameters", run.value);
    assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
    assert!(peak_resident_mb() < 500, "{} MB resident", peak_resident_mb());
    // a gather, a reduction and a scatter per weight
    assert!(run.records.len() >= 2 * (80 * 7 + 2), "{} collectives", run.records.len());
    let shards = run.value * 2 / 128;
    let largest = 128_256 * 8192 * 2 / 8;
    assert!(run.peak_bytes >= shards + largest && run.peak_bytes < shards + 4 * largest, "{}", run.peak_bytes);
    println!("{} collectives, peak {} MB, in {elapsed:?}", run.records.len(), run.peak_bytes >> 20);
}

/// Peak memory of this process, in megabytes.
fn peak_resident_mb() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok()).unwrap_or(0) / 1024
}

#[test]
fn a_dry_run_lists_the_collectives_of_the_real_run() {
    let model = Model { layers: 2, width: 10, hidden: 22, vocabulary: 13 };
    let axes = [("dp", 2), ("fsdp", 2), ("tp", 2)];
    let real = ThreadWorld::new(8).unwrap().run(move |world| {
        step(&world, axes, model)?;
        Ok((world.trace().records(), world.memory().peak()))
    });
    for (rank, (records, peak)) in real.unwrap().iter().enumerate() {
        let dry = DryWorld::new(8).unwrap().as_rank(rank).unwrap().run(|world| step(&world, axes, model)).unwrap();
        assert!(!records.is_empty());
        assert_eq!(summary(&dry.records), summary(records), "rank {rank}");
        assert_eq!(dry.peak_bytes, *peak, "rank {rank}");
    }
}

#[test]
fn dry_runs_reject_reads_of_data_and_check_arguments() {
    assert!(DryWorld::new(0).is_err());
    assert!(DryWorld::new(4).unwrap().as_rank(4).is_err());
    DryWorld::new(64)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("a", 64)])?;
            let x = DTensor::randn((1 << 20, 1 << 20), &mesh, [Shard(0)])?;
            for (result, part) in [
                (x.item::<f32>().map(drop), "dry run"),
                (x.equal(&x).map(drop), "dry run"),
                (x.state().map(drop), "dry run"),
                (x.redistribute([Shard(5)]).map(drop), "from -2 to 1"),
                (world.all_reduce(&x.to_local()?, ReduceOp::BitOr).map(drop), "rank 0 called all_reduce"),
                (world.mesh([("a", 65)]).map(drop), "below 64"),
            ] {
                let message = result.expect_err(part).to_string();
                assert!(message.contains(part), "{message}");
            }
            assert!(x.show().unwrap_err().to_string().contains("dry run"));
            assert!(x.to_string().starts_with("without data\n"), "{x}");
            assert!(world.split(Some(0), 0).unwrap_err().to_string().contains("dry run"));
            x.clone().fill_range(&[0..1 << 20, 0..1 << 20], 1.0)?;
            assert_eq!(x.redistribute([Shard(1)])?.local_shape(), [1 << 20, 1 << 14]);
            let y = x.redistribute([Partial(ReduceOp::Sum)])?.to_dtype(DType::F64)?;
            assert_eq!(
                y.redistribute([Placement::StridedShard { dim: 0, split_factor: 2 }])?.local_shape()[0],
                1 << 14
            );
            Ok(())
        })
        .unwrap();
}

#[test]
fn the_trace_records_collectives_their_purpose_and_call_site() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let x = DTensor::ones((4, 8), DType::F32, &mesh, [Shard(0)])?;
        world.trace().clear();
        x.redistribute([Replicate])?;
        record_operator("my operator", || x.redistribute([Shard(1)]))?;
        world.barrier()?;
        let records = world.trace().records();
        let seen: Vec<_> = records.iter().map(|r| (r.call, r.operator, r.bytes)).collect();
        assert_eq!(
            seen,
            [
                ("all_gather", Some("redistribute"), 64),
                ("exchange_dims", Some("my operator"), 32),
                ("barrier", None, 0),
            ]
        );
        assert!(records.iter().all(|r| r.site.file().ends_with("dry_run.rs") && r.group[..] == [0, 1]));
        let report = world.trace().report();
        assert_eq!(report.0.iter().map(|(_, _, total)| total.bytes).sum::<usize>(), 96);
        let text = report.to_string();
        assert!(text.contains("my operator") && text.contains("exchange_dims"), "{text}");
        world.trace().clear();
        assert!(world.trace().records().is_empty() && world.trace().report().0.is_empty());
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn implicit_communication_is_an_error_in_an_explicit_scope() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let sum = DTensor::ones((), DType::F32, &mesh, [Partial(ReduceOp::Sum)])?;
        let x = DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?;
        explicit_communication_only(|| {
            let message = sum.item::<f32>().unwrap_err().to_string();
            for part in ["item", "all_reduce", "dry_run.rs", "redistribute its inputs"] {
                assert!(message.contains(part), "{part} missing in {message}");
            }
            let two = DTensor::zeros(2, DType::F32, &mesh, [Shard(0)])?;
            explicit_communication_only(|| assert!(x.clone().assign(&[1..3], &two).is_err()));
            assert!(sum.to_dtype(DType::I64).is_err());
            // asked for by name, or needing none
            assert_eq!(sum.redistribute([Replicate])?.item::<f32>()?, 1.0);
            assert_eq!(x.full_tensor()?.dims(), [4]);
            world.barrier()
        })?;
        assert_eq!(sum.item::<f32>()?, 1.0);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}
