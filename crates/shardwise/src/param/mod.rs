//! Parameters: shared cells whose tensor an optimizer replaces at every step.

mod merged;

pub use merged::MergedTensor;

use std::fmt;
use std::sync::Arc;

use candle_core::DType;
use parking_lot::Mutex;

use crate::comm::MemoryKind;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, MergedShape};
use crate::ops::{BlockType, QuantizedTensor};
use crate::tensor::{DTensor, GradientTypes, PassGradient, SaveForBackward, no_grad};

/// A shared cell with the current value of a parameter. Clones share the cell: the module reads what the optimizer wrote.
///
/// Unlike PyTorch's `Parameter`, which is modified in place, an optimizer step replaces the tensor in the cell, because tensors
/// are immutable. Until then, [`get`](Self::get) always returns the same leaf, the key for [`Gradients::get`].
///
/// [`Gradients::get`]: crate::Gradients::get
///
/// ```
/// use shardwise::param::Param;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let weight = Param::new(&DTensor::ones((4, 2), DType::F32, &mesh, [Shard(0)])?);
///     let gradients = weight.get().square()?.sum_all()?.backward()?;
///     let change = gradients.get(&weight.get())?.mul_scalar(-0.25)?;
///     weight.set(&weight.get().add(&change)?)?;
///     assert_eq!(weight.get().full_tensor()?.to_vec2::<f32>()?[3], [0.5, 0.5]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "Parameter")]
#[derive(Clone)]
pub struct Param(Arc<Mutex<ParamCell>>);

/// What the clones of a parameter share.
struct ParamCell {
    /// The value: a leaf, unless the parameter is frozen.
    value: DTensor,
    /// The type of the blocks, if the value consists of quantized blocks.
    blocks: Option<BlockType>,
    /// The shape that modules see, if the value is stored with leading dimensions merged.
    merged: Option<MergedShape>,
    uses: ForwardUse,
    /// The value as modules compute with it, gathered over the axes of `uses`, while it is kept.
    gathered: Option<DTensor>,
}

/// How modules use a parameter; see [`Param::forward_value`].
#[derive(Clone, Default)]
struct ForwardUse {
    /// The type that modules compute in.
    dtype: Option<DType>,
    /// The type of the gradient.
    grad_dtype: Option<DType>,
    /// The type to which the reduced gradient is rounded.
    reduce_dtype: Option<DType>,
    /// Mesh axes over which the value is gathered once and kept.
    kept_over: Vec<String>,
    hook: Option<UseHook>,
}

/// A function of the value of a parameter; see [`Param::on_use`].
type UseHook = Arc<dyn Fn(&DTensor) -> Result<DTensor> + Send + Sync>;

impl ParamCell {
    /// Replaces the value, as a leaf if `trainable`.
    fn put(&mut self, value: &DTensor, trainable: bool) {
        value.count_as(MemoryKind::Parameters);
        let ForwardUse { dtype, grad_dtype, reduce_dtype, .. } = self.uses;
        let accumulated = grad_dtype.or(dtype.or(reduce_dtype).map(|_| value.dtype()));
        let types = GradientTypes { accumulated, reduced: reduce_dtype };
        self.value = if trainable { value.requires_grad_in(types) } else { value.detach() };
    }

    /// Creates a new leaf after a change of the settings.
    fn renew(&mut self) {
        self.gathered = None;
        if self.value.has_gradient() {
            self.put(&self.value.clone(), true);
        }
    }
}

impl Param {
    /// Creates a parameter with this value, detached from the graph that computed it. Local, no copy.
    pub fn new(value: &DTensor) -> Self {
        value.count_as(MemoryKind::Parameters);
        Param(Arc::new(Mutex::new(ParamCell {
            value: value.requires_grad(),
            blocks: None,
            merged: None,
            uses: ForwardUse::default(),
            gathered: None,
        })))
    }

    /// Freezes the parameter (`false`) or makes it trainable again (`true`, the state of a new one). Local.
    ///
    /// A frozen parameter is part of the model's state, but no leaf: backward passes compute no gradient for it, and optimizers
    /// that were created over it skip it. All ranks must freeze the same parameters, since gradients are computed by
    /// collectives. [`Module::set_requires_grad`](crate::nn::Module::set_requires_grad) does so for all parameters of a module.
    ///
    /// ```
    /// use shardwise::param::Param;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let base = Param::new(&DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?);
    ///     let scale = Param::new(&DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?);
    ///     base.set_requires_grad(false);
    ///     let gradients = base.get().mul(&scale.get())?.sum_all()?.backward()?;
    ///     assert_eq!(gradients.len(), 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "requires_grad_")]
    #[doc(alias = "freeze")]
    pub fn set_requires_grad(&self, trainable: bool) {
        let mut cell = self.0.lock();
        if trainable != cell.value.has_gradient() {
            let value = cell.value.clone();
            cell.put(&value, trainable);
        }
    }

