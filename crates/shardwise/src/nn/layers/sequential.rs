//! A chain of layers.

use crate::error::Result;
use crate::nn::build::Builder;
use crate::nn::module::{Forward, Hooks, Layer, Module, ModuleItem, join};
use crate::tensor::DTensor;

/// A chain of layers, each applied to the output of the one before. Their names are their positions, as in PyTorch.
///
/// ```
/// use shardwise::nn::{Conv2d, Conv2dOptions, Flatten, Linear, MaxPool2d, Relu, Sequential};
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let model = Sequential::new(&Builder::new(&mesh))
///         .build(|builder| Conv2d::new(builder, Conv2dOptions::new(1, 4, 3)))?
///         .add(Relu::new())
///         .add(MaxPool2d::new(2))
///         .add(Flatten::new())
///         .build(|builder| Linear::new(builder, 36, 10))?;
///     let y = model.forward(&DTensor::randn((4, 1, 8, 8), &mesh, [Shard(0)])?)?;
///     assert_eq!((y.shape(), y.placements()), (&[4, 10][..], &[Shard(0)][..]));
///     assert_eq!(model.named_parameters()[2].0, "4.weight");
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub struct Sequential {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    layers: Vec<Box<dyn Layer>>,
    builder: Builder,
}

impl Sequential {
    /// An empty chain, whose layers [`build`](Self::build) builds below this path.
    pub fn new(builder: &Builder) -> Self {
        Sequential { hooks: builder.hooks(), layers: Vec::new(), builder: builder.clone() }
    }

    /// Appends a layer that has no parameters, or whose parameters were built under its position.
    #[must_use]
    #[allow(clippy::should_implement_trait)]
    pub fn add(mut self, layer: impl Layer + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Builds a layer with the builder of its position and appends it.
    pub fn build<L: Layer + 'static>(self, layer: impl FnOnce(&Builder) -> Result<L>) -> Result<Self> {
        let layer = layer(&self.builder.child(&self.layers.len().to_string()))?;
        Ok(self.add(layer))
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are no layers; the output is then the input.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

impl Module for Sequential {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        if self.hooks.walk_replacement(path, "hooks", visit) {
            return;
        }
        visit(path, ModuleItem::Module("Sequential"));
        for (i, layer) in self.layers.iter().enumerate() {
            layer.walk(&join(path, &i.to_string()), visit);
        }
        self.hooks.walk(&join(path, "hooks"), visit);
    }
}

impl Forward for Sequential {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)))
    }
}
