//! Redistribution, moves to another mesh, and the whole tensor on every rank.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::{Backward, DTensor, SaveForBackward, SavedTensors, check_partial, hash_of};
use crate::comm::{DeviceMesh, Origin, while_redistributing, with_call_origin};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::placement::Placement;
use crate::redistribute::{BoxExchange, redistribute};
use crate::tensor::create::memory_check::check_memory;
use crate::tensor::graph::tape::is_recording;
use shardwise_kernels::{own_copy, placeholder};

impl DTensor {
    /// Redistributes this tensor to `placements`, one per axis of its mesh.
    ///
    /// Collective: every rank of the mesh must call it. Any placement converts to any other. Of the possible plans the cheapest
    /// is executed; [`explain`](crate::redistribute::explain) shows it. Differentiable: the gradient is redistributed to the
    /// layout of `self`, replicated where `self` is partial.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let x = DTensor::ones((4, 6), DType::F32, &mesh, [Shard(0)])?;
    ///     let y = x.redistribute([Shard(1)])?; // one all-to-all
    ///     assert_eq!(y.local_shape(), [4, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a placement does not fit the shape or the type.
    #[track_caller]
    pub fn redistribute(&self, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        let to = Layout::new(self.value.layout.mesh(), self.shape(), placements)?;
        self.to_layout_at(&to, Location::caller())
    }

    /// Redistributes this tensor as [`redistribute`](Self::redistribute) does, communicating in other element types. Collective.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// # use shardwise::tensor::RedistributeOptions;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let weight = DTensor::ones((4, 4), DType::F32, &mesh, [Shard(0)])?.requires_grad();
    ///     let options = RedistributeOptions { forward_dtype: Some(DType::BF16), ..Default::default() };
    ///     let whole = weight.redistribute_with([Replicate], options)?; // gathers half the bytes
    ///     assert_eq!(whole.dtype(), DType::BF16);
    ///     let grads = whole.sum_all()?.backward()?;
    ///     assert_eq!(grads.get(&weight)?.dtype(), DType::F32);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "forward_dtype")]
    #[doc(alias = "backward_dtype")]
    #[track_caller]
    pub fn redistribute_with(
        &self,
        placements: impl IntoIterator<Item = Placement>,
        options: RedistributeOptions,
    ) -> Result<DTensor> {
        let to = Layout::new(self.value.layout.mesh(), self.shape(), placements)?;
        let source = self.detach().to_dtype(options.forward_dtype.unwrap_or(self.dtype()))?;
        let output = source.to_layout_at(&to, Location::caller())?;
        let backward = || Box::new(RedistributeBackward { dtype: options.backward_dtype }) as Box<dyn Backward>;
        Ok(Self::recorded(vec![output], &[self], SaveForBackward::Nothing, backward).swap_remove(0))
    }

    /// Redistributes this tensor to a layout of the same shape and mesh. Unlike [`redistribute`](Self::redistribute), it can also
    /// change the order in which several mesh axes shard a dimension. Collective.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the layout has another mesh or shape.
    #[track_caller]
    pub fn to_layout(&self, layout: &Layout) -> Result<DTensor> {
        self.to_layout_at(layout, Location::caller())
    }

    pub(crate) fn to_layout_at(&self, to: &Layout, site: Site) -> Result<DTensor> {
        if to == self.layout() {
            return Ok(self.clone());
        }
        if to.mesh() != self.layout().mesh() || to.shape() != self.shape() {
            return Err(ErrorKind::Layout.error(
                "layout",
                to,
                format!("a layout of shape {:?} on mesh {}", self.shape(), self.layout().mesh()),
                "use to_mesh to move to another mesh",
            ));
        }
        check_partial(to, self.dtype())?;
        check_memory(to, self.dtype(), self.value.mesh.world().is_dry())?;
        let layouts = hash_of(&(self.layout(), to));
        let terms = self.reducible()?;
        let storage = while_redistributing(self.layout(), to, || {
            with_call_origin(self.origin(), layouts, || redistribute(&self.value.mesh, self.layout(), to, &terms, site))
        })?;
        let moved = Self::from_storage(&self.value.mesh, to.clone(), storage, self.dtype(), self.origin().clone())?;
        Ok(self.moved(moved, "redistribute", &|saved, gradient| gradient.to_layout(&saved.layout(0).reduced())))
    }

    /// Moves this tensor to another mesh of the same world, with the given placements.
    ///
    /// Collective: all ranks of both meshes must call it. Each rank sends its elements directly to the ranks that need them;
    /// partial sums are reduced first. Differentiable.
    #[doc(alias = "cross-mesh")]
    #[track_caller]
    pub fn to_mesh(&self, mesh: &DeviceMesh, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        self.to_mesh_layout(mesh, &Layout::new(mesh.mesh(), self.shape(), placements)?)
    }

    /// As [`to_mesh`](Self::to_mesh), to a layout, which may have another shard order than that of the mesh.
    #[track_caller]
    pub(crate) fn to_mesh_layout(&self, mesh: &DeviceMesh, to: &Layout) -> Result<DTensor> {
        check_partial(to, self.dtype())?;
        check_memory(to, self.dtype(), mesh.world().is_dry())?;
        let site = Location::caller();
        // Partial axes of the source are reduced before the move, those of the target created after it.
        let source = self.reduced(site)?;
        let moved = source.move_boxes(mesh, to.reduced(), site)?;
        let gradient: MoveGradient = &|saved, gradient| {
            let layout = saved.layout(0).reduced();
            gradient.reduced(Location::caller())?.move_boxes(saved.mesh(0), layout, Location::caller())
        };
        source.moved(moved, "to_mesh", gradient).to_layout_at(to, site)
    }