    /// Whether the parameter is trainable, that is, not frozen.
    pub fn requires_grad(&self) -> bool {
        self.0.lock().value.has_gradient()
    }

    /// Returns the current value as a leaf: the same one until the next [`set`](Self::set). A frozen one is not a leaf.
    pub fn get(&self) -> DTensor {
        self.0.lock().value.clone()
    }

    /// Replaces the value by one of the same shape, in any layout and type. Local. Leaves returned earlier are unchanged, and a
    /// frozen parameter stays frozen.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the shape differs, or the value is not u8 where the parameter is
    /// [quantized](Self::quantized): blocks are replaced by blocks of the same type.
    pub fn set(&self, value: &DTensor) -> Result<()> {
        let mut cell = self.0.lock();
        if let Some(block_type) = cell.blocks.filter(|_| value.dtype() != DType::U8) {
            let found = format!("{} {:?}", value.dtype().as_str(), value.shape());
            let needed = format!("{block_type} blocks {:?} in u8", cell.value.shape());
            let fix = "load the model without quantized weights, or create a new parameter";
            return Err(ErrorKind::dtype(value.dtype()).error("parameter value", found, needed, fix));
        }
        if value.shape() != cell.value.shape() {
            return Err(ErrorKind::shape(value.shape()).error(
                "parameter value",
                format!("shape {:?}", value.shape()),
                format!("{:?}, the shape of the parameter", cell.value.shape()),
                "reshape the value, or create a new parameter",
            ));
        }
        let trainable = cell.value.has_gradient();
        cell.put(value, trainable);
        cell.gathered = None;
        Ok(())
    }

    /// Replaces the value, a matrix `[out, in]` or a stack of matrices, by quantized blocks of it, in any layout. Local.
    ///
    /// For inference: [`Linear`](crate::nn::Linear) and [`Embedding`](crate::nn::Embedding) compute with the blocks as they are,
    /// and optimizers cannot change them. [`get`](Self::get) returns the blocks, [`quantized`](Self::quantized) also their type.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the matrix has another shape, or its blocks another type already.
    pub fn set_quantized(&self, value: &QuantizedTensor) -> Result<()> {
        let mut cell = self.0.lock();
        let fits = match cell.blocks {
            None => cell.value.ndim() >= 2 && cell.value.shape() == value.shape(),
            Some(block_type) => block_type == value.block_type() && cell.value.shape() == value.blocks().shape(),
        };
        if !fits {
            let needed = match cell.blocks {
                None => format!("blocks of matrices {:?}", cell.value.shape()),
                Some(block_type) => format!("{block_type} blocks {:?}", cell.value.shape()),
            };
            return Err(ErrorKind::shape(value.blocks().shape()).error(
                "parameter value",
                format!("{} blocks of a tensor {:?}", value.block_type(), value.shape()),
                needed,
                "load the parameter as f32",
            ));
        }
        cell.put(value.blocks(), false);
        (cell.blocks, cell.gathered) = (Some(value.block_type()), None);
        Ok(())
    }

    /// The current value, if it consists of quantized blocks ([`set_quantized`](Self::set_quantized)). Local.
    pub fn quantized(&self) -> Option<QuantizedTensor> {
        let cell = self.0.lock();
        let block_type = cell.blocks?;
        Some(QuantizedTensor::new(&cell.value, block_type).expect("checked when it was set"))
    }

    /// Stores the value with its first `dims` dimensions merged into one, from now on: [`get`](Self::get) returns a matrix of
    /// `experts * rows` rows for `[experts, rows, columns]`. Modules still compute with the shape that it has now
    /// ([`forward_value`](Self::forward_value)), and checkpoints have that shape too.
    ///
    /// Sharded over the rows of the matrix ([`FullyShard::shard_merged`](crate::plan::FullyShard::shard_merged)), the parameter,
    /// its gradient and its optimizer state are divided evenly, however few experts there are. Optimizers see the shape that modules
    /// see; for one that is not elementwise, such as [`Adafactor`](crate::optim::Adafactor), shards that cross the borders of
    /// experts are gathered in every step.
    ///
    /// Collective if the value is sharded on one of these dimensions.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there are fewer dimensions, or another number is merged already.
    #[doc(alias = "BlockShard")]
    #[track_caller]
    pub fn merge_dims(&self, dims: usize) -> Result<()> {
        let (value, merged) = {
            let cell = self.0.lock();
            (cell.value.detach(), cell.merged.clone())
        };
        if let Some(merged) = merged {
            if merged.dims() == dims {
                return Ok(());
            }
            let found = format!("the first {dims}, where the first {} are merged already", merged.dims());
            return Err(ErrorKind::shape(merged.shape()).error("merged dimensions", found, "the same", "merge once"));
        }
        let shape = MergedShape::new(value.shape(), dims)?;
        let stored = no_grad(|| value.flatten(0, dims as isize - 1))?;
        let mut cell = self.0.lock();
        let trainable = cell.value.has_gradient();
        (cell.merged, cell.gathered) = (Some(shape), None);
        cell.put(&stored, trainable);
        Ok(())
    }

