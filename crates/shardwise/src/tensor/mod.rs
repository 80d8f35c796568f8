//! [`DTensor`]: a distributed tensor, that is a layout on a mesh and the local part of this rank.

mod assign;
mod compare;
mod construct;
pub mod current_mesh;
mod factories;
mod expect;
mod foreign;
mod local_code;
mod operand;
mod room;
mod sequences;
mod show;
mod state;
mod tape;
mod windows;

pub use construct::FromLocalOptions;
pub use expect::check_expectations;
pub use factories::RandomOptions;
pub(crate) use factories::{agreed_draw, random_box};
pub use foreign::{DeviceBackend, register_backend};
pub use operand::Operand;
pub(crate) use room::{check_metas, check_room};
pub use sequences::{Arange, Linspace, Logspace};
pub(crate) use show::{ShownPart, local_text, show_parts};
pub use state::DTensorState;
pub use tape::{Backward, SaveForBackward, SavedTensors, no_grad};
pub(crate) use tape::{
    Recording, Tape, TapeNode, in_gradient, is_in_gradient, is_recording, next_number, with_recording,
};
pub use windows::WindowFunction;

use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Tensor};
use rustc_hash::FxHasher;

use crate::comm::{DeviceMesh, Origin, record_implicit_operator, while_redistributing, with_purpose};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::placement::{Placement, ReduceOp, is_linear};
use crate::redistribute::{BoxExchange, redistribute};
pub use shardwise_kernels::Number;
use shardwise_kernels::{check_cpu, check_dtype, convert, own_copy, placeholder};

/// A distributed tensor: one logical tensor whose elements are placed on the ranks of a mesh.
///
/// Every rank knows the [`Layout`] (shape, mesh, one placement per mesh axis) and holds its local part. A tensor is immutable
/// and cloning is free; methods with `&mut self` replace the value behind the variable. Methods marked *Collective* must
/// be called by all ranks of the mesh, in the same order; *Local* ones communicate nothing.
///
/// ```
/// use shardwise::prelude::*;
///
/// launch(4, |world| {
///     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
///     let x = DTensor::arange(0.0..12.0, DType::F32, &mesh, [Shard(0), Replicate])?;
///     let y = x.redistribute([Replicate, Shard(0)])?;
///     assert_eq!(y.full_tensor()?.to_vec1::<f32>()?[7], 7.0);
///     assert_eq!(y.to_local().dims(), [6]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "DistributedTensor")]
#[derive(Clone)]
pub struct DTensor {
    value: Arc<TensorValue>,
    /// The recorded call that computed it, if gradients can be taken through it.
    tape: Option<Tape>,
}

/// Identity of a tensor within this process; see [`DTensor::id`] and [`ShardedTensor::id`](crate::ShardedTensor::id). The
/// same tensor has different ids on different ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(u64);

impl TensorId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        TensorId(NEXT.fetch_add(1, Relaxed))
    }
}

/// Layout and local elements of a tensor, shared by its clones.
struct TensorValue {
    id: TensorId,
    mesh: DeviceMesh,
    layout: Layout,
    dtype: DType,
    /// The local part. Where the tensor is a partial sum, mean or product it may have a wider type than the tensor: it is
    /// rounded once, after the reduction.
    held: Tensor,
    /// `held` converted to the type of the tensor, computed when first asked for.
    rounded: OnceLock<Tensor>,
    /// Whether the memory of `held` was allocated for this tensor alone, and no other tensor has been given it since.
    is_exclusive: AtomicBool,
    origin: Origin,
    /// Bytes that the rank's memory counts for it.
    counted: usize,
}

impl Drop for TensorValue {
    fn drop(&mut self) {
        self.mesh.world().memory().release(self.counted);
    }
}

impl DTensor {
    /// Combines a layout with the local part of this rank, for a tensor that no operator computed.
    pub(crate) fn from_parts(mesh: &DeviceMesh, layout: Layout, local: Tensor) -> Self {
        let dtype = local.dtype();
        let origin = Origin::leaf(hash_of(&(&layout, dtype as u8)), layout.shape());
        Self::from_terms(mesh, layout, local, dtype, origin)
    }

