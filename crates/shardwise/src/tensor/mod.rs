//! Distributed tensors: a layout, this rank's part, and the mesh that both belong to.

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

pub use construct::FromLocalOptions;
pub use expect::check_expectations;
pub use factories::RandomOptions;
pub(crate) use factories::{agreed_draw, random_box};
pub use foreign::{DeviceBackend, register_backend};
pub use operand::Operand;
pub(crate) use room::{check_metas, check_room};
pub use sequences::{Arange, Linspace, Logspace};
pub(crate) use show::{Piece, local_text, show_pieces};
pub use state::DTensorState;
pub use tape::{Backward, Keeps, SavedTensors, no_grad};
pub(crate) use tape::{Node, Recording, Tape, in_gradient, is_in_gradient, is_recording, next_number, with_recording};

use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Tensor};
use rustc_hash::FxHasher;

use crate::comm::{DeviceMesh, Origin, implicitly, on_behalf_of, while_moving};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::placement::{Placement, ReduceOp, is_linear};
use crate::redistribute::{Exchange, redistribute};
pub use shardwise_kernels::Number;
use shardwise_kernels::{check_cpu, check_dtype, own_copy, placeholder};

/// A tensor that lies on a mesh of ranks, seen from one of them.
///
/// It knows its [`Layout`]; this rank holds the local part. Cloning is free. Calls that communicate must be made by all
/// ranks of the mesh.
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
    /// How it was made, if gradients can be taken through it.
    tape: Option<Tape>,
}

/// The identity of a tensor: see [`DTensor::id`] and [`ShardedTensor::id`](crate::ShardedTensor::id). Other ranks have other
/// numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(u64);

impl TensorId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        TensorId(NEXT.fetch_add(1, Relaxed))
    }
}

struct TensorValue {
    id: TensorId,
    mesh: DeviceMesh,
    layout: Layout,
    dtype: DType,
    /// What this rank holds. A term of a partial sum, mean or product may be of a wider type than the tensor: it is rounded
    /// once, when the terms have been reduced.
    held: Tensor,
    /// `held` in the type of the tensor, where that is another one and somebody asked.
    rounded: OnceLock<Tensor>,
    origin: Origin,
}

impl TensorValue {
    /// Bytes of the local part.
    fn bytes(&self) -> usize {
        self.held.elem_count() * self.held.dtype().size_in_bytes()
    }
}

impl Drop for TensorValue {
    fn drop(&mut self) {
        self.mesh.world().memory().release(self.bytes());
    }
}

impl DTensor {
    /// Puts the parts of a tensor that did not come from an operator together; `local` is what the layout says this rank
    /// holds.
    pub(crate) fn from_parts(mesh: &DeviceMesh, layout: Layout, local: Tensor) -> Self {
        let dtype = local.dtype();
        let origin = Origin::leaf(hash_of(&(&layout, dtype as u8)), layout.shape());
        Self::from_terms(mesh, layout, local, dtype, origin)
    }

    /// A tensor of type `dtype` whose terms may be held in a wider type.
    fn from_terms(mesh: &DeviceMesh, layout: Layout, held: Tensor, dtype: DType, origin: Origin) -> Self {
        debug_assert_eq!(held.dims(), layout.local_shape(mesh.world().rank()), "{layout}");
        let value = TensorValue {
            id: TensorId::next(),
            mesh: mesh.clone(),
            layout,
            dtype,
            held,
            rounded: OnceLock::new(),
            origin,
        };
        mesh.world().memory().take(value.bytes());
        DTensor { value: Arc::new(value), tape: None }
    }

    /// A tensor of type `dtype` from what this rank computed, which may be of a wider floating-point type: that stays as
    /// long as a sum, mean or product is pending, and is rounded otherwise.
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

    /// Which tensor this is, on this rank: clones have one id, and tensors that were computed apart have different ones,
    /// equal elements or not. For maps by tensor; `equal` compares elements.
    #[doc(alias = "__hash__")]
    pub fn id(&self) -> TensorId {
        self.value.id
    }

    /// The mesh.
    pub fn device_mesh(&self) -> &DeviceMesh {
        &self.value.mesh
    }

    /// How the tensor lies on the mesh.
    pub fn layout(&self) -> &Layout {
        &self.value.layout
    }

    /// One placement per mesh axis.
    pub fn placements(&self) -> &[Placement] {
        self.value.layout.placements()
    }

