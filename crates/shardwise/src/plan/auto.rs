//! A planner that tries plans: each is run without data, and the cheapest that fits into memory is taken.

use std::fmt;

use super::apply::Found;
use super::estimate::{Estimate, estimate};
use super::planner::{FullyShard, ShardingPlanner};
use super::sharding_plan::ShardingPlan;
use super::transformer::{Block, Cuts, Linear, Structure, TableCut};
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result};
use crate::nn::{Module, join};
use crate::placement::Placement;

/// Finds the plan under which a step takes the least time, among those that fit into the memory of a rank.
///
/// The step is the program's own: it builds the model by the plan that it is given ([`ShardingPlan::build`]), and does what
/// a step of training does. It runs in a dry world of the size of the mesh's, once per plan. Time is estimated: that of
/// collectives by the links of the mesh, that of operators by a rate of elementary operations.
///
/// Tried are first the plans that use every axis in one way for the whole model: whole (data parallelism), in pieces
/// ([`FullyShard`]) or by tensor parallelism ([`TensorParallel`](super::TensorParallel)), the latter also with cut sequences.
/// From the best of them on, parts of the model that look alike change their ways one after the other, as long as that
/// helps. The result is never worse than one of the first, nor than a plan added by [`candidate`](Self::candidate).
///
/// ```
/// use shardwise::DryWorld;
/// use shardwise::nn::{Activation, Builder, Forward, Mlp};
/// use shardwise::plan::{AutoPlanner, ShardingPlan};
/// use shardwise::prelude::*;
///
/// let make = |at: &Builder| Mlp::new(at, 256, 1024, Activation::Gelu);
/// let step = move |plan: &ShardingPlan, mesh: &DeviceMesh| {
///     let mlp = plan.build(mesh, make)?;
///     let x = DTensor::zeros((512, 256), DType::F32, mesh, [Replicate])?;
///     mlp.forward(&x)?.square()?.sum_all()?.backward()?.in_param_layout()?;
///     Ok(())
/// };
/// let search = DryWorld::new(4)?.run(|world| {
///     let mesh = world.mesh([("tp", 4)])?;
///     AutoPlanner::new(step).search(&make(&Builder::new(&mesh))?, &mesh)
/// })?.value;
/// // a batch that is not shared: the layers share their work
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
    /// For a step, with no limit of memory, ranks of 20 * 10^9 elementary operations per second and 150 trials.
    pub fn new(step: F) -> Self {
        AutoPlanner { step, memory_limit: usize::MAX, flops_per_s: 20e9, trials: 150, candidates: Vec::new() }
    }

    /// No rank may need more bytes.
    pub fn memory_limit(mut self, bytes: usize) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// How many elementary operations a rank does in a second.
    pub fn flops_per_s(mut self, rate: f64) -> Self {
        self.flops_per_s = rate;
        self
    }

    /// How many plans are tried at most, beyond those that are always tried.
    pub fn trials(mut self, count: usize) -> Self {
        self.trials = count;
        self
    }

    /// Tries a plan of one's own too.
    pub fn candidate(mut self, name: &str, plan: ShardingPlan) -> Self {
        self.candidates.push((name.to_string(), plan));
        self
    }

    /// What the step takes under a plan.
    pub fn estimate(&self, plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<Estimate> {
        estimate(&self.step, plan, mesh, self.flops_per_s)
    }

    /// The best plan, and all that were tried. The result depends on the module, the mesh and the step alone: every rank
    /// finds the same.
    pub fn search(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<Search> {
        self.search_on(&ShardingPlan::new(), module, mesh)
    }

    /// As [`search`](Self::search), with plans that all contain another one.
    fn search_on(&self, base: &ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<Search> {
        if !(self.flops_per_s.is_finite() && self.flops_per_s > 0.0) {
            let found = format!("{} elementary operations per second", self.flops_per_s);
            return Err(ErrorKind::Plan.error("planner", found, "a finite number above 0", "say how fast a rank is"));
        }
        let space = Space::new(base, module, mesh);
        let mut tried = Tried { planner: self, mesh, all: Vec::new(), refused: None };
        for (name, plan) in &self.candidates {
            tried.add(name.clone(), plan.clone(), None);
        }
        let uniform = space.uniform();
        for choice in &uniform {
            tried.add(space.name(choice), space.plan(choice)?, Some(choice.clone()));
        }
        let mut left = self.trials;
        'better: while let Some(choice) = tried.best_choice() {
            for next in space.neighbours(&choice) {
                if tried.has(&next) {
                    continue;
                }
                if left == 0 {
                    break 'better;
                }
                left -= 1;
                tried.add(space.name(&next), space.plan(&next)?, Some(next));
            }
            if tried.best_choice() == Some(choice) {
                break;
            }
        }
        tried.result(self.memory_limit)
    }
}

impl<F: Fn(&ShardingPlan, &DeviceMesh) -> Result<()> + Sync> ShardingPlanner for AutoPlanner<F> {
    /// Every plan that is tried contains the one that is extended, but for candidates of one's own.
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        Ok(self.search_on(&plan, module, mesh)?.plan)
    }
}