    /// Combines a layout with a local part whose type may be wider than `dtype`, the type of the tensor.
    fn from_terms(mesh: &DeviceMesh, layout: Layout, held: Tensor, dtype: DType, origin: Origin) -> Self {
        debug_assert_eq!(held.dims(), layout.local_shape(mesh.world().rank()), "{layout}");
        let counted = held.elem_count() * held.dtype().size_in_bytes();
        Self::counted_as(counted, mesh, layout, held, dtype, origin)
    }

    fn counted_as(
        counted: usize,
        mesh: &DeviceMesh,
        layout: Layout,
        held: Tensor,
        dtype: DType,
        origin: Origin,
    ) -> Self {
        mesh.world().memory().take(counted);
        let value = TensorValue {
            id: TensorId::next(),
            mesh: mesh.clone(),
            layout,
            dtype,
            held,
            rounded: OnceLock::new(),
            is_exclusive: AtomicBool::new(false),
            origin,
            counted,
        };
        DTensor { value: Arc::new(value), tape: None }
    }

    /// Zeros that are replaced before they are used: no memory is allocated, and none is counted except in a dry run, where
    /// they stand for what replaces them.
    pub(crate) fn unallocated(mesh: &DeviceMesh, layout: Layout, dtype: DType) -> Result<Self> {
        let meta = TensorMeta { shape: layout.local_shape(mesh.world().rank()), dtype };
        let counted = if mesh.world().is_dry() { meta.bytes() } else { 0 };
        let origin = Origin::leaf(hash_of(&(&layout, dtype as u8)), layout.shape());
        Ok(Self::counted_as(counted, mesh, layout, placeholder(&meta)?, dtype, origin))
    }

    /// Combines a layout with a computed local part of a possibly wider floating-point type: that is kept while a partial sum,
    /// mean or product is not reduced, and rounded to `dtype` otherwise.
    pub(crate) fn from_held(
        mesh: &DeviceMesh,
        layout: Layout,
        held: Tensor,
        dtype: DType,
        origin: Origin,
    ) -> Result<Self> {
        let held = match held.dtype() == dtype || accumulates(&layout) {
            true => held,
            false => converted(mesh, &held, dtype)?,
        };
        Ok(Self::from_terms(mesh, layout, held, dtype, origin))
    }

    /// Identity of this tensor on this rank, as a key for maps. Clones have the same id; two tensors with equal elements have
    /// different ids. [ `equal`](Self::equal) compares elements.
    #[doc(alias = "__hash__")]
    pub fn id(&self) -> TensorId {
        self.value.id
    }

    /// The mesh whose ranks hold the tensor.
    pub fn device_mesh(&self) -> &DeviceMesh {
        &self.value.mesh
    }

    /// Shape, mesh and placements of the tensor.
    #[doc(alias = "DTensorSpec")]
    #[doc(alias = "_spec")]
    pub fn layout(&self) -> &Layout {
        &self.value.layout
    }

    /// The placements, one per mesh axis.
    pub fn placements(&self) -> &[Placement] {
        self.value.layout.placements()
    }

    /// The operator and operands that computed the value, by which ranks check that they make the same calls.
    pub(crate) fn origin(&self) -> &Origin {
        &self.value.origin
    }