    /// How the value was computed.
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

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.value.dtype
    }

    /// Shape and element type of the whole tensor.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta { shape: self.shape().to_vec(), dtype: self.dtype() }
    }

    /// A copy of the part that this rank holds; without elements on a rank outside the mesh.
    ///
    /// Local: nothing is communicated. It is a plain tensor in memory of its own, because candle writes to tensors in place
    /// (`slice_set`) and a distributed tensor never changes; the copy is the one cost of this call. In a dry run the result
    /// has the shape and no memory. [`local_shape`](Layout::local_shape) of the layout gives the shape alone.
    ///
    /// Differentiable: what candle computes from it and [`from_local`](Self::from_local) brings back is part of the graph of
    /// gradients. The gradient comes back in the layout of this tensor, replicated where it is partial: right where ranks
    /// that hold the same part do the same with it, else see
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
    /// It always has the type of the tensor. Terms of a pending sum, mean or product are kept, and travel, in a wider type
    /// where their sum would depend on the layout otherwise (half precision in f32, sums of f32 in f64); this shows them
    /// rounded.
    ///
    /// # Panics
    /// If there is no memory for the copy.
    #[doc(alias = "collect_local_shard")]
    pub fn to_local(&self) -> Tensor {
        self.leaving(None).unwrap_or_else(|error| panic!("to_local: {error}"))
    }

    /// As [`to_local`](Self::to_local), with the placements of the gradient that comes back: `Partial(Sum)` along an axis where
    /// this tensor is replicated and ranks use it for different things, so that each has a part of the gradient only.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the placements do not fit the tensor.
    #[doc(alias = "grad_placements")]
    pub fn to_local_with_grad_placements(&self, placements: impl IntoIterator<Item = Placement>) -> Result<Tensor> {
        let placements: Vec<Placement> = placements.into_iter().collect();
        Layout::new(self.layout().mesh(), self.shape(), placements.iter().cloned())?;
        self.leaving(Some(placements))
    }

    /// A copy of the local part that is the program's own, with its gradient.
    fn leaving(&self, grad_placements: Option<Vec<Placement>>) -> Result<Tensor> {
        match self.value.mesh.world().is_dry() {
            true => Ok(self.local().clone()),
            false if self.has_gradient() && is_recording() => local_code::leave(self, grad_placements),
            false => Ok(own_copy(self.local())?),
        }
    }

    /// The part that this rank holds, in the type of the tensor and where it is: for reading only.
    pub(crate) fn local(&self) -> &Tensor {
        let TensorValue { mesh, dtype, held, rounded, .. } = &*self.value;
        if held.dtype() == *dtype {
            return held;
        }
        rounded.get_or_init(|| converted(mesh, held, *dtype).expect("floating-point types convert into each other"))
    }

    /// The part that this rank holds, in the type in which it is held: for reading only; see [`to_local`](Self::to_local).
    pub(crate) fn held(&self) -> &Tensor {
        &self.value.held
    }

    /// The same value with pending terms of f32 held in f64, without a place in a graph of gradients.
    pub(crate) fn with_terms_in_f64(&self) -> Result<DTensor> {
        let held = converted(&self.value.mesh, self.held(), DType::F64)?;
        Self::from_held(&self.value.mesh, self.layout().clone(), held, self.dtype(), self.origin().clone())
    }

    /// What this rank holds, in the type in which it is reduced: half precision is reduced in f32.
    pub(crate) fn reducible(&self) -> Result<Tensor> {
        match self.held().dtype() {
            DType::F16 | DType::BF16 if accumulates(self.layout()) => {
                converted(&self.value.mesh, self.held(), DType::F32)
            }
            _ => Ok(self.held().clone()),
        }
    }

    /// Whether the local parts of two tensors are one and the same memory, as those of clones are.
    pub fn shares_memory(&self, other: &DTensor) -> bool {
        shardwise_kernels::same_memory(self.local(), other.local())
    }

    /// The same value with other placements on the same mesh.
    ///
    /// Any placement to any other: shards, ragged and strided shards, pending reductions. What is communicated is the
    /// cheapest plan that [`explain`](crate::redistribute::explain) shows.
    #[track_caller]
    pub fn redistribute(&self, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        let to = Layout::new(self.value.layout.mesh(), self.shape(), placements)?;
        self.to_layout_at(&to, Location::caller())
    }

    /// As [`redistribute`](Self::redistribute), with the types in which elements travel.
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
        let made = source.to_layout_at(&to, Location::caller())?;
        let back = || Box::new(RedistributeBackward { dtype: options.backward_dtype }) as Box<dyn Backward>;
        Ok(Self::recorded(vec![made], &[self], Keeps::Nothing, back).swap_remove(0))
    }

    /// The same value in another layout, which may have another order of cuts. Its mesh must be this tensor's.
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
        let held = while_moving(self.layout(), to, || {
            on_behalf_of(self.origin(), layouts, || redistribute(&self.value.mesh, self.layout(), to, &terms, site))
        })?;
        let moved = Self::from_held(&self.value.mesh, to.clone(), held, self.dtype(), self.origin().clone())?;
        Ok(self.moved(moved, "redistribute", &|saved, gradient| gradient.to_layout(&saved.layout(0).settled())))
    }

    /// The same value on another mesh of the same world, whatever ranks the two have.
    ///
    /// All ranks of either mesh take part; what each sends goes directly to those that need it.
    #[doc(alias = "cross-mesh")]
    #[track_caller]
    pub fn to_mesh(&self, mesh: &DeviceMesh, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        let to = Layout::new(mesh.mesh(), self.shape(), placements)?;
        check_partial(&to, self.dtype())?;
        check_room(&to, self.dtype(), mesh.world().is_dry())?;
        let site = Location::caller();
        // Reduce what is pending before the move, make what shall be pending after it.
        let source = self.reduced(site)?;
        let moved = source.move_boxes(mesh, to.settled(), site)?;
        let back: MoveGradient = &|saved, gradient| {
            let layout = saved.layout(0).settled();
            gradient.reduced(Location::caller())?.move_boxes(saved.mesh(0), layout, Location::caller())
        };
        source.moved(moved, "to_mesh", back).to_layout_at(&to, site)
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
        let exchange = Exchange::new(group, self.dtype(), |r| from.boxes_of(r), |r| to.boxes_of(r));
        // Ranks outside the old mesh may not have computed the value, so its layout counts and not its origin.
        let origin = Origin::leaf(hash_of(&(from, &to)), self.shape());
        let local = on_behalf_of(&origin, 0, || exchange.assemble(self.local(), &meta, site))?;
        Ok(Self::from_parts(mesh, to, local))
    }

    /// The whole tensor on every rank of the mesh; without elements on a rank outside it.
    ///
    /// Collective unless every rank already holds the whole. It is a plain tensor in memory that no other rank or tensor
    /// shares.
    ///
    /// Differentiable as [`to_local`](Self::to_local) is: right where all ranks do the same with the whole, else see
    /// [`full_tensor_with_grad_placements`](Self::full_tensor_with_grad_placements).
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        self.whole(None, Location::caller())
    }

    /// As [`full_tensor`](Self::full_tensor), with the placements of the gradient that comes back: `Partial(Sum)` where ranks
    /// use the whole for different things, so that each has a part of the gradient only.
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
            return whole.leaving(grad_placements);
        }
        let world = self.value.mesh.world();
        // What an engine has just put together for this rank alone needs no second copy.
        let mine = to != *self.layout() && !world.shares_memory() && !whole.shares_memory(self);
        if world.is_dry() || mine { Ok(whole.local().clone()) } else { Ok(own_copy(whole.local())?) }
    }

    /// The same value without pending reductions: partial axes become replicated.
    pub(crate) fn reduced(&self, site: Site) -> Result<DTensor> {
        self.to_layout_at(&self.layout().settled(), site)
    }

    /// The same values with another element type. Pending reductions are carried out first, because rounding does not
    /// commute with adding; but a largest or smallest operand stays one under a conversion that keeps order, and terms of
    /// a sum that becomes a narrower floating-point type stay as they are, to be rounded when they have been added.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<DTensor> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        check_dtype(dtype)?;
        check_room(self.layout(), dtype, self.value.mesh.world().is_dry())?;
        let keeps = |op: ReduceOp| matches!(op, ReduceOp::Max | ReduceOp::Min) && keeps_order(self.dtype(), dtype);
        let picks = |p: &Placement| p.reduction().is_none_or(keeps);
        let site = Location::caller();
        if self.narrows_later(dtype) {
            let made = Self::from_terms(
                &self.value.mesh,
                self.layout().clone(),
                self.held().clone(),
                dtype,
                self.origin().clone(),
            );
            return Ok(self.moved(made, "to_dtype", &|saved, gradient| gradient.to_dtype(saved.dtype(0))));
        }
        let source = match self.placements().iter().all(picks) {
            true => self.clone(),
            false => implicitly("to_dtype", || self.reduced(site))?,
        };
        let local = converted(&self.value.mesh, source.local(), dtype)?;
        let made = Self::from_terms(&self.value.mesh, source.layout().clone(), local, dtype, source.origin().clone());
        Ok(source.moved(made, "to_dtype", &|saved, gradient| gradient.to_dtype(saved.dtype(0))))
    }

    /// Whether all that is pending are terms that can be added first and rounded to a type after.
    fn narrows_later(&self, dtype: DType) -> bool {
        let term = |p: &Placement| !p.is_partial() || is_term(p);
        let narrower = dtype.is_float() && dtype.size_in_bytes() < self.dtype().size_in_bytes();
        self.dtype().is_float() && narrower && accumulates(self.layout()) && self.placements().iter().all(term)
    }

    /// A tensor made from this one, whose gradient goes back in the given way.
    fn moved(&self, made: DTensor, name: &'static str, back: MoveGradient) -> DTensor {
        if self.tape.is_none() {
            return made;
        }
        Self::recorded(vec![made], &[self], Keeps::Nothing, || Box::new(MoveBackward { name, back })).swap_remove(0)
    }

    /// The same tensor with its local part on another device, of which there is one: operators compute on the CPU.
    ///
    /// Local: nothing is communicated. Devices of other kinds are served by backends that a program registers
    /// ([`register_backend`]).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for any device but the CPU.
    pub fn to_device(&self, device: &Device) -> Result<DTensor> {
        check_cpu(device)?;
        Ok(self.clone())
    }
}

