//! Losses as modules: options with PyTorch's names and defaults, and `forward` with as many tensors as the loss has.

use crate::error::{ErrorKind, Result};
use crate::nn::module::{Buffer, ForwardAll, Hooks};
use crate::ops::{CtcOptions, LossOptions, NllOptions, Reduction, TripletOptions};
use crate::tensor::DTensor;
use shardwise_derive::Module;

/// One module per loss: options with defaults, weights that are buffers, inputs, and the operator.
macro_rules! losses {
    ($($(#[$meta:meta])* $name:ident { $($field:ident: $T:ty = $default:expr),* } [$($weight:ident),*]
        ($($input:ident),+) => $apply:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// Hooks of the inputs, by position, and of the loss; see [`Hooks`].
            pub hooks: Hooks,
            $(
                #[doc = concat!("The buffer `", stringify!($weight), "`, if it was set.")]
                pub $weight: Option<Buffer>,
            )*
            $($field: $T,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { hooks: Hooks::default(), $($weight: None,)* $($field: $default,)* }
            }
        }

        impl $name {
            /// The loss with PyTorch's default options.
            pub fn new() -> Self {
                Self::default()
            }

            $(
                #[doc = concat!("Sets `", stringify!($field), "`.")]
                pub fn $field(mut self, $field: $T) -> Self {
                    self.$field = $field;
                    self
                }
            )*

            $(
                #[doc = concat!("Sets the buffer `", stringify!($weight), "`.")]
                pub fn $weight(mut self, $weight: &DTensor) -> Self {
                    self.$weight = Some(Buffer::new($weight));
                    self
                }
            )*

            /// Computes the loss. Collective: all ranks of the mesh must call it.
            #[track_caller]
            pub fn forward(&self, $($input: &DTensor),+) -> Result<DTensor> {
                Ok(self.forward_all(&[$($input),+])?.swap_remove(0))
            }
        }

        impl ForwardAll for $name {
            fn forward_all(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>> {
                $(let $field = self.$field;)*
                $(let $weight = self.$weight.as_ref().map(Buffer::get);)*
                self.hooks.run_all(inputs, |inputs| {
                    let [$($input),+] = inputs else {
                        let found = format!("{} tensors in {}", inputs.len(), stringify!($name));
                        let needed = concat!("the tensors" $(, " ", stringify!($input))+);
                        return Err(ErrorKind::Argument.error("inputs", found, needed, "pass these tensors, in this order"));
                    };
                    Ok(vec![$apply?])
                })
            }
        }
    )*};
}

losses! {
    /// Mean absolute error.
    L1Loss { reduction: Reduction = Reduction::Mean } [] (input, target) => input.l1_loss(target, reduction);
    /// Mean squared error.
    #[doc(alias = "MSELoss")]
    MseLoss { reduction: Reduction = Reduction::Mean } [] (input, target) => input.mse_loss(target, reduction);
    /// Huber loss divided by `beta`.
    SmoothL1Loss { reduction: Reduction = Reduction::Mean, beta: f64 = 1.0 } [] (input, target) =>
        input.smooth_l1_loss(target, beta, reduction);
    /// Half a squared error below `delta`, linear above.
    HuberLoss { reduction: Reduction = Reduction::Mean, delta: f64 = 1.0 } [] (input, target) =>
        input.huber_loss(target, delta, reduction);
    /// Cross entropy of logits and class indices, or class probabilities; the weight is one per class.
    ///
    /// ```
    /// use shardwise::nn::CrossEntropyLoss;
    /// use shardwise::ops::Reduction;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let loss = CrossEntropyLoss::new().label_smoothing(0.1).reduction(Reduction::Sum);
    ///     let logits = DTensor::zeros((4, 8), DType::F32, &mesh, [Shard(0)])?;
    ///     let target = DTensor::zeros(4, DType::I64, &mesh, [Shard(0)])?;
    ///     let found = loss.forward(&logits, &target)?.item::<f32>()?;
    ///     assert!((found - 4.0 * 8f32.ln()).abs() < 1e-5);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    CrossEntropyLoss { reduction: Reduction = Reduction::Mean, ignore_index: i64 = -100, label_smoothing: f64 = 0.0 } [weight]
        (input, target) => input.cross_entropy_with(
            target, weight.as_ref(), LossOptions { reduction, ignore_index, label_smoothing });
    /// Negative log likelihood of log probabilities and class indices; the weight is one per class.
    #[doc(alias = "NLLLoss")]
    NllLoss { reduction: Reduction = Reduction::Mean, ignore_index: i64 = -100 } [weight] (input, target) => {
        let options = LossOptions { reduction, ignore_index, label_smoothing: 0.0 };
        match &weight {
            Some(weight) => input.nll_loss_weighted(target, weight, options),
            None => input.nll_loss(target, options),
        }
    };
    /// Negative log likelihood of a Poisson distribution with the (logarithm of the) rate `input`.
    #[doc(alias = "PoissonNLLLoss")]
    PoissonNllLoss { reduction: Reduction = Reduction::Mean, log_input: bool = true, full: bool = false, eps: f64 = 1e-8 } []
        (input, target) => input.poisson_nll_loss(target, log_input, NllOptions { full, eps, reduction });
    /// Negative log likelihood of a normal distribution with mean `input` and variance `var`.
    #[doc(alias = "GaussianNLLLoss")]
    GaussianNllLoss { reduction: Reduction = Reduction::Mean, full: bool = false, eps: f64 = 1e-6 } [] (input, target, var) =>
        input.gaussian_nll_loss(target, var, NllOptions { full, eps, reduction });
    /// Kullback-Leibler divergence of log probabilities and target probabilities, or their logarithms with `log_target`.
    #[doc(alias = "KLDivLoss")]
    KlDivLoss { reduction: Reduction = Reduction::Mean, log_target: bool = false } [] (input, target) => match log_target {
        true => input.kl_div_log_target(target, reduction),
        false => input.kl_div(target, reduction),
    };
    /// Binary cross entropy of probabilities; the weight broadcasts to the losses.
    #[doc(alias = "BCELoss")]
    BceLoss { reduction: Reduction = Reduction::Mean } [weight] (input, target) =>
        input.binary_cross_entropy(target, weight.as_ref(), reduction);
    /// Binary cross entropy of logits; the weight broadcasts to the losses, `pos_weight` multiplies those of positive targets.
    #[doc(alias = "BCEWithLogitsLoss")]
    BceWithLogitsLoss { reduction: Reduction = Reduction::Mean } [weight, pos_weight] (input, target) =>
        input.bce_with_logits_weighted(target, weight.as_ref(), pos_weight.as_ref(), reduction);
    /// How much `input1` is not above `input2` by a margin where the target is 1, and the reverse where it is -1.
    MarginRankingLoss { reduction: Reduction = Reduction::Mean, margin: f64 = 0.0 } [] (input1, input2, target) =>
        input1.margin_ranking_loss(input2, target, margin, reduction);
    /// Distances where the target is 1, and how much they are below a margin where it is -1.
    HingeEmbeddingLoss { reduction: Reduction = Reduction::Mean, margin: f64 = 1.0 } [] (input, target) =>
        input.hinge_embedding_loss(target, margin, reduction);
    /// Logistic loss of targets 1 and -1.
    SoftMarginLoss { reduction: Reduction = Reduction::Mean } [] (input, target) => input.soft_margin_loss(target, reduction);
    /// Hinge loss of several classes per row; -1 ends the list of classes.
    #[doc(alias = "MultiLabelMarginLoss")]
    MultilabelMarginLoss { reduction: Reduction = Reduction::Mean } [] (input, target) =>
        input.multilabel_margin_loss(target, reduction);
    /// Binary cross entropy of all classes, averaged per row; the weight is one per class.
    #[doc(alias = "MultiLabelSoftMarginLoss")]
    MultilabelSoftMarginLoss { reduction: Reduction = Reduction::Mean } [weight] (input, target) =>
        input.multilabel_soft_margin_loss(target, weight.as_ref(), reduction);
    /// Hinge loss of one class per row; the weight is one per class.
    MultiMarginLoss { reduction: Reduction = Reduction::Mean, p: f64 = 1.0, margin: f64 = 1.0 } [weight] (input, target) =>
        input.multi_margin_loss(target, p, margin, weight.as_ref(), reduction);
    /// One minus the cosine where the target is 1, and how much it is above a margin where it is -1.
    CosineEmbeddingLoss { reduction: Reduction = Reduction::Mean, margin: f64 = 0.0 } [] (input1, input2, target) =>
        input1.cosine_embedding_loss(input2, target, margin, reduction);
    /// How much the positive is not closer to the anchor than the negative by a margin.
    TripletMarginLoss { reduction: Reduction = Reduction::Mean, margin: f64 = 1.0, p: f64 = 2.0, eps: f64 = 1e-6, swap: bool = false } []
        (anchor, positive, negative) =>
        anchor.triplet_margin_loss(positive, negative, TripletOptions { margin, p, eps, swap, reduction });
}

/// Connectionist temporal classification: the negative log likelihood of sequences that are not aligned.
#[doc(alias = "CTCLoss")]
#[derive(Clone, Default, Module)]
pub struct CtcLoss {
    /// Hooks of the log probabilities and the targets, and of the loss; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    options: CtcOptions,
}

impl CtcLoss {
    /// Creates the loss.
    pub fn new(options: CtcOptions) -> Self {
        CtcLoss { hooks: Hooks::default(), options }
    }

    /// Computes the loss of log probabilities `[time, n, classes]` and targets, with the lengths of each sequence.
    #[track_caller]
    pub fn forward(
        &self,
        log_probs: &DTensor,
        targets: &DTensor,
        input_lengths: &[usize],
        target_lengths: &[usize],
    ) -> Result<DTensor> {
        let mut found = self.hooks.run_all(&[log_probs, targets], |x| {
            Ok(vec![x[0].ctc_loss(&x[1], input_lengths, target_lengths, self.options)?])
        })?;
        Ok(found.swap_remove(0))
    }
}
