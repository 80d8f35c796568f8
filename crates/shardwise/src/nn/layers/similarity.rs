//! Layers of two inputs: similarities, distances and the bilinear form.

use crate::error::{ErrorKind, Result};
use crate::nn::build::Builder;
use crate::nn::init::Init;
use crate::nn::module::{ForwardAll, Hooks};
use crate::param::Param;
use crate::tensor::DTensor;
use shardwise_derive::Module;

/// Runs a layer of two inputs between its hooks.
#[track_caller]
fn of_two(
    name: &str,
    hooks: &Hooks,
    inputs: &[&DTensor],
    compute: impl FnOnce(&DTensor, &DTensor) -> Result<DTensor>,
) -> Result<Vec<DTensor>> {
    hooks.run_all(inputs, |x| match x {
        [a, b] => Ok(vec![compute(a, b)?]),
        _ => {
            let found = format!("{} tensors in {name}", x.len());
            Err(ErrorKind::Argument.error("inputs", found, "two tensors", "pass the first and the second input"))
        }
    })
}

macro_rules! pair_layers {
    ($($(#[$meta:meta])* $name:ident { $($field:ident: $T:ty),* }, |$a:ident, $b:ident| $apply:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// Hooks of both inputs and of the output; see [`Hooks`].
            pub hooks: Hooks,
            $($field: $T,)*
        }

        impl $name {
            /// Creates the layer; it has no parameters.
            pub fn new($($field: $T),*) -> Self {
                $name { hooks: Hooks::default(), $($field),* }
            }

            /// Computes the output for two inputs.
            #[track_caller]
            pub fn forward(&self, $a: &DTensor, $b: &DTensor) -> Result<DTensor> {
                Ok(self.forward_all(&[$a, $b])?.swap_remove(0))
            }
        }

        impl ForwardAll for $name {
            fn forward_all(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>> {
                $(let $field = self.$field;)*
                of_two(stringify!($name), &self.hooks, inputs, |$a, $b| $apply)
            }
        }
    )*};
}

pair_layers! {
    /// The cosine of the angle between vectors along dimension `dim`; lengths count as at least `eps`, in PyTorch 1e-8.
    CosineSimilarity { dim: isize, eps: f64 }, |a, b| a.cosine_similarity(b, dim, eps);
    /// The norm of order `p` of the difference of rows, to which `eps` is added, in PyTorch 1e-6.
    PairwiseDistance { p: f64, eps: f64, keepdim: bool }, |a, b| a.pairwise_distance(b, p, eps, keepdim);
}

/// Bilinear layer: `a W b + bias` for features of two inputs.
#[derive(Module)]
pub struct Bilinear {
    /// Weight `[out, in1, in2]`.
    pub weight: Param,
    /// Bias `[out]`.
    pub bias: Option<Param>,
    /// Hooks of both inputs and of the output; see [`Hooks`].
    pub hooks: Hooks,
}

impl Bilinear {
    /// Builds the layer, with PyTorch's initializer: uniform within `1 / sqrt(in1)`.
    pub fn new(builder: &Builder, inputs: [usize; 2], outputs: usize, bias: bool) -> Result<Self> {
        let bound = 1.0 / (inputs[0].max(1) as f64).sqrt();
        let uniform = |name: &str, shape: &[usize]| builder.param(name, shape, Init::Uniform(-bound, bound));
        let weight = uniform("weight", &[outputs, inputs[0], inputs[1]])?;
        let bias = bias.then(|| uniform("bias", &[outputs])).transpose()?;
        Ok(Bilinear { weight, bias, hooks: builder.hooks() })
    }

    /// Computes the output for two inputs `[.., in1]` and `[.., in2]`.
    #[track_caller]
    pub fn forward(&self, a: &DTensor, b: &DTensor) -> Result<DTensor> {
        Ok(self.forward_all(&[a, b])?.swap_remove(0))
    }
}

impl ForwardAll for Bilinear {
    fn forward_all(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>> {
        let bias = self.bias.as_ref().map(Param::forward_value).transpose()?;
        of_two("Bilinear", &self.hooks, inputs, |a, b| a.bilinear(b, &self.weight.forward_value()?, bias.as_ref()))
    }
}