/// In which types a redistribution communicates; see [`DTensor::redistribute_with`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RedistributeOptions {
    /// Elements are converted to this type before they are communicated, and the result has it. Terms of a partial sum are
    /// reduced in f32 or wider all the same, and rounded once.
    pub forward_dtype: Option<DType>,
    /// The gradient is converted to this type before it is communicated, and to the type of the tensor after; without it,
    /// to the type of the tensor before.
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
        let moved = gradient.to_dtype(self.dtype.unwrap_or(saved.dtype(0)))?.to_layout(&saved.layout(0).settled())?;
        Ok(vec![Some(moved.to_dtype(saved.dtype(0))?)])
    }
}

/// A number that is the same for equal values in every process.
pub(crate) fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}

/// How the gradient of a tensor that was moved or converted goes back.
type MoveGradient = &'static (dyn Fn(&SavedTensors<'_>, &DTensor) -> Result<DTensor> + Send + Sync);

struct MoveBackward {
    name: &'static str,
    back: MoveGradient,
}

impl Backward for MoveBackward {
    fn name(&self) -> &'static str {
        self.name
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        Ok(vec![gradients[0].as_ref().map(|gradient| (self.back)(saved, gradient)).transpose()?])
    }
}

/// Whether a conversion between types never swaps two numbers, and keeps not-a-number.
fn keeps_order(from: DType, to: DType) -> bool {
    let bits = |dtype: DType| 8 * dtype.size_in_bytes();
    let unsigned = |dtype: DType| matches!(dtype, DType::U8 | DType::U32);
    match (from.is_float(), to.is_float()) {
        (_, true) => true,
        (true, false) => false,
        (false, false) => bits(to) > bits(from) && (unsigned(from) || !unsigned(to)),
    }
}

/// Whether operands are terms of a sum, a mean or a product, which rounding would change.
fn is_term(placement: &Placement) -> bool {
    placement.reduction().is_some_and(|op| is_linear(op) || op == ReduceOp::Product)
}

/// Whether a sum, a mean or a product is pending.
pub(crate) fn accumulates(layout: &Layout) -> bool {
    layout.placements().iter().any(is_term)
}

/// A local part in another type.
fn converted(mesh: &DeviceMesh, local: &Tensor, dtype: DType) -> Result<Tensor> {
    match mesh.world().is_dry() {
        true => Ok(placeholder(&TensorMeta::new(local.dims(), dtype))?),
        false => Ok(local.to_dtype(dtype)?),
    }
}

/// An error if a pending reduction of the layout makes no sense for the type.
pub(crate) fn check_partial(layout: &Layout, dtype: DType) -> Result<()> {
    layout.placements().iter().filter_map(Placement::reduction).try_for_each(|op| Ok(op.check(dtype)?))
}
