//! Redistributions: prices, memory, planning, and communication that operators make by themselves.

use std::time::{Duration, Instant};

use shardwise::prelude::*;
use shardwise::redistribute::explain;
use shardwise::{DryWorld, ExplicitRedistribution};

use super::{all_elements, calls, counted, counting, elements, square};

pub(super) fn redistribution_costs(world: &World) -> Result<String> {
    // The layouts of the thread, on 16 ranks without data.
    let thread = DryWorld::new(16)?.run(|world| {
        let mesh = world.mesh([("a", 2), ("b", 2), ("c", 2), ("d", 2)])?;
        let layout = |placements: [Placement; 4]| Layout::new(mesh.mesh(), (64, 64), placements);
        let source = layout([Replicate, Shard(0), Replicate, Replicate])?;
        let between = layout([Shard(1), Shard(0), Shard(1), Shard(1)])?;
        let target = layout([Shard(1), Replicate, Shard(1), Shard(1)])?;
        let price = |from: &Layout, to: &Layout| -> Result<(usize, f64)> {
            let plan = explain(&mesh, from, to, DType::F32)?.chosen;
            Ok((plan.bytes(), plan.us()))
        };
        Ok((price(&source, &target)?, price(&source, &between)?, price(&between, &target)?))
    })?;
    let (direct, first, second) = thread.value;
    assert!(direct.0 <= first.0 + second.0 && direct.1 <= first.1 + second.1 + 1e-9, "{:?}", thread.value);
    // All layouts of a matrix on 2 x 2 ranks; large, because a small one may take a few more messages to move half of the bytes.
    let mesh = square(world)?;
    let kinds = [Replicate, Shard(0), Shard(1)];
    let layouts =
        kinds.iter().flat_map(|a| kinds.iter().map(|b| Layout::new(mesh.mesh(), (4096, 4096), [a.clone(), b.clone()])));
    let layouts: Vec<Layout> = layouts.collect::<Result<_>>()?;
    let price = |from: &Layout, to: &Layout| Ok(explain(&mesh, from, to, DType::F32)?.chosen.us());
    let prices: Vec<Vec<f64>> =
        layouts.iter().map(|from| layouts.iter().map(|to| price(from, to)).collect()).collect::<Result<_>>()?;
    let ends = 0..layouts.len();
    for (from, to) in ends.clone().flat_map(|from| ends.clone().map(move |to| (from, to))) {
        let best =
            ends.clone().map(|between| prices[from][between] + prices[between][to]).fold(f64::INFINITY, f64::min);
        assert!(prices[from][to] <= best + 1e-9, "{} to {}", layouts[from], layouts[to]);
    }
    Ok("no way over a layout between is cheaper: the layouts of the thread, and all 729 triples for a 4096 x 4096 matrix on 2 x 2 ranks".into())
}

pub(super) fn redistribution_memory(world: &World) -> Result<String> {
    let (mesh, n) = (square(world)?, 512);
    let x = counting(&mesh, &[n, n], [Shard(0), Shard(1)])?;
    let shard = elements(&x.to_local()?)?.len();
    world.trace().clear();
    let y = x.redistribute([Shard(1), Shard(0)])?;
    assert!(!calls(world).contains(&"all_gather"), "{:?}", calls(world));
    let plan = explain(&mesh, x.layout(), y.layout(), DType::F64)?.chosen;
    let volume = |layout: &Layout| layout.local_shape(world.rank()).iter().product::<usize>();
    assert!(plan.steps().iter().all(|step| volume(&step.after) <= shard), "{plan}");
    assert_eq!(all_elements(&y)?, counted(n * n));
    let steps = plan.steps().len();
    Ok(format!("exact, in {steps} exchange; no tensor between is larger than a shard"))
}

pub(super) fn planning_time(_: &World) -> Result<String> {
    const LIMIT: Duration = Duration::from_secs(1);
    for axes in 2..8_u32 {
        let planned = DryWorld::new(256)?.run(|world| {
            let mut sizes = vec![2; axes as usize];
            sizes.push(256 >> axes);
            let mesh = world.mesh(sizes)?;
            let mut target = vec![Shard(1); axes as usize];
            target.push(Replicate);
            let from = Layout::new(mesh.mesh(), (512, 512), vec![Shard(0); target.len()])?;
            let to = Layout::new(mesh.mesh(), (512, 512), target)?;
            let since = Instant::now();
            explain(&mesh, &from, &to, DType::F32)?;
            Ok(since.elapsed())
        })?;
        assert!(planned.value < LIMIT, "{:?} for {} axes", planned.value, axes + 1);
    }
    Ok("less than a second for each of 3 to 8 axes of 256 ranks".into())
}

pub(super) fn hidden_gathers(world: &World) -> Result<String> {
    let mesh = square(world)?;
    let x = counting(&mesh, &[2, 2, 3], [Shard(0), Shard(1)])?;
    let w = DTensor::ones((3, 1), DType::F64, &mesh, [Replicate, Replicate])?;
    world.trace().clear();
    let y = ExplicitRedistribution::error().run(|| x.matmul(&w))?;
    assert_eq!(calls(world), [""; 0]);
    assert_eq!(all_elements(&y)?, [3.0, 12.0, 21.0, 30.0]);
    // What does need communication is an error in the scope, with operator and layouts, on all ranks.
    let columns = DTensor::ones((3, 4), DType::F64, &mesh, [Shard(0), Replicate])?;
    let error = ExplicitRedistribution::error().run(|| x.matmul(&columns)?.exp()).unwrap_err().to_string();
    assert!(error.contains("operator ") && error.contains("on dp=2,tp=2"), "{error}");
    Ok("the product communicates nothing; in a scope, what would communicate is an error with operator and layouts"
        .into())
}
