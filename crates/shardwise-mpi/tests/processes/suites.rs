//! Test suites of the library, run by ranks that are processes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use shardwise::models::{DataParallelMode, ParallelismConfig};
use shardwise::{Mesh, ReduceOp, Result, TensorMeta, World};
use shardwise_mpi::{Settings, launched};
use shardwise_test_suites::settings::env_or;
use shardwise_test_suites::{collectives, layout_pairs, recorded_training, remote_shards, vectors};

/// Runs a program on all processes of the job.
pub(crate) fn on_all<T: Send + 'static>(
    settings: &Settings,
    program: impl Fn(World) -> Result<T> + Send + Sync + 'static,
) -> T {
    let processes = launched().expect("started by a launcher").size;
    settings.launch(processes, program).unwrap_or_else(|error| panic!("{error}"))
}

/// The directory that the test runner created for this job.
pub(crate) fn scratch() -> PathBuf {
    std::env::var_os("SHARDWISE_SCRATCH").expect("set by the test runner").into()
}

fn in_rank_order() -> Settings {
    Settings::from_env().expect("good settings").deterministic(true)
}

/// Every collective, with the same bits as on threads.
pub(crate) fn collectives_in_rank_order() {
    for check in [true, false] {
        let checked = on_all(&in_rank_order().check(check), |world| collectives::run(&world));
        assert!(checked > 900, "{checked}");
    }
}

/// The same with limits so low that every call is split into segments and pairwise messages.
pub(crate) fn collectives_in_pieces() {
    on_all(&in_rank_order().segment(4096).largest_count(50), |world| collectives::run(&world));
}

/// Groups within the world, in any order of ranks.
pub(crate) fn groups_side_by_side() {
    on_all(&in_rank_order(), |world| {
        let parity = world.split(Some(world.rank() % 2), 0)?.expect("named a color");
        assert_eq!(parity.rank(), world.rank() / 2);
        collectives::run(&parity)?;
        let backwards: Vec<usize> = (0..world.size()).rev().collect();
        let backwards = world.subgroup(&backwards)?;
        assert_eq!(backwards.rank(), world.size() - 1 - world.rank());
        collectives::run(&backwards)?;
        world.barrier()
    });
}

/// A rank that comes early waits for the one that still computes, and the trace says so of small and of large collectives.
pub(crate) fn waiting_is_measured() {
    const BUSY: Duration = Duration::from_millis(300);
    on_all(&Settings::from_env().expect("good settings"), |world| {
        // The first call of a group creates its communicator, which is not waiting.
        world.barrier()?;
        for elements in [1, 1 << 18] {
            let tensor = Tensor::zeros(elements, DType::F32, &Device::Cpu)?;
            // The second rank begins to compute when the first one is on its way into the collective.
            if world.rank() == 0 {
                world.send(&tensor, 1, 0)?;
            } else {
                world.recv(&TensorMeta::new(elements, DType::F32), 0, 0)?;
                let since = Instant::now();
                while since.elapsed() < BUSY {
                    std::hint::spin_loop();
                }
            }
            world.trace().clear();
            world.all_reduce(&tensor, ReduceOp::Sum)?;
            let waited: Duration = world.trace().report().0.iter().map(|(_, _, total)| total.waiting).sum();
            assert_eq!(waited > BUSY / 2, world.rank() == 0, "rank {} waited {waited:?}", world.rank());
        }
        Ok(())
    });
}

