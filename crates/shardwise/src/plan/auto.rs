//! `AutoPlanner`: runs candidate plans without data and takes the cheapest that fits into memory.

use std::fmt;

use super::estimate::{StepEstimate, estimate};
use super::planner::ShardingPlanner;
use super::search_space::{SearchSpace, StrategyChoice};
use super::sharding_plan::ShardingPlan;
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result};
use crate::nn::Module;
use crate::picture::bytes_text;

/// Elementary operations per second of a rank unless set otherwise: about one core of a server in f32 matrix products.
pub(crate) const DEFAULT_FLOPS_PER_S: f64 = 20e9;

/// Default of [`AutoPlanner::trials`]: on two axes a transformer has about 30 neighbours per choice, so this allows a few
/// rounds of improvement.
const DEFAULT_TRIALS: usize = 150;

/// Searches for the plan under which a training step takes the least time, among plans that fit into the memory of a rank.
///
/// The step is a closure of the program: it builds the model by the plan that it is given ([`ShardingPlan::build`]) and runs
/// what a training step runs. It is executed once per candidate in a dry run of the size of the mesh's world, without data.
/// The time of collectives is estimated by the links of the mesh, that of operators by a rate of operations.
///
/// The first candidates use every mesh axis in one way for the whole model: replicated (data parallelism), fully sharded
/// ([`FullyShard`](super::FullyShard)) or tensor parallel ([`TensorParallel`](super::TensorParallel)), the latter with and
/// without sequence parallelism. Starting from the best of them, the search changes the strategy of one class of layers
/// along one axis at a time, as long as that helps. The result is never worse than any of the first candidates, or than a
/// plan added by [`candidate`](Self::candidate).
///
/// Local: ranks that search for the same module, mesh and step find the same plan.
///
/// ```
/// use shardwise::DryWorld;
/// use shardwise::nn::{Activation, Builder, Forward, Mlp};
/// use shardwise::plan::{AutoPlanner, ShardingPlan};
/// use shardwise::prelude::*;
///
/// let mlp = |builder: &Builder| Mlp::new(builder, 256, 1024, Activation::Gelu);
/// let step = move |plan: &ShardingPlan, mesh: &DeviceMesh| {
///     let model = plan.build(mesh, mlp)?;
///     let x = DTensor::zeros((512, 256), DType::F32, mesh, [Replicate])?;
///     model.forward(&x)?.square()?.sum_all()?.backward()?.in_param_layout()?;
///     Ok(())
/// };
/// let search = DryWorld::new(4)?.run(|world| {
///     let mesh = world.mesh([("tp", 4)])?;
///     AutoPlanner::new(step).search(&mlp(&Builder::new(&mesh))?, &mesh)
/// })?.value;
/// // the batch is replicated, so that sharding the layers is what saves time
/// assert!(search.plan.to_string().contains("tp: S(1)"), "{search}");
/// # Ok::<(), Error>(())
/// ```
pub struct AutoPlanner<F> {
    step: F,
    memory_limit: usize,
    flops_per_s: f64,
    trials: usize,
    candidates: Vec<(String, ShardingPlan)>,
}

impl<F: Fn(&ShardingPlan, &DeviceMesh) -> Result<()> + Sync> AutoPlanner<F> {
    /// A planner for a step, with no memory limit, 20e9 operations per second and 150 trials.
    pub fn new(step: F) -> Self {
        AutoPlanner {
            step,
            memory_limit: usize::MAX,
            flops_per_s: DEFAULT_FLOPS_PER_S,
            trials: DEFAULT_TRIALS,
            candidates: Vec::new(),
        }
    }

    /// Sets the most bytes that a rank may need.
    pub fn memory_limit(mut self, bytes: usize) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// Sets how many elementary operations a rank does in a second.
    pub fn flops_per_s(mut self, rate: f64) -> Self {
        self.flops_per_s = rate;
        self
    }

    /// Sets how many plans are tried beyond the uniform ones, which are always tried.
    pub fn trials(mut self, count: usize) -> Self {
        self.trials = count;
        self
    }

    /// Adds a plan to the candidates, under a name.
    pub fn candidate(mut self, name: &str, plan: ShardingPlan) -> Self {
        self.candidates.push((name.to_string(), plan));
        self
    }

