//! [`DTensor`]: a distributed tensor, that is a layout on a mesh and the local part of this rank.

pub mod current_mesh;
mod moves;
mod operand;
mod graph;
mod create;
mod read;

pub use create::construct::FromLocalOptions;
pub(crate) use create::construct::{check_replicas, placements_hash};
pub use create::device_registry::{DeviceBackend, register_backend};
pub use create::factories::RandomOptions;
pub(crate) use create::factories::{agreed_draw, random_box};
pub(crate) use create::memory_check::{check_memory, check_metas, check_whole};
pub use create::sequences::{Arange, Linspace, Logspace};
pub use create::windows::WindowFunction;
pub use graph::tape::{Backward, SaveForBackward, SavedTensors, no_grad};
pub(crate) use graph::tape::{
    GradientTypes, PassGradient, Recording, Tape, TapeNode, constants_before, first_derivative_only, in_gradient,
    is_in_gradient, is_linearizing, is_recording, linearizing, next_number, with_constants_before, with_recording,
};
pub use moves::RedistributeOptions;
pub use operand::Operand;
pub use read::expect::check_expectations;
pub(crate) use read::show::{ShownPart, local_text, show_parts};
pub use read::state::DTensorState;

use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Tensor};
use rustc_hash::FxHasher;

use crate::comm::{DeviceMesh, MemoryKind, Origin, record_implicit_operator};
use crate::error::Result;
use crate::layout::{Layout, TensorMeta};
use crate::placement::{Placement, ReduceOp, is_linear};
pub use shardwise_kernels::Number;
use shardwise_kernels::{check_arithmetic, check_cpu, check_dtype, convert, own_copy, placeholder};

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
///     assert_eq!(y.local_shape(), [6]);
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
    storage: Tensor,
    /// `storage` converted to the type of the tensor, computed when first asked for.
    rounded: OnceLock<Tensor>,
    /// Whether the memory of `storage` was allocated only for this tensor, and no other tensor has been given it since.
    is_exclusive: AtomicBool,
    origin: Origin,
    /// Bytes that the rank's memory counts for it.
    counted: usize,
    /// What they are for: a [`MemoryKind`].
    kind: AtomicU8,
    /// Why the operator that computed it moved data or left it partial, if it did.
    why: Option<Arc<str>>,
}

