//! Parameters: shared cells whose tensor an optimizer replaces at every step.

use std::fmt;
use std::sync::Arc;

use candle_core::DType;
use parking_lot::Mutex;

use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::tensor::DTensor;
use shardwise_kernels::quantized::BlockType;

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
pub struct Param(Arc<Mutex<DTensor>>);

impl Param {
    /// Creates a parameter with this value, detached from the graph that computed it. Local, no copy.
    pub fn new(value: &DTensor) -> Self {
        Param(Arc::new(Mutex::new(value.requires_grad())))
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
        let mut current = self.0.lock();
        if trainable != current.has_gradient() {
            *current = if trainable { current.requires_grad() } else { current.detach() };
        }
    }

    /// Whether the parameter is trainable, that is, not frozen.
    pub fn requires_grad(&self) -> bool {
        self.0.lock().has_gradient()
    }

    /// Returns the current value as a leaf: the same one until the next [`set`](Self::set). A frozen one is no leaf.
    pub fn get(&self) -> DTensor {
        self.0.lock().clone()
    }

    /// Replaces the value by one of the same shape, in any layout and type. Local. Leaves returned earlier are unchanged, and a
    /// frozen parameter stays frozen.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the shape differs.
    pub fn set(&self, value: &DTensor) -> Result<()> {
        let mut current = self.0.lock();
        if value.shape() != current.shape() {
            return Err(ErrorKind::shape(value.shape()).error(
                "parameter value",
                format!("shape {:?}", value.shape()),
                format!("{:?}, the shape of the parameter", current.shape()),
                "reshape the value, or create a new parameter",
            ));
        }
        *current = if current.has_gradient() { value.requires_grad() } else { value.detach() };
        Ok(())
    }

    /// Replaces the value, a matrix `[out, in]`, by quantized blocks of it: u8 `[out, blocks, bytes of a block]`, in any
    /// layout. Local.
    ///
    /// For inference: [`Linear`](crate::nn::Linear) and [`Embedding`](crate::nn::Embedding) compute with the blocks as they are,
    /// and optimizers cannot change them.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if these are no blocks of a matrix of this shape.
    pub fn set_quantized(&self, blocks: &DTensor) -> Result<()> {
        let mut current = self.0.lock();
        let size = blocks.shape().last().and_then(|&bytes| BlockType::of_size(bytes));
        let fits = match (current.shape(), blocks.shape(), size) {
            (&[rows, columns], &[out, count, _], Some(block)) => rows == out && columns == count * block.elements(),
            (old, new, Some(_)) => old == new,
            _ => false,
        };
        if !fits || blocks.dtype() != DType::U8 {
            return Err(ErrorKind::shape(blocks.shape()).error(
                "parameter value",
                format!("{} {:?}", blocks.dtype().as_str(), blocks.shape()),
                format!("u8 blocks of a matrix {:?}: [out, blocks, bytes of a block]", current.shape()),
                "load the parameter as f32",
            ));
        }
        *current = blocks.detach();
        Ok(())
    }

    /// Layout of the current value.
    pub fn layout(&self) -> Layout {
        self.0.lock().layout().clone()
    }

    /// Shape of the whole tensor.
    pub fn shape(&self) -> Vec<usize> {
        self.0.lock().shape().to_vec()
    }

    /// Element type of the current value.
    pub fn dtype(&self) -> DType {
        self.0.lock().dtype()
    }

    /// Whether both are clones of the same parameter, as with tied weights.
    pub fn is_same(&self, other: &Param) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Param({} {})", self.dtype().as_str(), self.layout())
    }
}
