//! Distributed tensors: a layout, this rank's part, and the mesh that both belong to.

mod assign;
mod compare;
mod construct;
mod factories;
mod foreign;
mod show;
mod state;
mod tape;

pub(crate) use factories::{agreed_draw, random_box};
pub use foreign::{DeviceBackend, register_backend};
pub use state::DTensorState;
pub use tape::{Backward, Keeps, Saved, no_grad};
pub(crate) use tape::{Node, Tape, is_recording, next_number, with_recording};

use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use rustc_hash::FxHasher;

use crate::comm::{DeviceMesh, Origin, implicitly, on_behalf_of};
use crate::error::{Error, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::local::placeholder;
use crate::placement::{Placement, ReduceOp};
use crate::redistribute::{Exchange, redistribute};

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
///     let x = DTensor::arange(0.0, 12.0, 1.0, DType::F32, &mesh, [Shard(0), Replicate])?;
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
    value: Arc<Value>,
    /// How it was made, if gradients can be taken through it.
    tape: Option<Tape>,
}

struct Value {
    mesh: DeviceMesh,
    layout: Layout,
    local: Tensor,
    origin: Origin,
}

impl Value {
    /// Bytes of the local part.
    fn bytes(&self) -> usize {
        self.local.elem_count() * self.local.dtype().size_in_bytes()
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.mesh.world().memory().release(self.bytes());
    }
}

impl DTensor {
    /// Puts the parts of a tensor that did not come from an operator together; `local` is what the layout says this rank
    /// holds.
    pub(crate) fn from_parts(mesh: &DeviceMesh, layout: Layout, local: Tensor) -> Self {
        let origin = Origin::leaf(hash_of(&(&layout, local.dtype() as u8)), layout.shape());
        Self::from_parts_of(mesh, layout, local, origin)
    }

    /// As [`from_parts`](Self::from_parts), for a value whose origin is known.
    pub(crate) fn from_parts_of(mesh: &DeviceMesh, layout: Layout, local: Tensor, origin: Origin) -> Self {
        debug_assert_eq!(local.dims(), layout.local_shape(mesh.world().rank()), "{layout}");
        let value = Value { mesh: mesh.clone(), layout, local, origin };
        mesh.world().memory().take(value.bytes());
        DTensor { value: Arc::new(value), tape: None }
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

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape().len()
    }

    /// Number of elements of the whole tensor.
    pub fn elem_count(&self) -> usize {
        self.shape().iter().product()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.value.local.dtype()
    }

    /// Shape and element type of the whole tensor.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta { shape: self.shape().to_vec(), dtype: self.dtype() }
    }

    /// The part that this rank holds; without elements on a rank outside the mesh. It is a plain tensor and has no
    /// gradient: [`local_map`](crate::autograd::local_map) runs code on local parts that has one.
    pub fn to_local(&self) -> &Tensor {
        &self.value.local
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
            return Err(Error::invalid(
                "layout",
                to,
                format!("a layout of shape {:?} on mesh {}", self.shape(), self.layout().mesh()),
                "use to_mesh to move to another mesh",
            ));
        }
        check_partial(to, self.dtype())?;
        let layouts = hash_of(&(self.layout(), to));
        let local = on_behalf_of(self.origin(), layouts, || {
            redistribute(&self.value.mesh, self.layout(), to, self.to_local(), site)
        })?;
        let moved = Self::from_parts_of(&self.value.mesh, to.clone(), local, self.origin().clone());
        Ok(self.moved(moved, "redistribute", &|saved, gradient| gradient.to_layout(&saved.layout(0).settled())))
    }

    /// The same value on another mesh of the same world, whatever ranks the two have.
    ///
    /// All ranks of either mesh take part; what each sends goes directly to those that need it.
    #[track_caller]
    pub fn to_mesh(&self, mesh: &DeviceMesh, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        let to = Layout::new(mesh.mesh(), self.shape(), placements)?;
        check_partial(&to, self.dtype())?;
        let site = Location::caller();
        // Reduce what is pending before the move, make what shall be pending after it.
        let source = self.reduced(site)?;
        let moved = source.move_boxes(mesh, to.settled(), site)?;
        let back: WayBack = &|saved, gradient| {
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
        let local = on_behalf_of(&origin, 0, || exchange.assemble(self.to_local(), &meta, site))?;
        Ok(Self::from_parts(mesh, to, local))
    }

    /// The whole tensor on every rank of the mesh; without elements on a rank outside it. It is a plain tensor; gradients
    /// go through [`redistribute`](Self::redistribute) and [`local_map`](crate::autograd::local_map).
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        let to = Layout::replicated(self.layout().mesh(), self.shape())?;
        Ok(self.to_layout_at(&to, Location::caller())?.to_local().clone())
    }

    /// The same value without pending reductions: partial axes become replicated.
    pub(crate) fn reduced(&self, site: Site) -> Result<DTensor> {
        self.to_layout_at(&self.layout().settled(), site)
    }

    /// The same values with another element type. Pending reductions are carried out first, because rounding does not
    /// commute with adding; only a largest or smallest operand stays one under a conversion that keeps order.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<DTensor> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        let picks = |p: &Placement| match p {
            Placement::Partial(op) => matches!(op, ReduceOp::Max | ReduceOp::Min) && keeps_order(self.dtype(), dtype),
            _ => true,
        };
        let site = Location::caller();
        let source = match self.placements().iter().all(picks) {
            true => self.clone(),
            false => implicitly("to_dtype", || self.reduced(site))?,
        };
        let local = match self.value.mesh.world().is_dry() {
            true => placeholder(&TensorMeta::new(source.to_local().dims(), dtype))?,
            false => source.to_local().to_dtype(dtype)?,
        };
        let origin = source.origin().clone();
        let converted = Self::from_parts_of(&self.value.mesh, source.layout().clone(), local, origin);
        Ok(source.moved(converted, "to_dtype", &|saved, gradient| gradient.to_dtype(saved.dtype(0))))
    }

    /// A tensor made from this one, whose gradient goes back in the given way.
    fn moved(&self, made: DTensor, name: &'static str, back: WayBack) -> DTensor {
        if self.tape.is_none() {
            return made;
        }
        Self::recorded(vec![made], &[self], Keeps::Nothing, || Box::new(Moved { name, back })).swap_remove(0)
    }

    /// The same tensor with its local part on another device.
    pub fn to_device(&self, device: &Device) -> Result<DTensor> {
        let made = Self::from_parts(&self.value.mesh, self.layout().clone(), self.to_local().to_device(device)?);
        // Operators compute on the CPU.
        Ok(self.moved(made, "to_device", &|_, gradient| gradient.to_device(&Device::Cpu)))
    }
}

/// A number that is the same for equal values in every process.
pub(crate) fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}

/// How the gradient of a tensor that was moved or converted goes back.
type WayBack = &'static (dyn Fn(&Saved<'_>, &DTensor) -> Result<DTensor> + Send + Sync);

struct Moved {
    name: &'static str,
    back: WayBack,
}

impl Backward for Moved {
    fn name(&self) -> &'static str {
        self.name
    }

    fn run(&self, saved: &Saved<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
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

/// An error if a pending reduction of the layout makes no sense for the type.
pub(crate) fn check_partial(layout: &Layout, dtype: DType) -> Result<()> {
    for placement in layout.placements() {
        if let Placement::Partial(op) = placement {
            op.check(dtype)?;
        }
    }
    Ok(())
}