    /// Shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        self.value.layout.shape()
    }

    /// Number of dimensions of the whole tensor.
    #[doc(alias = "dim")]
    #[doc(alias = "rank")]
    pub fn ndim(&self) -> usize {
        self.shape().len()
    }

    /// Number of elements of the whole tensor.
    #[doc(alias = "numel")]
    pub fn elem_count(&self) -> usize {
        self.shape().iter().product()
    }

    /// Element type of the tensor.
    pub fn dtype(&self) -> DType {
        self.value.dtype
    }

    /// Shape and element type of the whole tensor.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta { shape: self.shape().to_vec(), dtype: self.dtype() }
    }

    /// Returns a copy of the local part of this rank as a plain candle tensor; without elements on a rank outside the mesh.
    ///
    /// Local. Unlike in PyTorch the result does not share memory with this tensor, because candle can write to tensors in place
    /// (`slice_set`) and a `DTensor` is immutable. In a dry run the result has the shape and no memory.
    /// [`Layout::local_shape`] returns the shape without a copy.
    ///
    /// Differentiable: code on candle tensors between this call and a [`from_local`](Self::from_local) is part of the autograd
    /// graph. The gradient is expected in the layout of this tensor, replicated where it is partial. That is correct if
    /// ranks with the same local part do the same with it; otherwise use
    /// [`to_local_with_grad_placements`](Self::to_local_with_grad_placements). `detach` of the result ends the graph.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::arange(-2.0..2.0, DType::F32, &mesh, [Shard(0)])?.requires_grad();
    ///     let local = x.to_local().relu()?; // any code on candle tensors
    ///     let y = DTensor::from_local(&local, &mesh, [Shard(0)])?;
    ///     let grads = y.square()?.sum_all()?.backward()?;
    ///     assert_eq!(grads.get(&x)?.full_tensor()?.to_vec1::<f32>()?, [0.0, 0.0, 0.0, 2.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// The result has the type of the tensor. The terms of a partial sum, mean or product are held and communicated in a wider
    /// type where the result would otherwise depend on the layout (half precision in f32, sums of f32 in f64); this method
    /// returns them rounded.
    ///
    /// # Panics
    /// If the copy cannot be allocated.
    #[doc(alias = "collect_local_shard")]
    pub fn to_local(&self) -> Tensor {
        self.to_local_code(None).unwrap_or_else(|error| panic!("to_local: {error}"))
    }

    /// Returns a copy of the local part, as [`to_local`](Self::to_local) does, and sets the placements of its gradient.
    ///
    /// Use `Partial(Sum)` on a mesh axis where this tensor is replicated and ranks compute different things with it, so that each
    /// has one term of the gradient. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the placements do not fit the tensor.
    #[doc(alias = "grad_placements")]
    pub fn to_local_with_grad_placements(&self, placements: impl IntoIterator<Item = Placement>) -> Result<Tensor> {
        let placements: Vec<Placement> = placements.into_iter().collect();
        Layout::new(self.layout().mesh(), self.shape(), placements.iter().cloned())?;
        self.to_local_code(Some(placements))
    }

    /// Copies the local part for local code, recorded as an exit from the autograd graph if it has one.
    fn to_local_code(&self, grad_placements: Option<Vec<Placement>>) -> Result<Tensor> {
        match self.value.mesh.world().is_dry() {
            true => Ok(self.local().clone()),
            false if self.has_gradient() && is_recording() => local_code::leave(self, grad_placements),
            false => Ok(own_copy(self.local())?),
        }
    }

    /// The local part in the type of the tensor, without a copy: for reading only.
    pub(crate) fn local(&self) -> &Tensor {
        let TensorValue { mesh, dtype, rounded, .. } = &*self.value;
        let held = self.held();
        if held.dtype() == *dtype {
            return held;
        }
        rounded.get_or_init(|| converted(mesh, held, *dtype).expect("floating-point types convert into each other"))
    }

    /// The local part in the possibly wider type in which it is held, without a copy: for reading only; see
    /// [`to_local`](Self::to_local).
    pub(crate) fn held(&self) -> &Tensor {
        // Whoever has the memory may keep it.
        if self.value.is_exclusive.load(Relaxed) {
            self.value.is_exclusive.store(false, Relaxed);
        }
        &self.value.held
    }

    /// As [`held`](Self::held), for a kernel, which keeps no handle to the memory of its inputs unless it returns one.
    pub(crate) fn held_for_kernel(&self) -> &Tensor {
        &self.value.held
    }

    /// States that the memory of the local part was allocated for this tensor alone.
    pub(crate) fn set_exclusive(&self) {
        self.value.is_exclusive.store(true, Relaxed);
    }

    /// Whether this handle is the only way to the memory of the local part, so that its owner may write to it.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.value.is_exclusive.load(Relaxed) && Arc::strong_count(&self.value) == 1
    }

    /// The same value with the terms of a partial f32 sum held in f64. Detached from the autograd graph.
    pub(crate) fn with_terms_in_f64(&self) -> Result<DTensor> {
        let held = converted(&self.value.mesh, self.held(), DType::F64)?;
        Self::from_held(&self.value.mesh, self.layout().clone(), held, self.dtype(), self.origin().clone())
    }

    /// The local part in the type in which it is reduced: f32 for half precision.
    pub(crate) fn reducible(&self) -> Result<Tensor> {
        match self.held().dtype() {
            DType::F16 | DType::BF16 if accumulates(self.layout()) => {
                converted(&self.value.mesh, self.held(), DType::F32)
            }
            _ => Ok(self.held().clone()),
        }
    }

    /// Whether the local parts of two tensors share their memory, as those of clones do. Local.
    pub fn shares_memory(&self, other: &DTensor) -> bool {
        shardwise_kernels::same_memory(self.local(), other.local())
    }

    /// Redistributes this tensor to ` placements`, one per axis of its mesh.
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
    ///     assert_eq!(y.to_local().dims(), [4, 3]);
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
        check_room(to, self.dtype(), self.value.mesh.world().is_dry())?;
        let layouts = hash_of(&(self.layout(), to));
        let terms = self.reducible()?;
        let held = while_redistributing(self.layout(), to, || {
            with_purpose(self.origin(), layouts, || redistribute(&self.value.mesh, self.layout(), to, &terms, site))
        })?;
        let moved = Self::from_held(&self.value.mesh, to.clone(), held, self.dtype(), self.origin().clone())?;
        Ok(self.moved(moved, "redistribute", &|saved, gradient| gradient.to_layout(&saved.layout(0).reduced())))
    }

    /// Moves this tensor to another mesh of the same world, with the given placements.
    ///
    /// Collective: all ranks of both meshes must call it. Each rank sends its elements directly to the ranks that need them;
    /// partial sums are reduced first. Differentiable.
    #[doc(alias = "cross-mesh")]
    #[track_caller]
    pub fn to_mesh(&self, mesh: &DeviceMesh, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        let to = Layout::new(mesh.mesh(), self.shape(), placements)?;
        check_partial(&to, self.dtype())?;
        check_room(&to, self.dtype(), mesh.world().is_dry())?;
        let site = Location::caller();
        // Partial axes of the source are reduced before the move, those of the target created after it.
        let source = self.reduced(site)?;
        let moved = source.move_boxes(mesh, to.reduced(), site)?;
        let gradient: MoveGradient = &|saved, gradient| {
            let layout = saved.layout(0).reduced();
            gradient.reduced(Location::caller())?.move_boxes(saved.mesh(0), layout, Location::caller())
        };
        source.moved(moved, "to_mesh", gradient).to_layout_at(&to, site)
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
        let local = with_purpose(&origin, 0, || exchange.assemble(self.local(), &meta, site))?;
        Ok(Self::from_parts(mesh, to, local))
    }

    /// Gathers the whole tensor on every rank of the mesh as a plain candle tensor; without elements on a rank outside it.
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
        // A result that the engine has just allocated for this rank alone needs no second copy.
        let mine = to != *self.layout() && !world.shares_memory() && !whole.shares_memory(self);
        if world.is_dry() || mine { Ok(whole.local().clone()) } else { Ok(own_copy(whole.local())?) }
    }

    /// Reduces all partial axes: they become replicated.
    pub(crate) fn reduced(&self, site: Site) -> Result<DTensor> {
        self.to_layout_at(&self.layout().reduced(), site)
    }

    /// Converts the elements to another type.
    ///
    /// Local, unless the tensor is partial: then it is reduced first, which is collective, because rounding does not commute
    /// with a reduction. Two cases stay partial and local: `Max` and `Min` under a conversion that keeps the order of numbers,
    /// and sums, means and products to a narrower floating-point type, which are rounded after the reduction. Differentiable.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<DTensor> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        check_dtype(dtype)?;
        check_room(self.layout(), dtype, self.value.mesh.world().is_dry())?;
        let commutes = |op: ReduceOp| matches!(op, ReduceOp::Max | ReduceOp::Min) && keeps_order(self.dtype(), dtype);
        let stays = |p: &Placement| p.reduction().is_none_or(commutes);
        let site = Location::caller();
        if self.rounds_after_reduction(dtype) {
            let output = Self::from_terms(
                &self.value.mesh,
                self.layout().clone(),
                self.held().clone(),
                dtype,
                self.origin().clone(),
            );
            return Ok(self.moved(output, "to_dtype", &|saved, gradient| gradient.to_dtype(saved.dtype(0))));
        }
        let source = match self.placements().iter().all(stays) {
            true => self.clone(),
            false => record_implicit_operator("to_dtype", || self.reduced(site))?,
        };
        let local = converted(&self.value.mesh, source.local(), dtype)?;
        let output = Self::from_terms(&self.value.mesh, source.layout().clone(), local, dtype, source.origin().clone());
        Ok(source.moved(output, "to_dtype", &|saved, gradient| gradient.to_dtype(saved.dtype(0))))
    }

    /// Whether every partial axis can be reduced first and rounded to `dtype` afterwards.
    fn rounds_after_reduction(&self, dtype: DType) -> bool {
        let term = |p: &Placement| !p.is_partial() || is_term(p);
        let narrower = dtype.is_float() && dtype.size_in_bytes() < self.dtype().size_in_bytes();
        self.dtype().is_float() && narrower && accumulates(self.layout()) && self.placements().iter().all(term)
    }

    /// Records `output` as moved or converted from this tensor, with its gradient.
    fn moved(&self, output: DTensor, name: &'static str, gradient: MoveGradient) -> DTensor {
        if self.tape.is_none() {
            return output;
        }
        let backward = || Box::new(MoveBackward { name, gradient }) as Box<dyn Backward>;
        Self::recorded(vec![output], &[self], SaveForBackward::Nothing, backward).swap_remove(0)
    }

    /// Returns the tensor with its local part on a device; only the CPU is supported. Local.
    ///
    /// Other types of devices are supported through custom backends ([`register_backend`]).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for any device but the CPU.
    pub fn to_device(&self, device: &Device) -> Result<DTensor> {
        check_cpu(device)?;
        Ok(self.clone())
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

/// A hash that is the same for equal values in every process.
pub(crate) fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The gradient of a move or conversion: from the gradient of the output to that of the input.
type MoveGradient = &'static (dyn Fn(&SavedTensors<'_>, &DTensor) -> Result<DTensor> + Send + Sync);

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

