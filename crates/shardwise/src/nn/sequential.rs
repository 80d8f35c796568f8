//! Layers one after the other.

use super::build::Builder;
use super::module::{Forward, Hooks, Item, Layer, Module, join};
use crate::error::Result;
use crate::tensor::DTensor;

/// Layers one after the other; their names are their numbers, from 0.
///
/// ```
/// use shardwise::nn::{Conv2d, Flatten, Linear, MaxPool2d, Relu, Sequential};
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let model = Sequential::new(&Builder::new(&mesh))
///         .build(|at| Conv2d::new(at, 1, 4, 3, Default::default()))?
///         .add(Relu::new())
///         .add(MaxPool2d::new(2))
///         .add(Flatten::new())
///         .build(|at| Linear::new(at, 36, 10))?;
///     let y = model.forward(&DTensor::randn((4, 1, 8, 8), &mesh, [Shard(0)])?)?;
///     assert_eq!((y.shape(), y.placements()), (&[4, 10][..], &[Shard(0)][..]));
///     assert_eq!(model.named_parameters()[2].0, "4.weight");
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub struct Sequential {
    /// Hooks.
    pub hooks: Hooks,
    layers: Vec<Box<dyn Layer>>,
    at: Builder,
}

impl Sequential {
    /// No layers yet.
    pub fn new(at: &Builder) -> Self {
        Sequential { hooks: at.hooks(), layers: Vec::new(), at: at.clone() }
    }

    /// A layer after the others.
    #[must_use]
    #[allow(clippy::should_implement_trait)]
    pub fn add(mut self, layer: impl Layer + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// A layer after the others, built at its number.
    pub fn build<L: Layer + 'static>(self, layer: impl FnOnce(&Builder) -> Result<L>) -> Result<Self> {
        let layer = layer(&self.at.at(&self.layers.len().to_string()))?;
        Ok(self.add(layer))
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are none: the output is the input.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

impl Module for Sequential {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        if self.hooks.walk_replacement(path, "hooks", visit) {
            return;
        }
        visit(path, Item::Module("Sequential"));
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