/// What [`AutoPlanner::search`] found; prints as a table of the plans that were tried, cheapest first.
#[derive(Debug, Clone)]
pub struct Search {
    /// The best plan.
    pub plan: ShardingPlan,
    /// What a step takes under it.
    pub estimate: Estimate,
    /// All plans that were tried, those that fit into memory first, the cheapest first among them.
    pub tried: Vec<Trial>,
    memory_limit: usize,
}

/// A plan that was tried.
#[derive(Debug, Clone)]
pub struct Trial {
    /// How parts of the model use the axes of the mesh.
    pub name: String,
    /// The plan.
    pub plan: ShardingPlan,
    /// What a step takes under it.
    pub estimate: Estimate,
}

impl fmt::Display for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["us/step", "compute", "communicate", "collectives", "KiB/rank"];
        writeln!(f, "{:>10} {:>10} {:>12} {:>12} {:>10}  plan", head[0], head[1], head[2], head[3], head[4])?;
        for Trial { name, estimate: e, .. } in &self.tried {
            let (us, kib) = (e.us(), e.peak_bytes.div_ceil(1024));
            write!(f, "{us:>10.1} {:>10.1} {:>12.1} ", e.compute_us, e.communication_us)?;
            let note = if e.peak_bytes > self.memory_limit { " (too large)" } else { "" };
            writeln!(f, "{:>12} {kib:>10}  {name}{note}", e.collectives)?;
        }
        Ok(())
    }
}

/// Plans that were tried so far.
struct Tried<'a, F> {
    planner: &'a AutoPlanner<F>,
    mesh: &'a DeviceMesh,
    all: Vec<(Option<Choice>, Trial)>,
    /// Why the last plan could not be run that could not.
    refused: Option<Error>,
}

impl<F: Fn(&ShardingPlan, &DeviceMesh) -> Result<()> + Sync> Tried<'_, F> {
    fn add(&mut self, name: String, plan: ShardingPlan, choice: Option<Choice>) {
        match self.planner.estimate(&plan, self.mesh) {
            Ok(estimate) => self.all.push((choice, Trial { name, plan, estimate })),
            // A step may not be possible under every plan.
            Err(error) => self.refused = Some(error),
        }
    }

    fn has(&self, choice: &Choice) -> bool {
        self.all.iter().any(|(own, _)| own.as_ref() == Some(choice))
    }

    /// Cheaper plans are smaller; of those that do not fit, the ones that need less memory.
    fn order(&self, trial: &Trial) -> (bool, f64) {
        let too_large = trial.estimate.peak_bytes > self.planner.memory_limit;
        (too_large, if too_large { trial.estimate.peak_bytes as f64 } else { trial.estimate.us() })
    }

    fn compare(&self, a: &Trial, b: &Trial) -> std::cmp::Ordering {
        let (a, b) = (self.order(a), self.order(b));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    }

    fn best_choice(&self) -> Option<Choice> {
        let chosen = self.all.iter().filter(|(choice, _)| choice.is_some());
        chosen.min_by(|a, b| self.compare(&a.1, &b.1)).and_then(|(choice, _)| choice.clone())
    }

    fn result(self, memory_limit: usize) -> Result<Search> {
        let mut tried: Vec<Trial> = self.all.iter().map(|(_, trial)| trial.clone()).collect();
        tried.sort_by(|a, b| self.compare(a, b));
        let Some(best) = tried.first() else {
            let none =
                ErrorKind::Plan.error("planner", "no plan", "a step that runs under some plan", "correct the step");
            return Err(self.refused.unwrap_or(none));
        };
        if best.estimate.peak_bytes > memory_limit {
            let found = format!("{} bytes per rank at least, under {}", best.estimate.peak_bytes, best.name);
            let fix = "raise the limit, use more ranks or a smaller batch, or checkpoint activations";
            return Err(ErrorKind::Plan.error("memory limit", found, format!("{memory_limit} bytes at most"), fix));
        }
        Ok(Search { plan: best.plan.clone(), estimate: best.estimate, tried, memory_limit })
    }
}

