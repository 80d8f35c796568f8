//! Parameters: leaves that an optimizer replaces and that modules and optimizers share.

use std::sync::Arc;

use candle_core::DType;
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::tensor::DTensor;

/// A parameter: a cell that holds the current leaf. Clones share it.
#[derive(Clone)]
pub struct Param(Arc<Mutex<DTensor>>);

impl Param {
    /// A parameter with a first value.
    pub fn new(value: &DTensor) -> Self {
        Param(Arc::new(Mutex::new(value.requires_grad())))
    }

    /// The current leaf: the same one until [`set`](Self::set) replaces it.
    pub fn get(&self) -> DTensor {
        self.0.lock().clone()
    }

    /// Replaces the value; it must have the same shape.
    pub fn set(&self, value: &DTensor) -> Result<()> {
        let mut current = self.0.lock();
        if value.shape() != current.shape() {
            let (found, needed) = (format!("shape {:?}", value.shape()), format!("shape {:?}", current.shape()));
            return Err(Error::invalid("parameter", found, needed, "make a new parameter for another shape"));
        }
        *current = value.requires_grad();
        Ok(())
    }

    /// How the current value lies.
    pub fn layout(&self) -> Layout {
        self.0.lock().layout().clone()
    }

    /// Its shape.
    pub fn shape(&self) -> Vec<usize> {
        self.0.lock().shape().to_vec()
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.0.lock().dtype()
    }

    /// Whether two are the same parameter.
    pub fn is_same(&self, other: &Param) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
