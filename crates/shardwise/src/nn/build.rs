//! Where a model's parameters are made: mesh, type, path and placement, apart from the model.

use std::sync::Arc;

use candle_core::DType;
use parking_lot::Mutex;

use super::init::Init;
use super::module::{Buffer, Hooks, Item, Module, join};
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result, nearest};
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
    /// Paths at which parameters and buffers were built, by all clones.
    built: Arc<Mutex<Vec<String>>>,
}

impl Builder {
    /// Parameters in f32, replicated over a mesh.
    pub fn new(mesh: &DeviceMesh) -> Self {
        let ranks = mesh.mesh().clone();
        let place = Arc::new(move |_: &str, shape: &[usize]| Layout::replicated(&ranks, shape));
        Builder { mesh: mesh.clone(), dtype: DType::F32, path: String::new(), place, built: Arc::default() }
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

    /// Checks that a module that was built here has a parameter or buffer at every path at which one was built.
    ///
    /// Local. A name given to [`at`](Self::at) that is not the name of the field is found so: plans, and layouts chosen by
    /// path, would not reach the parameters that the builder made under it. [`ShardingPlan::build`] calls this.
    ///
    /// [`ShardingPlan::build`]: crate::plan::ShardingPlan::build
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with the path and the nearest ones that the module has.
    ///
    /// ```
    /// use shardwise::nn::{Builder, Linear, Module};
    /// use shardwise::prelude::*;
    ///
    /// #[derive(Module)]
    /// struct Pair {
    ///     up: Linear,
    ///     down: Linear,
    /// }
    ///
    /// launch(2, |world| {
    ///     let at = Builder::new(&world.mesh([("tp", 2)])?);
    ///     let pair = Pair { up: Linear::new(&at.at("up"), 4, 8)?, down: Linear::new(&at.at("dwon"), 8, 4)? };
    ///     let error = at.check(&pair).unwrap_err().to_string();
    ///     assert!(error.contains("`dwon.weight`") && error.contains("did you mean `down.weight`"), "{error}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn check(&self, module: &dyn Module) -> Result<()> {
        let mut has = Vec::new();
        module.walk(&self.path, &mut |path, item| {
            if matches!(item, Item::Param(_) | Item::Buffer(_)) {
                has.push(path.to_string());
            }
        });
        let inside = join(&self.path, "");
        let built = self.built.lock();
        let Some(lost) = built.iter().find(|path| path.starts_with(&inside) && !has.contains(path)) else {
            return Ok(());
        };
        Err(ErrorKind::Model.error(
            "module",
            format!("a parameter built as `{lost}`, where the module has none"),
            "names given to Builder::at and Builder::param that are those of the module's fields",
            format!("did you mean {}?", nearest(lost, has)),
        ))
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
        let path = join(&self.path, name);
        let layout = (self.place)(&path, shape)?;
        self.built.lock().push(path);
        init.make_in(&layout, self.dtype, &self.mesh)
    }
}