    /// The current value in the shape that modules see, if it is stored with merged dimensions
    /// ([`merge_dims`](Self::merge_dims)). Local.
    pub fn merged(&self) -> Option<MergedTensor> {
        let cell = self.0.lock();
        let shape = cell.merged.as_ref()?;
        Some(MergedTensor::new(&cell.value.detach(), shape.shape()).expect("the value has the stored shape"))
    }

    /// The current value in the shape that modules see, detached. Collective if shards of merged dimensions cross borders.
    #[track_caller]
    pub(crate) fn separate(&self) -> Result<DTensor> {
        self.merged().map_or_else(|| Ok(self.get().detach()), |merged| merged.separate())
    }

    /// Creates a parameter that is stored with merged dimensions.
    pub(crate) fn with_merged_shape(stored: &DTensor, shape: MergedShape) -> Self {
        let param = Param::new(stored);
        param.0.lock().merged = Some(shape);
        param
    }

    /// A value for this parameter in the shape in which it is stored. Collective if it is sharded on a merged dimension.
    pub(crate) fn to_stored(&self, value: &DTensor) -> Result<DTensor> {
        let merged = self.0.lock().merged.clone().filter(|merged| merged.shape() == value.shape());
        merged.map_or_else(|| Ok(value.clone()), |merged| value.flatten(0, merged.dims() as isize - 1))
    }

    /// Returns the value that a module computes with: what [`get`](Self::get) returns, or what the settings of this parameter
    /// make of it, as a function of the leaf. Modules call it in `forward`.
    ///
    /// Local, unless the value is to be [kept gathered](Self::keep_gathered) and is not, a [hook](Self::on_use) communicates, or
    /// shards of [merged dimensions](Self::merge_dims) cross borders and are gathered: then all ranks of the mesh must call it.
    pub fn forward_value(&self) -> Result<DTensor> {
        let cell = self.0.lock();
        let (uses, merged) = (cell.uses.clone(), cell.merged.clone());
        let plain = uses.dtype.is_none() && uses.kept_over.is_empty() && uses.hook.is_none() && merged.is_none();
        if plain || !cell.value.dtype().is_float() {
            return Ok(cell.value.clone());
        }
        let leaf = cell.value.clone();
        let seen = |value: DTensor| match &merged {
            Some(shape) if value.shape() == leaf.shape() => MergedTensor::new(&value, shape.shape())?.separate(),
            _ => Ok(value),
        };
        if let Some(kept) = &cell.gathered {
            return seen(as_function_of(&leaf, kept.clone()));
        }
        // Not held while ranks communicate, or while a hook uses the parameter.
        drop(cell);
        let converted = no_grad(|| leaf.detach().to_dtype(uses.dtype.unwrap_or(leaf.dtype())))?;
        if let Some(hook) = &uses.hook {
            return seen(hook(&as_function_of(&leaf, converted))?);
        }
        // Gathered outside of the tape: the gradient of the gathered value is that of the leaf, which reduces it once.
        let mut layout = gathered_over(leaf.layout(), &uses.kept_over)?;
        if let Some(shape) = &merged {
            layout = shape.at_borders(&layout)?;
        }
        let value = converted.to_layout(&layout)?;
        if !uses.kept_over.is_empty() {
            self.0.lock().gathered = Some(value.clone());
        }
        seen(as_function_of(&leaf, value))
    }

    /// Sets the type that modules compute in; `None`: the type of the parameter. Local.
    ///
    /// The value is converted before it is gathered, so a gather of f32 shards moves bf16 elements. Gradients are added up in the
    /// type of the parameter; `reduced` is the type to which a gradient is rounded when it has been reduced.
    /// [`FsdpModule::set_mixed_precision`](crate::nn::FsdpModule::set_mixed_precision) sets both for a module.
    pub fn set_forward_dtype(&self, dtype: Option<DType>, reduced: Option<DType>) {
        let mut cell = self.0.lock();
        (cell.uses.dtype, cell.uses.reduce_dtype) = (dtype, reduced);
        cell.renew();
    }