/// What a part of the model does along one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Parameters are whole.
    Whole,
    /// Parameters are in pieces, and gathered for use.
    Pieces,
    /// Tensor parallelism; tables are cut by vocabulary.
    Tensor,
    /// Tables are cut by width.
    Width,
}

/// Per class and axis what it does, and whether activations between blocks are cut along the axes of tensor parallelism.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Choice {
    uses: Vec<Vec<Use>>,
    sequence: bool,
}

/// Parts of a model that look alike and do the same.
struct Class {
    name: String,
    parts: Parts,
}

enum Parts {
    Blocks(Vec<Block>),
    Tables(Vec<String>),
    Heads(Vec<Linear>),
    Rest(Vec<String>),
}

impl Class {
    fn uses(&self) -> &'static [Use] {
        match self.parts {
            Parts::Tables(_) => &[Use::Whole, Use::Pieces, Use::Tensor, Use::Width],
            Parts::Rest(_) => &[Use::Whole, Use::Pieces],
            _ => &[Use::Whole, Use::Pieces, Use::Tensor],
        }
    }

    fn params(&self) -> Vec<String> {
        let both = |l: &Linear| {
            let bias = l.bias.then(|| join(&l.path, "bias"));
            std::iter::once(join(&l.path, "weight")).chain(bias).collect::<Vec<_>>()
        };
        match &self.parts {
            Parts::Blocks(blocks) => {
                blocks.iter().flat_map(|b| b.columns.iter().chain(&b.rows)).flat_map(both).collect()
            }
            Parts::Tables(tables) => tables.iter().map(|path| join(path, "weight")).collect(),
            Parts::Heads(heads) => heads.iter().flat_map(both).collect(),
            Parts::Rest(rest) => rest.clone(),
        }
    }
}

/// All plans that can be tried.
struct Space<'a> {
    /// What all of them contain.
    base: &'a ShardingPlan,
    module: &'a dyn Module,
    mesh: &'a DeviceMesh,
    classes: Vec<Class>,
}

impl<'a> Space<'a> {
    fn new(base: &'a ShardingPlan, module: &'a dyn Module, mesh: &'a DeviceMesh) -> Self {
        let Structure { blocks, tables, heads, rest } = Structure::of(module);
        let mut classes: Vec<Class> = Vec::new();
        for block in blocks {
            let shapes = |b: &Block| b.columns.iter().chain(&b.rows).map(|l| l.shape.clone()).collect::<Vec<_>>();
            let alike = classes.iter_mut().find_map(|class| match &mut class.parts {
                Parts::Blocks(own)
                    if own[0].kind == block.kind
                        && own[0].units == block.units
                        && shapes(&own[0]) == shapes(&block) =>
                {
                    Some(own)
                }
                _ => None,
            });
            match alike {
                Some(own) => own.push(block),
                None => classes.push(Class { name: block.kind.to_string(), parts: Parts::Blocks(vec![block]) }),
            }
        }
        let mut class = |name: &str, some: bool, parts: Parts| {
            if some {
                classes.push(Class { name: name.to_string(), parts });
            }
        };
        class("tables", !tables.is_empty(), Parts::Tables(tables));
        class("heads", !heads.is_empty(), Parts::Heads(heads));
        class("rest", !rest.is_empty(), Parts::Rest(rest));
        Space { base, module, mesh, classes }
    }

