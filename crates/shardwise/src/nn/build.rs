//! Where a model's parameters are made: mesh, type, path and placement, apart from the model.

use std::sync::Arc;

use candle_core::DType;

use super::init::Init;
use super::module::{Buffer, join};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::param::Param;
use crate::placement::Placement;

/// Chooses placements by path and shape.
type Place = Arc<dyn Fn(&str, &[usize]) -> Vec<Placement> + Send + Sync>;

/// Makes parameters at a path. What a parameter's initial value is does not depend on how it lies.
#[derive(Clone)]
pub struct Builder {
    mesh: DeviceMesh,
    dtype: DType,
    path: String,
    place: Place,
}

impl Builder {
    /// Parameters in f32, replicated over a mesh.
    pub fn new(mesh: &DeviceMesh) -> Self {
        let axes = mesh.ndim();
        let place = Arc::new(move |_: &str, _: &[usize]| vec![Placement::Replicate; axes]);
        Builder { mesh: mesh.clone(), dtype: DType::F32, path: String::new(), place }
    }

    /// The same with parameters of another type.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The same with placements chosen by dotted path and shape.
    pub fn placed(mut self, place: impl Fn(&str, &[usize]) -> Vec<Placement> + Send + Sync + 'static) -> Self {
        self.place = Arc::new(place);
        self
    }

    /// The place of a part of the model.
    #[must_use]
    pub fn at(&self, name: &str) -> Self {
        Builder { path: join(&self.path, name), ..self.clone() }
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// A parameter.
    pub fn param(&self, name: &str, shape: &[usize], init: Init) -> Result<Param> {
        let placements = (self.place)(&join(&self.path, name), shape);
        Ok(Param::new(&init.make(shape, self.dtype, &self.mesh, placements)?))
    }

    /// A buffer.
    pub fn buffer(&self, name: &str, shape: &[usize], init: Init) -> Result<Buffer> {
        let placements = (self.place)(&join(&self.path, name), shape);
        Ok(Buffer::new(&init.make(shape, self.dtype, &self.mesh, placements)?))
    }
}
