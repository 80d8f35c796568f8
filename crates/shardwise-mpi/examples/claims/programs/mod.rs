//! The table of claims, and what their programs share.
//!
//! A program runs on four ranks, computes the answer of one device in itself and panics where it gets another one. It returns
//! what it saw, in words that are the same in every run.

mod failures;
mod gradients;
mod layouts;
mod models;
mod moves;
mod randomness;
mod states;

use shardwise::candle_core::Tensor;
use shardwise::prelude::*;

/// The ranks that every program runs on.
pub(crate) const RANKS: usize = 4;

/// A program for what goes wrong in public threads.
pub(crate) struct Claim {
    /// The name on the command line, and of PyTorch's case in `scripts/claims_in_pytorch.py`.
    pub(crate) name: &'static str,
    /// Threads as owner/repository#number; none if no one has reported it as far as was looked.
    pub(crate) threads: &'static [&'static str],
    /// What the threads report.
    pub(crate) wrong: &'static str,
    /// The file of the program, below this directory.
    pub(crate) file: &'static str,
    /// Returns what it saw.
    pub(crate) run: fn(&World) -> Result<String>,
}

// Above a claim: the change of the library with which it was seen to fail. Two have no comment: none was tried for them.
#[rustfmt::skip]
pub(crate) const CLAIMS: &[Claim] = &[
    // Fails if an all-gather over two axes has the sizes of the shards in another order.
    Claim {
        name: "nested_shards",
        threads: &["pytorch/pytorch#194457"],
        wrong: "uneven rows that two mesh axes shard lose rows when they are gathered",
        file: "layouts.rs",
        run: layouts::nested_shards,
    },
    // Fails if views keep the placements of their input.
    Claim {
        name: "view_of_columns",
        threads: &["pytorch/pytorch#179502"],
        wrong: "a view that needs communication is taken without it and has wrong elements",
        file: "layouts.rs",
        run: layouts::view_of_columns,
    },
    // Fails if an all-gather over two axes has the sizes of the shards in another order.
    Claim {
        name: "view_over_two_axes",
        threads: &["pytorch/pytorch#186282"],
        wrong: "a dimension that two mesh axes shard cannot be flattened and unflattened, or has wrong gradients",
        file: "layouts.rs",
        run: layouts::view_over_two_axes,
    },
    // Fails if `from_local` assumes chunks.
    Claim {
        name: "uneven_from_local",
        threads: &["pytorch/pytorch#144109"],
        wrong: "uneven shards in other sizes than those of chunks are accepted and gathered into wrong elements",
        file: "layouts.rs",
        run: layouts::uneven_from_local,
    },
    // Fails if an empty shard begins at 0.
    Claim {
        name: "offsets",
        threads: &["pytorch/pytorch#161368"],
        wrong: "offsets of uneven shards over two mesh axes are wrong",
        file: "layouts.rs",
        run: layouts::offsets,
    },
    // Fails if the last chunk is left out.
    Claim {
        name: "strided_shards",
        threads: &["pytorch/pytorch#168134"],
        wrong: "uneven strided shards have gaps",
        file: "layouts.rs",
        run: layouts::strided_shards,
    },
    // Fails if the last chunk is left out.
    Claim {
        name: "nested_strided_shards",
        threads: &[],
        wrong: "uneven strided shards that another mesh axis shards again cannot be gathered",
        file: "layouts.rs",
        run: layouts::nested_strided_shards,
    },
    // Fails if dropout on several ranks draws once more.
    Claim {
        name: "random_numbers",
        threads: &["pytorch/pytorch#168058"],
        wrong: "random numbers depend on the layout and on the number of ranks",
        file: "randomness.rs",
        run: randomness::random_numbers,
    },
    // Fails if dropout on several ranks draws once more.
    Claim {
        name: "training_loss",
        threads: &["pytorch/pytorch#168058"],
        wrong: "losses depend on the layout, through initial weights and dropout",
        file: "randomness.rs",
        run: randomness::training_loss,
    },
    // Fails if `from_local` gives the gradient of a partial sum as a partial sum.
    Claim {
        name: "partial_gradients",
        threads: &["pytorch/pytorch#172932"],
        wrong: "a partial sum through to_local and from_local has another gradient than without them",
        file: "gradients.rs",
        run: gradients::partial_gradients,
    },
    // Fails if a number is added to partial sums where they are.
    Claim {
        name: "partial_sums",
        threads: &["pytorch/pytorch#163193", "pytorch/pytorch#147180", "pytorch/torchtitan#2106"],
        wrong: "partial sums plus numbers or replicated tensors, and their gradients, count these once per rank",
        file: "gradients.rs",
        run: gradients::partial_sums,
    },
    // Fails if `reduce_dtype` is ignored.
    Claim {
        name: "reduction_type",
        threads: &["pytorch/pytorch#190626"],
        wrong: "gradients of weights that tensor-parallel ranks replicate are reduced in bf16 in spite of reduce_dtype",
        file: "gradients.rs",
        run: gradients::reduction_type,
    },
    // Fails if `accumulate` leaves out parameters that are new.
    Claim {
        name: "mixed_accumulation",
        threads: &["pytorch/pytorch#196996"],
        wrong: "a parameter first used in the last micro-batch ends accumulation in mixed precision with an assertion",
        file: "gradients.rs",
        run: gradients::mixed_accumulation,
    },
    // Fails if `FullyShard::on_dim` is ignored.
    Claim {
        name: "other_dimensions",
        threads: &["pytorch/pytorch#136221"],
        wrong: "fully sharded parameters may be sharded on another dimension than 0 only if it divides evenly",
        file: "gradients.rs",
        run: gradients::other_dimensions,
    },
    // Fails if every replica counts in the norm.
    Claim {
        name: "clipping",
        threads: &["pytorch/pytorch#180346"],
        wrong: "gradients on different meshes cannot be clipped together",
        file: "gradients.rs",
        run: gradients::clipping,
    },
    // Fails if weights are never kept gathered.
    Claim {
        name: "head_gathers",
        threads: &["huggingface/trl#5575", "huggingface/trl#6076"],
        wrong: "a chunked loss gathers the weight of the head once per chunk",
        file: "gradients.rs",
        run: gradients::head_gathers,
    },
    // Fails if the most expensive plan is chosen.
    Claim {
        name: "redistribution_costs",
        threads: &["pytorch/pytorch#169439"],
        wrong: "a redistribution is priced higher than over a layout between",
        file: "moves.rs",
        run: moves::redistribution_costs,
    },
    // Fails if the most expensive plan is chosen.
    Claim {
        name: "redistribution_memory",
        threads: &["pytorch/pytorch#165712"],
        wrong: "a redistribution between shards gathers, and needs the memory of the gathered tensor",
        file: "moves.rs",
        run: moves::redistribution_memory,
    },
    Claim {
        name: "planning_time",
        threads: &["pytorch/pytorch#166747"],
        wrong: "the planner of least cost takes a time exponential in the number of mesh axes",
        file: "moves.rs",
        run: moves::planning_time,
    },
    // Fails if the scope allows everything.
    Claim {
        name: "hidden_gathers",
        threads: &["pytorch/pytorch#167106", "pytorch/pytorch#173625"],
        wrong: "a batched product gathers although every rank has what it needs; communication is not seen",
        file: "moves.rs",
        run: moves::hidden_gathers,
    },
    Claim {
        name: "readable_errors",
        threads: &["pytorch/pytorch#164543"],
        wrong: "errors of operators are hard to read",
        file: "failures.rs",
        run: failures::readable_errors,
    },
    // Fails if ranks do not compare their calls.
    Claim {
        name: "different_sizes",
        threads: &["pytorch/pytorch#174844", "pytorch/pytorch#140563"],
        wrong: "after a collective with other sizes on one rank, later collectives hang or are wrong",
        file: "failures.rs",
        run: failures::different_sizes,
    },
    // Fails if ranks do not compare their calls.
    Claim {
        name: "different_calls",
        threads: &["pytorch/pytorch#22071"],
        wrong: "ranks that make different calls hang",
        file: "failures.rs",
        run: failures::different_calls,
    },
    // Fails if heads are split as other features.
    Claim {
        name: "nine_heads",
        threads: &["vllm-project/vllm#596"],
        wrong: "the number of heads must be a multiple of the number of tensor-parallel ranks",
        file: "models.rs",
        run: models::nine_heads,
    },
    // Fails if the momentum is not gathered.
    Claim {
        name: "muon",
        threads: &["pytorch/torchtitan#3353"],
        wrong: "Muon needs full matrices, which sharded layouts do not have",
        file: "models.rs",
        run: models::muon,
    },
    // Fails if experts are not sharded.
    Claim {
        name: "experts",
        threads: &["huggingface/transformers#48308"],
        wrong: "tensor parallelism silently replicates the weights of experts",
        file: "models.rs",
        run: models::experts,
    },
    // Fails if other ranks return an empty state.
    Claim {
        name: "full_state",
        threads: &["pytorch/pytorch#183037"],
        wrong: "a full state dict goes to all ranks or to rank 0, not to a chosen one",
        file: "states.rs",
        run: states::full_state,
    },
    // Fails if `gather` converts to f32 and back.
    Claim {
        name: "gathered_types",
        threads: &["pytorch/pytorch#110561"],
        wrong: "ShardedTensor.gather does not keep the element type",
        file: "states.rs",
        run: states::gathered_types,
    },
    // Fails if `load_state_dict` does nothing.
    Claim {
        name: "sharded_optimizer_state",
        threads: &["pytorch/pytorch#68608"],
        wrong: "the state of a ShardedOptimizer cannot be read",
        file: "states.rs",
        run: states::sharded_optimizer_state,
    },
];

/// All ranks on one axis.
fn line(world: &World) -> Result<DeviceMesh> {
    world.mesh([("tp", RANKS)])
}

fn square(world: &World) -> Result<DeviceMesh> {
    world.mesh([("dp", 2), ("tp", 2)])
}

/// A mesh of this rank only: one device.
fn alone(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)
}

/// The numbers 0, 1, 2, ... in row-major order.
fn counting(mesh: &DeviceMesh, shape: &[usize], placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
    let flat = |index: &[usize]| index.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i) as f64;
    DTensor::from_fn(shape, DType::F64, mesh, placements, flat)
}

/// What `counting` has on one device.
fn counted(n: usize) -> Vec<f64> {
    (0..n).map(|i| i as f64).collect()
}

/// The elements of a tensor of one process.
fn elements(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// All elements of a tensor. Collective.
fn all_elements(tensor: &DTensor) -> Result<Vec<f64>> {
    elements(&tensor.detach().full_tensor()?)
}

/// The collectives of this rank since its trace was cleared.
fn calls(world: &World) -> Vec<&'static str> {
    world.trace().records().iter().map(|record| record.call).filter(|call| *call != "agree").collect()
}

/// The largest difference between elements.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}