/// Reductions in MPI's order differ from reductions in rank order by rounding at most, and not at all for integers.
pub(crate) fn fast_reductions() {
    let program = |world: World, counts: &[u32]| {
        let mut results = Vec::new();
        for dtype in collectives::DTYPES {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)) {
                for &count in counts {
                    let mine = Tensor::arange(0f64, f64::from(count), &Device::Cpu)?;
                    let mine = ((mine + world.rank() as f64)? * 0.7)?.sin()?;
                    let mine = if dtype.is_int() { ((mine * 9.0)? + 10.0)?.floor()? } else { (mine + 1.5)? };
                    let mine = mine.to_dtype(dtype)?;
                    let n = count as usize;
                    let sizes: Vec<usize> =
                        (0..world.size()).map(|r| n * (r + 1) / world.size() - n * r / world.size()).collect();
                    let all = world.all_reduce(&mine, op)?;
                    let part = world.reduce_scatter(&mine, op, 0, &sizes)?;
                    let joined = world.all_gather(&part, 0, &sizes)?;
                    let root = world.reduce(&mine, op, world.size() - 1)?.unwrap_or_else(|| all.clone());
                    for tensor in [all, joined, root] {
                        results.push((dtype, tensor.to_dtype(DType::F64)?.to_vec1::<f64>()?));
                    }
                }
            }
        }
        Ok(results)
    };
    let settings = Settings::from_env().expect("good settings");
    let of_all = |settings: &Settings, counts: &'static [u32]| on_all(settings, move |world| program(world, counts));
    let (fast, exact) = (settings.clone().deterministic(false), settings.deterministic(true));
    let mut found = of_all(&fast, &[3, 1000, 300_000]);
    found.extend(of_all(&fast.segment(512).largest_count(70), &[3, 1000]));
    let mut expected = of_all(&exact, &[3, 1000, 300_000]);
    expected.extend(of_all(&exact, &[3, 1000]));
    assert_eq!(found.len(), expected.len());
    let rank_sums = launched().expect("started by a launcher").size as f64;
    for ((dtype, fast), (_, exact)) in found.iter().zip(&expected) {
        let tolerance = match dtype {
            DType::F64 => rank_sums * f64::EPSILON,
            DType::F32 => rank_sums * f64::from(f32::EPSILON),
            _ => 0.0,
        };
        for (a, b) in fast.iter().zip(exact) {
            assert!((a - b).abs() <= tolerance * b.abs(), "{dtype:?}: {a} and {b}");
        }
    }
}

/// Every pair of layouts on meshes of one and two axes, and random layouts on random meshes.
pub(crate) fn redistribution() {
    let processes = launched().expect("started by a launcher").size;
    let (cases, first) = (env_or("SHARDWISE_CROSS_MESH_CASES", 500usize), env_or("SHARDWISE_SEED", 0usize));
    let stride = env_or("SHARDWISE_PAIR_STRIDE", 1usize);
    let checked = on_all(&in_rank_order(), move |world| {
        let shapes = [[5, 3], [0, 4], [1, 7], [11, 2]];
        let mut checked = layout_pairs::all_pairs(&world, &[processes], &shapes, DType::F64, 1)?;
        checked += layout_pairs::all_pairs(&world, &[processes], &shapes[..2], DType::I64, 1)?;
        checked += layout_pairs::all_pairs(&world, &[processes], &shapes[..1], DType::BF16, 1)?;
        if processes == 4 {
            checked += layout_pairs::all_pairs(&world, &[2, 2], &shapes[..1], DType::F64, stride)?;
        }
        layout_pairs::any_layout_on_any_mesh(&world, first, cases)?;
        Ok(checked)
    });
    assert!(checked >= 64 * 7, "{checked}");
}

/// The losses, gradients and weights that PyTorch recorded: on a mesh of data and tensor parallelism, and where ranks have no key
/// head, with and without sequence parallelism.
pub(crate) fn recorded_training() {
    let directory = vectors::directory().join("train");
    let tensor_parallel = |sequence_parallel| ParallelismConfig {
        data_parallel: DataParallelMode::Replicate,
        tensor_parallel: true,
        sequence_parallel,
    };
    let (axes, sequence): (&str, &[bool]) = match launched().expect("started by a launcher").size {
        2 => ("tp=2", &[true]),
        3 => ("tp=3", &[false, true]),
        _ => ("dp=2,tp=2", &[false]),
    };
    for settings in [in_rank_order(), in_rank_order().deterministic(false)] {
        for &sequence in sequence {
            let (directory, mesh) = (directory.clone(), axes.parse::<Mesh>().expect("a mesh"));
            let followed = on_all(&settings, move |world| {
                recorded_training::follow_all(&world, &directory, &mesh, &tensor_parallel(sequence))
            });
            assert!(followed > 0);
        }
    }
}

/// One-sided reads: shards of a rank are read although it makes no call.
pub(crate) fn remote_shards() {
    on_all(&in_rank_order(), |world| remote_shards::run(&world, &scratch()));
}