    fn move_boxes(&self, mesh: &DeviceMesh, to: Layout, site: Site) -> Result<DTensor> {
        let me = mesh.world().rank();
        let meta = TensorMeta { shape: to.local_shape(me), dtype: self.dtype() };
        let mut ranks = [self.layout().mesh().ranks(), to.mesh().ranks()].concat();
        ranks.sort_unstable();
        ranks.dedup();
        if !ranks.contains(&me) {
            return Ok(Self::from_parts(mesh, to, placeholder(&meta)?));
        }
        let group = mesh.world().subgroup(&ranks)?;
        let from = self.layout();
        let exchange = BoxExchange::new(group, self.dtype(), |r| from.boxes_of(r), |r| to.boxes_of(r));
        // Ranks outside the old mesh have not computed the value, so ranks compare its layout instead of its origin.
        let origin = Origin::leaf(hash_of(&(from, &to)), self.shape());
        let local = with_call_origin(&origin, 0, || exchange.assemble(self.local(), &meta, site))?;
        Ok(Self::from_parts(mesh, to, local))
    }

    /// Gathers the whole tensor on every rank of the mesh as a plain candle tensor. A rank outside the mesh gets one without elements.
    ///
    /// Collective, unless the tensor is replicated. Allocates the whole tensor on every rank; the result shares memory with
    /// nothing.
    ///
    /// Differentiable as [`to_local`](Self::to_local) is: correct if all ranks do the same with the result, otherwise use
    /// [`full_tensor_with_grad_placements`](Self::full_tensor_with_grad_placements).
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        self.whole(None, Location::caller())
    }

    /// Gathers the whole tensor, as [`full_tensor`](Self::full_tensor) does, and sets the placements of its gradient:
    /// `Partial(Sum)` where ranks compute different things with it, so that each has one term of the gradient. Collective.
    #[track_caller]
    pub fn full_tensor_with_grad_placements(&self, placements: impl IntoIterator<Item = Placement>) -> Result<Tensor> {
        let placements: Vec<Placement> = placements.into_iter().collect();
        Layout::new(self.layout().mesh(), self.shape(), placements.iter().cloned())?;
        self.whole(Some(placements), Location::caller())
    }

    fn whole(&self, grad_placements: Option<Vec<Placement>>, site: Site) -> Result<Tensor> {
        let to = Layout::replicated(self.layout().mesh(), self.shape())?;
        let whole = self.to_layout_at(&to, site)?;
        if whole.has_gradient() && is_recording() {
            return whole.to_local_code(grad_placements);
        }
        let world = self.value.mesh.world();
        // A result that the engine has just allocated only for this rank needs no second copy.
        let mine = to != *self.layout() && !world.shares_memory() && !whole.shares_memory(self);
        if world.is_dry() || mine { Ok(whole.local().clone()) } else { Ok(own_copy(whole.local())?) }
    }

    /// Reduces all partial axes: they become replicated.
    pub(crate) fn reduced(&self, site: Site) -> Result<DTensor> {
        self.to_layout_at(&self.layout().reduced(), site)
    }

    /// Records `output` as moved or converted from this tensor, with its gradient.
    pub(super) fn moved(&self, output: DTensor, name: &'static str, gradient: MoveGradient) -> DTensor {
        if self.tape.is_none() {
            return output;
        }
        let backward = || Box::new(MoveBackward { name, gradient }) as Box<dyn Backward>;
        Self::recorded(vec![output], &[self], SaveForBackward::Nothing, backward).swap_remove(0)
    }
}

/// The element types in which a redistribution communicates; see [`DTensor::redistribute_with`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RedistributeOptions {
    /// Elements are converted to this type before they are communicated, and the result has it. A partial sum is still
    /// reduced in f32 or wider and rounded once. `None`: the type of the tensor.
    pub forward_dtype: Option<DType>,
    /// The gradient is converted to this type before it is communicated, and to the type of the tensor afterwards. `None`: it is
    /// communicated in the type of the tensor.
    pub backward_dtype: Option<DType>,
}

/// The backward pass of a redistribution with options.
struct RedistributeBackward {
    dtype: Option<DType>,
}

impl Backward for RedistributeBackward {
    fn name(&self) -> &'static str {
        "redistribute"
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(gradient) = &gradients[0] else { return Ok(vec![None]) };
        let moved = gradient.to_dtype(self.dtype.unwrap_or(saved.dtype(0)))?.to_layout(&saved.layout(0).reduced())?;
        Ok(vec![Some(moved.to_dtype(saved.dtype(0))?)])
    }
}

/// The gradient of a move or conversion: from the gradient of the output to that of the input.
pub(super) type MoveGradient = &'static (dyn Fn(&SavedTensors<'_>, &DTensor) -> Result<DTensor> + Send + Sync);

/// The backward pass of a redistribution, a move to another mesh or a conversion.
struct MoveBackward {
    name: &'static str,
    gradient: MoveGradient,
}

impl Backward for MoveBackward {
    fn name(&self) -> &'static str {
        self.name
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        Ok(vec![gradients[0].as_ref().map(|gradient| (self.gradient)(saved, gradient)).transpose()?])
    }
}