    /// Sets the type of the gradient, such as f32 for a bf16 parameter: contributions are converted before they are added up.
    /// `None`: the type of the parameter. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if it is not a floating-point type.
    #[doc(alias = "grad_dtype")]
    pub fn set_grad_dtype(&self, dtype: Option<DType>) -> Result<()> {
        if let Some(dtype) = dtype.filter(|dtype| !dtype.is_float()) {
            return Err(ErrorKind::Argument.error(
                "gradient type",
                dtype.as_str(),
                "a floating-point type",
                "use f32, f64, f16 or bf16",
            ));
        }
        let mut cell = self.0.lock();
        cell.uses.grad_dtype = dtype;
        cell.renew();
        Ok(())
    }

    /// Keeps the value gathered over some mesh axes after its first use, until it is [set](Self::set) or
    /// [resharded](Self::reshard): the backward pass, and further forward passes before the next step, gather nothing. No axes: it is gathered for every
    /// use, and again in the backward pass. Local.
    ///
    /// While it is kept, the rank holds the value without these shards, next to its own. A hook ([`on_use`](Self::on_use)) turns this off.
    #[doc(alias = "set_reshard_after_forward")]
    pub fn keep_gathered(&self, axes: &[&str]) {
        let mut cell = self.0.lock();
        cell.uses.kept_over = axes.iter().map(ToString::to_string).collect();
        cell.gathered = None;
    }

    /// Drops the gathered value, if one is kept; the next use gathers again. Local.
    pub fn reshard(&self) {
        self.0.lock().gathered = None;
    }

    /// Whether a gathered value is kept, see [`keep_gathered`](Self::keep_gathered).
    pub fn is_gathered(&self) -> bool {
        self.0.lock().gathered.is_some()
    }

    /// Sets a function between the shards and what modules compute with, of operators that are differentiated: one that sends the shards in
    /// another form, or rebuilds the weight from several tensors. It gets the value in the type for the forward pass. Local.
    ///
    /// ```
    /// use shardwise::nn::Linear;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let layer = Linear::without_bias(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 4, 6)?;
    ///     // bf16 on the wire, f32 in the product
    ///     layer.weight.on_use(|shards| shards.to_dtype(DType::BF16)?.redistribute([Replicate])?.to_dtype(DType::F32));
    ///     let y = layer.forward(&DTensor::ones((8, 4), DType::F32, &mesh, [Shard(0)])?)?;
    ///     let gradients = y.sum_all()?.backward()?;
    ///     assert_eq!(gradients.get(&layer.weight.get())?.placements(), [Shard(0)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "fsdp_pre_all_gather")]
    #[doc(alias = "fsdp_post_all_gather")]
    pub fn on_use(&self, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.0.lock().uses.hook = Some(Arc::new(hook));
    }

    /// Removes the function of [`on_use`](Self::on_use). Local.
    pub fn clear_on_use(&self) {
        self.0.lock().uses.hook = None;
    }

    /// Layout of the current value.
    pub fn layout(&self) -> Layout {
        self.0.lock().value.layout().clone()
    }

    /// Shape of the whole tensor, as modules see it.
    pub fn shape(&self) -> Vec<usize> {
        let cell = self.0.lock();
        cell.merged.as_ref().map_or_else(|| cell.value.shape(), MergedShape::shape).to_vec()
    }

    /// Element type of the current value.
    pub fn dtype(&self) -> DType {
        self.0.lock().value.dtype()
    }

    /// Whether both are clones of the same parameter, as with tied weights.
    pub fn is_same(&self, other: &Param) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Returns `value`, the leaf in another layout or type, with a gradient that is passed to the leaf as it is: the leaf reduces
/// and converts the sum of all, once.
fn as_function_of(leaf: &DTensor, value: DTensor) -> DTensor {
    if value.shares_memory(leaf) && value.layout() == leaf.layout() && value.dtype() == leaf.dtype() {
        return leaf.clone();
    }
    let backward = || Box::new(PassGradient("forward_value")) as Box<_>;
    DTensor::recorded(vec![value], &[leaf], SaveForBackward::Nothing, backward).swap_remove(0)
}

/// A layout that is replicated over the named axes and unchanged over all remaining ones.
fn gathered_over(layout: &Layout, axes: &[String]) -> Result<Layout> {
    if axes.is_empty() {
        return Ok(layout.clone());
    }
    layout.without_axes(&layout.mesh().axis_positions(axes)?)
}

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Param({} {})", self.dtype().as_str(), self.layout())
    }
}