    /// Every axis in one way for the whole model: all combinations on up to three axes, beyond that those in which at most
    /// one axis differs from the others.
    fn uniform(&self) -> Vec<Choice> {
        let ways = [Use::Whole, Use::Pieces, Use::Tensor];
        let axes = self.mesh.ndim();
        let mut all: Vec<Vec<Use>> = vec![Vec::new()];
        if axes <= 3 {
            for _ in 0..axes {
                all = all.iter().flat_map(|so_far| ways.map(|way| [so_far.as_slice(), &[way]].concat())).collect();
            }
        } else {
            all = ways.iter().map(|&way| vec![way; axes]).collect();
            for axis in 0..axes {
                for (way, other) in ways.iter().flat_map(|&w| ways.map(|o| (w, o))).filter(|(w, o)| w != o) {
                    let mut one = vec![other; axes];
                    one[axis] = way;
                    all.push(one);
                }
            }
        }
        let mut choices = Vec::new();
        for uses in all {
            let fit = |class: &Class, way: Use| if class.uses().contains(&way) { way } else { Use::Whole };
            let of = |class: &Class| uses.iter().map(|&way| fit(class, way)).collect();
            let plain = Choice { uses: self.classes.iter().map(of).collect(), sequence: false };
            if uses.contains(&Use::Tensor) {
                choices.push(Choice { sequence: true, ..plain.clone() });
            }
            choices.push(plain);
        }
        choices
    }

    /// Choices in which one class does something else along one axis, or sequences are cut or not.
    fn neighbours(&self, choice: &Choice) -> Vec<Choice> {
        let mut all = vec![Choice { sequence: !choice.sequence, ..choice.clone() }];
        for (i, class) in self.classes.iter().enumerate() {
            for axis in 0..self.mesh.ndim() {
                for &way in class.uses().iter().filter(|&&way| way != choice.uses[i][axis]) {
                    let mut next = choice.clone();
                    next.uses[i][axis] = way;
                    all.push(next);
                }
            }
        }
        all
    }

    fn plan(&self, choice: &Choice) -> Result<ShardingPlan> {
        let mut plan = self.base.clone();
        let sequence = choice.sequence.then_some(1);
        for (i, axis) in self.mesh.axes().iter().enumerate() {
            let mut cuts = Cuts { plan, mesh: self.mesh, axis: &axis.name, sequence };
            for (class, uses) in self.classes.iter().zip(&choice.uses) {
                match (&class.parts, uses[i]) {
                    (_, Use::Pieces) => {}
                    (Parts::Blocks(blocks), Use::Tensor) => blocks.iter().try_for_each(|b| cuts.block(b))?,
                    (Parts::Tables(tables), Use::Tensor) => {
                        tables.iter().try_for_each(|t| cuts.table(t, TableCut::Vocabulary))?;
                    }
                    (Parts::Tables(tables), Use::Width) => {
                        tables.iter().try_for_each(|t| cuts.table(t, TableCut::Width))?;
                    }
                    (Parts::Heads(heads), Use::Tensor) => heads.iter().try_for_each(|h| cuts.head(h))?,
                    _ => class.params().iter().try_for_each(|path| cuts.param(path, &Placement::Replicate))?,
                }
            }
            plan = cuts.plan;
        }
        // Last, so that tensor parallelism cuts first.
        let tensors = Found::new(self.module).tensors;
        for (class, uses) in self.classes.iter().zip(&choice.uses).filter(|(_, uses)| uses.contains(&Use::Pieces)) {
            let axes = self.mesh.axes().iter().zip(uses).filter(|(_, way)| **way == Use::Pieces);
            let pieces = FullyShard::new(axes.map(|(axis, _)| axis.name.as_str()));
            for path in class.params() {
                if let Some((_, slot)) = tensors.iter().find(|(own, _)| *own == path) {
                    let cut = pieces.cut(&plan.layout_of(&path, slot.get().layout())?)?;
                    plan = plan.along(&path, self.mesh.mesh(), &cut)?;
                }
            }
        }
        Ok(plan)
    }

    /// Such as `Mlp dp:pieces tp:tensor; tables tp:width; sequence`.
    fn name(&self, choice: &Choice) -> String {
        let of = |(class, uses): (&Class, &Vec<Use>)| {
            let axes = self.mesh.axes().iter().zip(uses).filter(|(_, way)| **way != Use::Whole);
            let axes = axes.map(|(axis, way)| format!(" {}:{}", axis.name, format!("{way:?}").to_lowercase()));
            let axes = axes.collect::<String>();
            (!axes.is_empty()).then(|| class.name.clone() + &axes)
        };
        let mut parts: Vec<String> = self.classes.iter().zip(&choice.uses).filter_map(of).collect();
        if choice.sequence {
            parts.push("sequence".to_string());
        }
        if parts.is_empty() { "all whole".to_string() } else { parts.join("; ") }
    }
}