/// Whether a conversion between types never swaps the order of two numbers, and keeps NaN.
fn keeps_order(from: DType, to: DType) -> bool {
    let bits = |dtype: DType| 8 * dtype.size_in_bytes();
    let unsigned = |dtype: DType| matches!(dtype, DType::U8 | DType::U32);
    match (from.is_float(), to.is_float()) {
        (_, true) => true,
        (true, false) => false,
        (false, false) => bits(to) > bits(from) && (unsigned(from) || !unsigned(to)),
    }
}

/// Whether the placement is a partial sum, mean or product, whose result changes if its terms are rounded.
fn is_term(placement: &Placement) -> bool {
    placement.reduction().is_some_and(|op| is_linear(op) || op == ReduceOp::Product)
}

/// Whether a layout has a partial sum, mean or product.
pub(crate) fn accumulates(layout: &Layout) -> bool {
    layout.placements().iter().any(is_term)
}

/// Converts a local part to another type.
fn converted(mesh: &DeviceMesh, local: &Tensor, dtype: DType) -> Result<Tensor> {
    match mesh.world().is_dry() {
        true => Ok(placeholder(&TensorMeta::new(local.dims(), dtype))?),
        false => Ok(convert(local, dtype)?),
    }
}

/// Checks that the reductions of partial axes are defined for the type.
pub(crate) fn check_partial(layout: &Layout, dtype: DType) -> Result<()> {
    layout.placements().iter().filter_map(Placement::reduction).try_for_each(|op| Ok(op.check(dtype)?))
}
