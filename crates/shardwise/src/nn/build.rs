//! Where a model's parameters are made: mesh, type, path and placement, apart from the model.

use std::sync::Arc;

use candle_core::DType;

use super::hooks::Hooks;
use super::init::Init;
use super::module::{Buffer, join};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::layout::Layout;
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Chooses layouts by path and shape.
type Place = Arc<dyn Fn(&str, &[usize]) -> Result<Layout> + Send + Sync>;

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
        let ranks = mesh.mesh().clone();
        let place = Arc::new(move |_: &str, shape: &[usize]| Layout::replicated(&ranks, shape));
        Builder { mesh: mesh.clone(), dtype: DType::F32, path: String::new(), place }
    }

    /// The same with parameters of another type.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// The same with placements chosen by dotted path and shape.
    pub fn placed(self, place: impl Fn(&str, &[usize]) -> Vec<Placement> + Send + Sync + 'static) -> Self {
        let ranks = self.mesh.mesh().clone();
        self.laid_out(move |path, shape| Layout::new(&ranks, shape, place(path, shape)))
    }

    /// The same with layouts chosen by dotted path and shape, for orders of cuts that placements do not say.
    pub fn laid_out(mut self, place: impl Fn(&str, &[usize]) -> Result<Layout> + Send + Sync + 'static) -> Self {
        self.place = Arc::new(place);
        self
    }

    /// The place of a part of the model.
    #[must_use]
    pub fn at(&self, name: &str) -> Self {
        Builder { path: join(&self.path, name), ..self.clone() }
    }

    /// Hooks of the module that is built here; they know its path from the start.
    pub fn hooks(&self) -> Hooks {
        Hooks::at(&self.path)
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// A parameter.
    pub fn param(&self, name: &str, shape: &[usize], init: Init) -> Result<Param> {
        Ok(Param::new(&self.tensor(name, shape, init)?))
    }

    /// A buffer.
    pub fn buffer(&self, name: &str, shape: &[usize], init: Init) -> Result<Buffer> {
        Ok(Buffer::new(&self.tensor(name, shape, init)?))
    }

    fn tensor(&self, name: &str, shape: &[usize], init: Init) -> Result<DTensor> {
        let layout = (self.place)(&join(&self.path, name), shape)?;
        init.make_in(&layout, self.dtype, &self.mesh)
    }
}
