//! The builder of parameters: it knows the mesh, the type, the path and the layout, so that model code does not.

use std::sync::Arc;

use candle_core::DType;
use parking_lot::Mutex;

use super::init::Init;
use super::module::{Buffer, Hooks, Module, ModuleItem, join};
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result, nearest};
use crate::layout::{Layout, MergedShape};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// Chooses layouts by path and shape.
type LayoutFn = Arc<dyn Fn(&str, &[usize]) -> Result<Layout> + Send + Sync>;

/// Creates the parameters and buffers of a model, each under its dotted path.
///
/// Model code passes `builder.child("name")` down to its parts, as candle passes `vb.pp("name")`, and never mentions a
/// layout. Which layout a parameter gets is decided by path, by whoever created the builder ([`placed`](Self::placed),
/// [`ShardingPlan::builder`](crate::plan::ShardingPlan::builder)). Every rank allocates its local shards only. Initial values
/// are the same for every layout and every number of ranks.
///
/// Local: creating parameters communicates nothing.
#[doc(alias = "VarBuilder")]
#[derive(Clone)]
pub struct Builder {
    mesh: DeviceMesh,
    dtype: DType,
    path: String,
    layout_of: LayoutFn,
    /// Whether initializers are ignored.
    zeros: bool,
    /// Paths at which parameters and buffers were built, by all clones.
    built: Arc<Mutex<Vec<String>>>,
}

impl Builder {
    /// A builder at the root of a model, for parameters in f32 that are replicated over the mesh.
    pub fn new(mesh: &DeviceMesh) -> Self {
        let ranks = mesh.mesh().clone();
        let layout_of = Arc::new(move |_: &str, shape: &[usize]| Layout::replicated(&ranks, shape));
        Builder {
            mesh: mesh.clone(),
            dtype: DType::F32,
            path: String::new(),
            layout_of,
            zeros: false,
            built: Arc::default(),
        }
    }

    /// Sets the type of parameters and buffers.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Creates all parameters and buffers as zeros, whatever their initializers: for a model whose weights are loaded next.
    ///
    /// No random numbers are drawn, and no memory is allocated: every element of a shard is the same zero.
    pub fn zeros(mut self) -> Self {
        self.zeros = true;
        self
    }

    /// Whether all parameters and buffers are zeros, see [`zeros`](Self::zeros).
    pub(crate) fn is_zeros(&self) -> bool {
        self.zeros
    }

    /// Sets the placements of parameters and buffers, by dotted path and shape.
    ///
    /// ```
    /// use shardwise::nn::Linear;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let builder = Builder::new(&mesh).placed(|path, _| match path {
    ///         "up.weight" => vec![Shard(0)],
    ///         _ => vec![Replicate],
    ///     });
    ///     let up = Linear::new(&builder.child("up"), 4, 6)?;
    ///     assert_eq!(up.weight.get().local_shape(), [3, 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn placed(self, placements: impl Fn(&str, &[usize]) -> Vec<Placement> + Send + Sync + 'static) -> Self {
        let ranks = self.mesh.mesh().clone();
        self.laid_out(move |path, shape| Layout::new(&ranks, shape, placements(path, shape)))
    }

    /// Sets the layouts of parameters and buffers, by dotted path and shape.
    ///
    /// For what placements do not determine by themselves: the order in which several mesh axes shard one dimension. A layout for the
    /// shape with leading dimensions merged stores a parameter so ([`Param::merge_dims`]).
    pub fn laid_out(mut self, layout_of: impl Fn(&str, &[usize]) -> Result<Layout> + Send + Sync + 'static) -> Self {
        self.layout_of = Arc::new(layout_of);
        self
    }

    /// Returns the builder of a submodule; `name` must be the name of its field.
    ///
    /// [`check`](Self::check) finds names that are not.
    #[doc(alias = "pp")]
    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        Builder { path: join(&self.path, name), ..self.clone() }
    }

    /// Checks that a module that was built here has a parameter or buffer at every path at which one was built.
    ///
    /// Local. Finds a name given to [`child`](Self::child) that is not the name of the field: plans, and layouts chosen by
    /// path, would miss the parameters that were built under it. [`ShardingPlan::build`] calls this.
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
    ///     let builder = Builder::new(&world.mesh([("tp", 2)])?);
    ///     let pair = Pair { up: Linear::new(&builder.child("up"), 4, 8)?, down: Linear::new(&builder.child("dwon"), 8, 4)? };
    ///     let error = builder.check(&pair).unwrap_err().to_string();
    ///     assert!(error.contains("`dwon.weight`") && error.contains("did you mean `down.weight`"), "{error}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn check(&self, module: &dyn Module) -> Result<()> {
        let mut has = Vec::new();
        module.walk(&self.path, &mut |path, item| {
            if matches!(item, ModuleItem::Param(_) | ModuleItem::Buffer(_)) {
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
            "names given to Builder::child and Builder::param that are those of the module's fields",
            format!("did you mean {}?", nearest(lost, has)),
        ))
    }

    /// Creates the hooks of the module that is built here. Errors in its forward pass then name its path.
    pub fn hooks(&self) -> Hooks {
        Hooks::at(&self.path)
    }

    /// The mesh that parameters are created on.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Creates a parameter under the field name `name`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the layout for its path does not fit the shape, or the initializer needs
    /// another number of dimensions.
    #[doc(alias = "register_parameter")]
    pub fn param(&self, name: &str, shape: &[usize], init: Init) -> Result<Param> {
        let value = self.tensor(name, shape, init)?;
        Ok(match MergedShape::between(shape, value.shape()) {
            Some(merged) => Param::with_merged_shape(&value, merged),
            None => Param::new(&value),
        })
    }

    /// Creates a buffer under the field name `name`: a tensor of the state that is not trained.
    ///
    /// # Errors
    /// As for [`param`](Self::param).
    #[doc(alias = "register_buffer")]
    pub fn buffer(&self, name: &str, shape: &[usize], init: Init) -> Result<Buffer> {
        let value = self.tensor(name, shape, init)?;
        if value.shape() != shape {
            return Err(other_shape(&join(&self.path, name), shape, value.layout()));
        }
        Ok(Buffer::new(&value))
    }

    fn tensor(&self, name: &str, shape: &[usize], init: Init) -> Result<DTensor> {
        let path = join(&self.path, name);
        let layout = (self.layout_of)(&path, shape)?;
        if layout.shape() != shape && MergedShape::between(shape, layout.shape()).is_none() {
            return Err(other_shape(&path, shape, &layout));
        }
        self.built.lock().push(path);
        if self.zeros {
            return DTensor::unallocated(&self.mesh, layout, self.dtype);
        }
        // Fans are those of the shape that the module has, also where the layout merges dimensions.
        init.initial_value(shape)?.create_in(&layout, self.dtype, &self.mesh)
    }
}

fn other_shape(path: &str, shape: &[usize], layout: &Layout) -> Error {
    let found = format!("{layout} for `{path}` of shape {shape:?}");
    let needed = "a layout of that shape, or for a parameter of that shape with leading dimensions merged";
    ErrorKind::Layout.error("layout", found, needed, "build the layout from the shape that the function is given")
}