    /// Estimates time and memory of the step under a plan.
    pub fn estimate(&self, plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<StepEstimate> {
        estimate(&self.step, plan, mesh, self.flops_per_s)
    }

    /// Returns the best plan and all that were tried.
    ///
    /// # Errors
    /// [`Error::Invalid`] if no plan fits into the memory limit, or the rate of operations is not positive; the error of the
    /// step if it fails under every plan.
    pub fn search(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<PlanSearch> {
        self.search_on(&ShardingPlan::new(), module, mesh)
    }

    /// As [`search`](Self::search), with plans that all contain `base`.
    fn search_on(&self, base: &ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<PlanSearch> {
        if !(self.flops_per_s.is_finite() && self.flops_per_s > 0.0) {
            let found = format!("{} elementary operations per second", self.flops_per_s);
            return Err(ErrorKind::Plan.error(
                "planner",
                found,
                "a finite number above 0",
                "set `flops_per_s` to the speed of a rank",
            ));
        }
        let space = SearchSpace::new(base, module, mesh);
        let mut run = SearchRun { planner: self, mesh, trials: Vec::new(), last_error: None };
        for (name, plan) in &self.candidates {
            run.add(name.clone(), plan.clone(), None);
        }
        let uniform = space.uniform();
        for choice in &uniform {
            run.add(space.name(choice), space.plan(choice)?, Some(choice.clone()));
        }
        let mut left = self.trials;
        'better: while let Some(choice) = run.best_choice() {
            for next in space.neighbours(&choice) {
                if run.has(&next) {
                    continue;
                }
                if left == 0 {
                    break 'better;
                }
                left -= 1;
                run.add(space.name(&next), space.plan(&next)?, Some(next));
            }
            if run.best_choice() == Some(choice) {
                break;
            }
        }
        run.result(self.memory_limit)
    }
}

impl<F: Fn(&ShardingPlan, &DeviceMesh) -> Result<()> + Sync> ShardingPlanner for AutoPlanner<F> {
    /// Searches among plans that contain `plan`; candidates added by [`AutoPlanner::candidate`] are tried as they are.
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        Ok(self.search_on(&plan, module, mesh)?.plan)
    }
}

/// The result of [`AutoPlanner::search`]; prints as a table of the plans that were tried, cheapest first.
#[derive(Debug, Clone)]
pub struct PlanSearch {
    /// The best plan.
    pub plan: ShardingPlan,
    /// Time and memory of a step under the best plan.
    pub estimate: StepEstimate,
    /// All plans that were tried: plans that fit into memory first, cheapest first.
    pub trials: Vec<PlanTrial>,
    memory_limit: usize,
}

/// A plan that was tried in a search.
#[derive(Debug, Clone)]
pub struct PlanTrial {
    /// What the classes of layers do along the mesh axes, such as `Mlp dp:fsdp tp:tensor; sequence`.
    pub name: String,
    /// The plan itself.
    pub plan: ShardingPlan,
    /// Time and memory of a step under the plan.
    pub estimate: StepEstimate,
}

impl fmt::Display for PlanSearch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["us/step", "compute", "communicate", "collectives", "peak"];
        writeln!(f, "{:>10} {:>10} {:>12} {:>12} {:>10}  plan", head[0], head[1], head[2], head[3], head[4])?;
        for PlanTrial { name, estimate: e, .. } in &self.trials {
            let (us, peak) = (e.us(), bytes_text(e.peak_bytes));
            write!(f, "{us:>10.1} {:>10.1} {:>12.1} ", e.compute_us, e.communication_us)?;
            let note = if e.peak_bytes > self.memory_limit { " (too large)" } else { "" };
            writeln!(f, "{:>12} {peak:>10}  {name}{note}", e.collectives)?;
        }
        Ok(())
    }
}

/// A search in progress.
struct SearchRun<'a, F> {
    planner: &'a AutoPlanner<F>,
    mesh: &'a DeviceMesh,
    trials: Vec<(Option<StrategyChoice>, PlanTrial)>,
    /// Error of the last plan under which the step failed.
    last_error: Option<Error>,
}

impl<F: Fn(&ShardingPlan, &DeviceMesh) -> Result<()> + Sync> SearchRun<'_, F> {
    fn add(&mut self, name: String, plan: ShardingPlan, choice: Option<StrategyChoice>) {
        match self.planner.estimate(&plan, self.mesh) {
            Ok(estimate) => self.trials.push((choice, PlanTrial { name, plan, estimate })),
            // The step may be impossible under some plans; the search goes on with the remaining ones.
            Err(error) => self.last_error = Some(error),
        }
    }

    fn has(&self, choice: &StrategyChoice) -> bool {
        self.trials.iter().any(|(own, _)| own.as_ref() == Some(choice))
    }

    /// Sort key: plans that fit into memory by time, then the remaining ones by memory.
    fn order(&self, trial: &PlanTrial) -> (bool, f64) {
        let too_large = trial.estimate.peak_bytes > self.planner.memory_limit;
        (too_large, if too_large { trial.estimate.peak_bytes as f64 } else { trial.estimate.us() })
    }

    fn compare(&self, a: &PlanTrial, b: &PlanTrial) -> std::cmp::Ordering {
        let (a, b) = (self.order(a), self.order(b));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    }

    fn best_choice(&self) -> Option<StrategyChoice> {
        let chosen = self.trials.iter().filter(|(choice, _)| choice.is_some());
        chosen.min_by(|a, b| self.compare(&a.1, &b.1)).and_then(|(choice, _)| choice.clone())
    }

    fn result(self, memory_limit: usize) -> Result<PlanSearch> {
        let mut trials: Vec<PlanTrial> = self.trials.iter().map(|(_, trial)| trial.clone()).collect();
        trials.sort_by(|a, b| self.compare(a, b));
        let Some(best) = trials.first() else {
            let none =
                ErrorKind::Plan.error("planner", "no plan", "a step that runs under some plan", "correct the step");
            return Err(self.last_error.unwrap_or(none));
        };
        if best.estimate.peak_bytes > memory_limit {
            let found = format!("{} bytes per rank at least, under {}", best.estimate.peak_bytes, best.name);
            let fix = "raise the limit, use more ranks or a smaller batch, or checkpoint activations";
            return Err(ErrorKind::Plan.error("memory limit", found, format!("{memory_limit} bytes at most"), fix));
        }
        Ok(PlanSearch { plan: best.plan.clone(), estimate: best.estimate, trials, memory_limit })
    }
}