impl Drop for TensorValue {
    fn drop(&mut self) {
        let kind = MemoryKind::ALL[usize::from(*self.kind.get_mut())];
        self.mesh.world().memory().release(self.counted, kind, self.id.0);
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
    fn from_terms(mesh: &DeviceMesh, layout: Layout, storage: Tensor, dtype: DType, origin: Origin) -> Self {
        debug_assert_eq!(storage.dims(), layout.local_shape(mesh.world().rank()), "{layout}");
        let counted = storage.elem_count() * storage.dtype().size_in_bytes();
        Self::counted_as(counted, mesh, layout, storage, dtype, origin)
    }

    fn counted_as(
        counted: usize,
        mesh: &DeviceMesh,
        layout: Layout,
        storage: Tensor,
        dtype: DType,
        origin: Origin,
    ) -> Self {
        let (id, kind) = (TensorId::next(), MemoryKind::of_new_tensor());
        mesh.world().memory().take(counted, kind, id.0);
        let value = TensorValue {
            id,
            mesh: mesh.clone(),
            layout,
            dtype,
            storage,
            rounded: OnceLock::new(),
            is_exclusive: AtomicBool::new(false),
            origin,
            counted,
            kind: AtomicU8::new(kind as u8),
            why: None,
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
    pub(crate) fn from_storage(
        mesh: &DeviceMesh,
        layout: Layout,
        storage: Tensor,
        dtype: DType,
        origin: Origin,
    ) -> Result<Self> {
        let stored = storage.elem_count();
        Self::from_repeated(stored, mesh, layout, storage, dtype, origin)
    }

    /// [`from_storage`](Self::from_storage) for a local part that repeats `stored` elements: only these have memory to count.
    pub(crate) fn from_repeated(
        stored: usize,
        mesh: &DeviceMesh,
        layout: Layout,
        storage: Tensor,
        dtype: DType,
        origin: Origin,
    ) -> Result<Self> {
        let storage = match storage.dtype() == dtype || accumulates(&layout) {
            true => storage,
            false => converted(mesh, &storage, dtype)?,
        };
        debug_assert_eq!(storage.dims(), layout.local_shape(mesh.world().rank()), "{layout}");
        let counted = stored * storage.dtype().size_in_bytes();
        Ok(Self::counted_as(counted, mesh, layout, storage, dtype, origin))
    }

    /// Identity of this tensor on this rank, as a key for maps. Clones have the same id; two tensors with equal elements have
    /// different ids. [`equal`](Self::equal) compares elements.
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
    ///     let local = x.to_local()?.relu()?; // any code on candle tensors
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
    /// # Errors
    /// If the copy cannot be allocated.
    #[doc(alias = "collect_local_shard")]
    pub fn to_local(&self) -> Result<Tensor> {
        self.to_local_code(None)
    }

    /// Returns the number of elements of this rank's part. Local; copies nothing.
    pub fn local_elem_count(&self) -> usize {
        self.local().elem_count()
    }

    /// Returns the shape of this rank's part. Local; copies nothing.
    pub fn local_shape(&self) -> Vec<usize> {
        self.local().dims().to_vec()
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
            false if self.has_gradient() && is_recording() => graph::local_code::leave(self, grad_placements),
            false => Ok(own_copy(self.local())?),
        }
    }

    /// The local part in the type of the tensor, without a copy: for reading only.
    pub(crate) fn local(&self) -> &Tensor {
        let TensorValue { mesh, dtype, rounded, .. } = &*self.value;
        let storage = self.storage();
        if storage.dtype() == *dtype {
            return storage;
        }
        rounded.get_or_init(|| converted(mesh, storage, *dtype).expect("floating-point types convert into each other"))
    }

    /// The local part in the possibly wider type in which it is stored, without a copy: for reading only; see
    /// [`to_local`](Self::to_local).
    pub(crate) fn storage(&self) -> &Tensor {
        // Whoever has the memory may keep it.
        if self.value.is_exclusive.load(Relaxed) {
            self.value.is_exclusive.store(false, Relaxed);
        }
        &self.value.storage
    }

    /// As [`storage`](Self::storage), for a kernel, which keeps no handle to the memory of its inputs unless it returns one.
    pub(crate) fn storage_for_kernel(&self) -> &Tensor {
        &self.value.storage
    }

    /// States that the memory of the local part was allocated only for this tensor.
    pub(crate) fn set_exclusive(&self) {
        self.value.is_exclusive.store(true, Relaxed);
    }

    /// Whether this handle is the only way to the memory of the local part, so that its owner may write to it.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.value.is_exclusive.load(Relaxed) && Arc::strong_count(&self.value) == 1
    }

    /// The same value with the terms of a partial f32 sum stored in f64. Detached from the autograd graph.
    pub(crate) fn with_terms_in_f64(&self) -> Result<DTensor> {
        let storage = converted(&self.value.mesh, self.storage(), DType::F64)?;
        Self::from_storage(&self.value.mesh, self.layout().clone(), storage, self.dtype(), self.origin().clone())
    }

    /// The same value in another floating-point type. Unlike [`to_dtype`](Self::to_dtype) it never reduces: the terms of a partial
    /// sum are converted, which rounds nothing where the type is not narrower than that in which they are stored. Local, detached.
    pub(crate) fn with_terms_as(&self, dtype: DType) -> Result<DTensor> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        let widest = |a: DType, b: DType| if a.size_in_bytes() >= b.size_in_bytes() { a } else { b };
        let storage = match accumulates(self.layout()) {
            true => converted(&self.value.mesh, self.storage(), widest(self.storage().dtype(), dtype))?,
            false => converted(&self.value.mesh, self.storage(), dtype)?,
        };
        Self::from_storage(&self.value.mesh, self.layout().clone(), storage, dtype, self.origin().clone())
    }

    /// The local part in the type in which it is reduced: f32 for half precision.
    pub(crate) fn reducible(&self) -> Result<Tensor> {
        match self.storage().dtype() {
            DType::F16 | DType::BF16 if accumulates(self.layout()) => {
                converted(&self.value.mesh, self.storage(), DType::F32)
            }
            _ => Ok(self.storage().clone()),
        }
    }

    /// Whether the local parts of two tensors share their memory, as those of clones do. Local.
    pub fn shares_memory(&self, other: &DTensor) -> bool {
        shardwise_kernels::same_memory(self.local(), other.local())
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
        check_memory(self.layout(), dtype, self.value.mesh.world().is_dry())?;
        // A type without arithmetic has no reductions either: terms are reduced before they become f8.
        let reduces = check_arithmetic(dtype).is_ok();
        let commutes =
            |op: ReduceOp| matches!(op, ReduceOp::Max | ReduceOp::Min) && reduces && keeps_order(self.dtype(), dtype);
        let stays = |p: &Placement| p.reduction().is_none_or(commutes);
        let site = Location::caller();
        if reduces && self.rounds_after_reduction(dtype) {
            let output = Self::from_terms(
                &self.value.mesh,
                self.layout().clone(),
                self.storage().clone(),
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

/// A hash that is the same for equal values in every process.
pub(crate) fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
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
