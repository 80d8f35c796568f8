//! The planner that searches plans: never worse than handwritten plans, within its memory limit, the same on every
//! rank, and its estimates match real steps.

mod transformer;

use shardwise::mesh::Link;
use shardwise::nn::{Activation, Builder, Forward, Mlp};
use shardwise::plan::{
    AutoPlanner, DataParallel, FullyShard, PlanSearch, ShardingPlan, ShardingPlanner, StepEstimate, TensorParallel,
    shard_module,
};
use shardwise::prelude::*;
use shardwise::{DryWorld, optim};
use transformer::Transformer;

/// One training step with a plan: the batch is sharded over dp.
fn step(plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<()> {
    let model = plan.build(mesh, |builder| Transformer::new(builder, 2))?;
    let settings = optim::ParamGroup::new(optim::AdamW::default());
    let mut optimizer = optim::ShardedOptimizer::new(shardwise::nn::Module::named_parameters(&model), settings)?;
    let (ids, targets) = transformer::batch(mesh, 16)?;
    optimizer.step(model.loss(&ids, &targets)?.backward()?)
}

/// The usual handwritten plan: column-wise, then row-wise layers; embedding and head sharded by vocabulary.
fn megatron() -> ShardingPlan {
    let column = || [("tp", Shard(0))];
    ShardingPlan::new()
        .param("tokens.weight", column())
        .output("tokens", [("tp", Replicate)])
        .param("layers.*.attention.query.weight", column())
        .param("layers.*.attention.key.weight", column())
        .param("layers.*.attention.value.weight", column())
        .param("layers.*.attention.output.weight", [("tp", Shard(1))])
        .output("layers.*.attention.output", [("tp", Replicate)])
        .param("layers.*.mlp.gate.weight", column())
        .param("layers.*.mlp.up.weight", column())
        .param("layers.*.mlp.down.weight", [("tp", Shard(1))])
        .output("layers.*.mlp.down", [("tp", Replicate)])
        .param("head.*", column())
}

/// Runs `body` with a mesh of two by four ranks whose axes have these links.
fn on_mesh<T: Send>(links: [Link; 2], body: impl FnOnce(&DeviceMesh) -> Result<T> + Send) -> Result<T> {
    let ran = DryWorld::new(8)?.run(|world| body(&world.mesh([("dp", 2), ("tp", 4)])?.with_links(&links)?));
    ran.map(|run| run.value)
}

fn search(mesh: &DeviceMesh, limit: usize, trials: usize) -> Result<PlanSearch> {
    let planner = AutoPlanner::new(step).memory_limit(limit).trials(trials);
    planner.search(&Transformer::new(&Builder::new(mesh), 2)?, mesh)
}

const SLOW: Link = Link { latency_us: 10.0, gb_per_s: 1.0 };

#[test]
fn the_searched_plan_is_never_worse_than_a_handwritten_one() {
    for links in [[Link::THREADS, Link::THREADS], [SLOW, Link::THREADS], [Link::THREADS, SLOW]] {
        on_mesh(links, |mesh| {
            let planner = AutoPlanner::new(step).trials(40);
            let model = Transformer::new(&Builder::new(mesh), 2)?;
            let found = planner.search(&model, mesh)?;
            let by_hand = planner.estimate(&megatron(), mesh)?;
            assert!(found.estimate.us() <= by_hand.us(), "{found}\nby hand {by_hand:?}");
            assert_eq!(planner.estimate(&found.plan, mesh)?, found.estimate);
            for plan in [
                DataParallel::new(["dp", "tp"]).plan(&model, mesh)?,
                FullyShard::new(["dp", "tp"]).plan(&model, mesh)?,
                TensorParallel::new("tp").plan(&model, mesh)?,
                TensorParallel::new("tp").sequence_parallel(1).plan(&model, mesh)?,
                TensorParallel::new("tp").and(FullyShard::new(["dp"])).plan(&model, mesh)?,
            ] {
                let other = planner.estimate(&plan, mesh)?;
                assert!(found.estimate.us() <= other.us(), "{found}\n{other:?}\n{plan}");
            }
            // replicated work is not free: sharded over four ranks, a step computes less
            let whole = planner.estimate(&ShardingPlan::new(), mesh)?;
            assert!(by_hand.compute_us < 0.5 * whole.compute_us, "{by_hand:?} {whole:?}");
            assert!(found.estimate.us() < whole.us());
            // sorted, and every line says what it is
            assert!(found.trials.windows(2).all(|two| two[0].estimate.us() <= two[1].estimate.us()));
            assert_eq!(found.to_string().lines().count(), found.trials.len() + 1);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn the_memory_limit_is_respected_or_the_minimum_is_reported() {
    on_mesh([Link::THREADS, Link::THREADS], |mesh| {
        let free = search(mesh, usize::MAX, 30)?;
        let peaks: Vec<usize> = free.trials.iter().map(|trial| trial.estimate.peak_bytes).collect();
        let (least, most) = (*peaks.iter().min().expect("some"), *peaks.iter().max().expect("some"));
        assert!(least * 2 < most, "{least} {most}");
        let mut last: Option<StepEstimate> = None;
        for limit in [most, free.estimate.peak_bytes - 1, (least + free.estimate.peak_bytes) / 2, least] {
            let found = search(mesh, limit, 30)?;
            assert!(found.estimate.peak_bytes <= limit, "{found}");
            // less memory is never faster
            assert!(last.is_none_or(|last| last.us() <= found.estimate.us() + 1e-9), "{found}");
            last = Some(found.estimate);
        }
        assert!(last.is_some_and(|last| last.us() > free.estimate.us()));
        let message = search(mesh, 1000, 10).unwrap_err().to_string();
        assert!(
            ["memory limit", "1000 bytes at most", "bytes per rank at least"].iter().all(|p| message.contains(p)),
            "{message}"
        );
        let named = message.split_whitespace().filter_map(|word| word.parse::<usize>().ok()).max().expect("a number");
        assert!(named <= least, "{message}, but {least} is possible");
        Ok(())
    })
    .unwrap();
}

#[test]
fn estimates_match_a_real_step() {
    let plan = on_mesh([Link::THREADS, Link::THREADS], |mesh| search(mesh, usize::MAX, 10)).unwrap();
    let chosen = plan.plan.clone();
    let real = ThreadWorld::new(8).unwrap().run(move |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 4)])?;
        step(&chosen, &mesh)?;
        let (records, peak) = (world.trace().records().len(), world.memory().peak());
        // and the loss is that of one rank
        let model = chosen.build(&mesh, |builder| Transformer::new(&builder.clone().dtype(DType::F64), 2))?;
        let (ids, targets) = transformer::batch(&mesh, 16)?;
        let loss = model.loss(&ids, &targets)?.item::<f64>()?;
        let alone = world.device_mesh(Mesh::from_ranks([("dp", 1), ("tp", 1)], vec![world.rank()])?)?;
        alone.manual_seed(0);
        // the second model that is drawn from the generator
        Transformer::new(&Builder::new(&alone), 2)?;
        let one = Transformer::new(&Builder::new(&alone).dtype(DType::F64), 2)?;
        let (ids, targets) = transformer::batch(&alone, 16)?;
        Ok((peak, records, (loss - one.loss(&ids, &targets)?.item::<f64>()?).abs()))
    });
    let real = real.unwrap();
    assert_eq!(real[0].1, plan.estimate.collectives);
    assert_eq!(real[0].0, plan.estimate.peak_bytes);
    assert!(real.iter().all(|(_, _, apart)| *apart < 1e-9), "{real:?}");
}

#[test]
fn all_ranks_find_the_same_plan_and_links_affect_it() {
    let program = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let make = |builder: &Builder| Mlp::new(builder, 16, 64, Activation::Gelu);
        let step = move |plan: &ShardingPlan, mesh: &DeviceMesh| {
            let x = DTensor::zeros((32, 16), DType::F32, mesh, [Shard(0), Replicate])?;
            plan.build(mesh, make)?.forward(&x)?.square()?.sum_all()?.backward()?.in_param_layout().map(drop)
        };
        let mlp = make(&Builder::new(&mesh))?;
        let planner = AutoPlanner::new(step).trials(20);
        // run by all ranks together, which would fail with different plans
        shard_module(&mlp, &mesh, &planner.plan(&mlp, &mesh)?)?;
        let tensor = TensorParallel::new("tp").plan(&mlp, &mesh)?;
        let along =
            |links: [Link; 2]| Ok::<_, Error>(planner.estimate(&tensor, &mesh.with_links(&links)?)?.communication_us);
        let (fast, slow) = (along([Link::THREADS, Link::THREADS])?, along([Link::THREADS, SLOW])?);
        assert!(slow > 5.0 * fast, "{slow} {fast}");
        let (other, both) = (along([SLOW, Link::THREADS])?, along([SLOW, SLOW])?);
        assert!(other > fast && other != slow && both > other.max(slow), "{other} {both}");
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(program).unwrap();
}

#[test]
fn candidates_steps_and_rates_are_validated() {
    on_mesh([Link::THREADS, Link::THREADS], |mesh| {
        let model = Mlp::new(&Builder::new(mesh), 8, 8, Activation::Relu)?;
        let small = |plan: &ShardingPlan, mesh: &DeviceMesh| {
            let mlp = plan.build(mesh, |builder| Mlp::new(builder, 8, 8, Activation::Relu))?;
            mlp.forward(&DTensor::zeros((4, 8), DType::F32, mesh, [Shard(0), Replicate])?).map(drop)
        };
        // a candidate plan is tried, and named
        let own = ShardingPlan::new().param("up.bias", [("tp", Shard(0))]);
        let found = AutoPlanner::new(small).trials(0).candidate("by hand", own).search(&model, mesh)?;
        assert!(found.trials.iter().any(|trial| trial.name == "by hand"), "{found}");
        // without trials all uniform plans remain: three ways on each of two axes, five of them with sequences
        assert_eq!(found.trials.len(), 1 + 9 + 5, "{found}");
        // a plan that cannot run is left out, and the error of the step is returned if none can
        let wrong = ShardingPlan::new().param("nothing", [("tp", Shard(0))]);
        let found = AutoPlanner::new(small).trials(0).candidate("wrong", wrong).search(&model, mesh)?;
        assert!(found.trials.iter().all(|trial| trial.name != "wrong"));
        let never = |_: &ShardingPlan, _: &DeviceMesh| -> Result<()> { Err(Error::other("no batch")) };
        assert!(AutoPlanner::new(never).search(&model, mesh).unwrap_err().to_string().contains("no batch"));
        let message = AutoPlanner::new(small).flops_per_s(0.0).search(&model, mesh).unwrap_err().to_string();
        assert!(message.contains("elementary operations"), "{message}");
        // as a planner it adds to a plan
        let base = ShardingPlan::new().output("", [("tp", Replicate)]);
        let extended = AutoPlanner::new(small).trials(0).extend(base, &model, mesh)?;
        assert!(extended.to_string().contains("`up.weight`") && extended.to_string().contains("``"), "{extended}");
        Ok(())
    })
    .unwrap();
}
