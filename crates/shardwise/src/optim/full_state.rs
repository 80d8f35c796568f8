//! Full optimizer states that one rank has: gathered to it, or loaded from it.

use std::collections::BTreeMap;
use std::panic::Location;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::ShardedOptimizer;
use super::merged::{ParamView, separated};
use super::schedule::Schedule;
use super::state::{FullState, GroupState, OptimizerState, ParamState, tensors_of};
use crate::comm::World;
use crate::error::{Error, Result};
use crate::layout::MergedShape;
use crate::nn::{check_rank, described_by, gather_to, stand_in, text_of};
use crate::tensor::DTensor;

/// All of a full state but the elements of its tensors.
#[derive(Serialize, Deserialize)]
struct StateDescription {
    steps: u64,
    schedule: Option<Schedule>,
    groups: Vec<GroupState>,
    /// Per parameter its numbers, and the shapes and types of its tensors.
    params: BTreeMap<String, (BTreeMap<String, f64>, ShapesAndTypes)>,
}

/// Shape and name of the type of each tensor.
type ShapesAndTypes = BTreeMap<String, (Vec<usize>, String)>;

impl OptimizerState {
    /// Gathers full tensors to one rank: `Some` there, `None` on all other ranks, which hold no full tensor at any time.
    ///
    /// Collective: all ranks of the world must call it. [`to_full`](Self::to_full) gathers to all ranks.
    #[doc(alias = "get_optimizer_state_dict")]
    #[track_caller]
    pub fn to_full_on(&self, world: &World, rank: usize) -> Result<Option<FullState>> {
        check_rank(world, rank)?;
        let mut params = BTreeMap::new();
        for (name, state) in &self.params {
            let mut tensors = BTreeMap::new();
            for (kind, tensor) in &state.tensors {
                tensors.extend(gather_to(tensor, world, rank)?.map(|whole| (kind.clone(), whole)));
            }
            params.insert(name.clone(), ParamState { numbers: state.numbers.clone(), tensors });
        }
        let full = OptimizerState { steps: self.steps, schedule: self.schedule, groups: self.groups.clone(), params };
        Ok((world.rank() == rank).then_some(full))
    }
}

impl ShardedOptimizer {
    /// As [`load_full_state`](Self::load_full_state), from a state that only rank `src` has; every rank receives its shards. What
    /// other ranks pass is ignored.
    ///
    /// Collective: all ranks of the world must call it. Rank `src` must be on the meshes of all parameters.
    ///
    /// ```
    /// use shardwise::nn::Linear;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let layer = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 4, 6)?;
    ///     let mut optimizer = AdamW::default().over(&layer)?;
    ///     let state = optimizer.state_dict()?.to_full_on(&world, 0)?;
    ///     optimizer.load_full_state_from(&world, 0, state.as_ref())?;
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] on all ranks if the state does not fit, or rank `src` has none; nothing changes then.
    #[doc(alias = "broadcast_from_rank0")]
    #[track_caller]
    pub fn load_full_state_from(&mut self, world: &World, src: usize, state: Option<&FullState>) -> Result<()> {
        check_rank(world, src)?;
        let mine = state.filter(|_| world.rank() == src);
        let text = world.all_ok(mine.map(describe).transpose())?;
        let text = described_by(world, src, text, Location::caller())?;
        let received;
        let state = match mine {
            Some(state) => state,
            None => {
                received = stand_ins(&text)?;
                &received
            }
        };
        let groups = self.check(state, Tensor::dims)?;
        self.load(state, groups, |tensor, mesh, layout| {
            // A rank that is not on the mesh is refused by the call, on all ranks.
            let position = mesh.mesh().ranks().iter().position(|&rank| rank == src).unwrap_or(usize::MAX);
            // Tensors of merged dimensions have either shape. A stand-in is replaced: reshaping it would allocate the whole tensor.
            let tensor = match world.rank() == src {
                _ if tensor.dims() == layout.shape() => tensor.clone(),
                true => tensor.reshape(layout.shape())?,
                false => stand_in(&(layout.shape().to_vec(), tensor.dtype().as_str().to_string()))?,
            };
            DTensor::distribute_to_layout(&tensor, mesh, layout, Some(position))
        })
    }
}

impl ShardedOptimizer {
    /// As [`state_dict`](Self::state_dict), with the tensors of parameters with merged dimensions ([`Param::merge_dims`](crate::Param::merge_dims)) in the
    /// shapes that the modules declare, as an optimizer over parameters without merged dimensions has them.
    ///
    /// Collective: every rank of the mesh must call it. Shards that cross the borders of merged dimensions are gathered.
    #[track_caller]
    pub fn unmerged_state_dict(&self) -> Result<OptimizerState> {
        let mut state = self.state_dict()?;
        for (name, param) in &mut state.params {
            let mut tensors = BTreeMap::new();
            for (kind, tensor) in std::mem::take(&mut param.tensors) {
                let merged = self.merged_state(name, &kind)?;
                tensors.insert(kind, separated(tensor, merged.as_ref())?);
            }
            *param = ParamState { numbers: std::mem::take(&mut param.numbers), tensors };
        }
        Ok(state)
    }

    /// The own shape of a state tensor that is stored with merged dimensions.
    pub(crate) fn merged_state(&self, param: &str, tensor: &str) -> Result<Option<MergedShape>> {
        let Some(optimized) = self.params.iter().find(|optimized| optimized.name == param) else { return Ok(None) };
        let view = ParamView::of(&optimized.param);
        if view.merged.is_none() {
            return Ok(None);
        }
        let tensors = tensors_of(&view, &self.groups[optimized.group])?;
        let own = tensors.iter().find(|own| own.name == tensor);
        Ok(own.and_then(|own| view.merged_state(&own.shape)))
    }
}

fn describe(state: &FullState) -> Result<String> {
    let of_param = |param: &ParamState<Tensor>| {
        let tensors = param.tensors.iter().map(|(kind, tensor)| (kind.clone(), text_of(tensor))).collect();
        (param.numbers.clone(), tensors)
    };
    let params = state.params.iter().map(|(name, param)| (name.clone(), of_param(param))).collect();
    let OptimizerState { steps, schedule, groups, .. } = state;
    let description = StateDescription { steps: *steps, schedule: *schedule, groups: groups.clone(), params };
    serde_json::to_string(&description).map_err(Error::other)
}

/// The described state with tensors that have shapes and types only.
fn stand_ins(text: &str) -> Result<FullState> {
    let described: StateDescription = serde_json::from_str(text).map_err(Error::other)?;
    let mut params = BTreeMap::new();
    for (name, (numbers, described)) in described.params {
        let tensors = described.iter().map(|(kind, text)| Ok((kind.clone(), stand_in(text)?)));
        params.insert(name, ParamState { numbers, tensors: tensors.collect::<Result<_>>()? });
    }
    Ok(OptimizerState { steps: described.steps, schedule: described.schedule, groups: described.groups, params })
}
