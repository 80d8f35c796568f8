//! Losses of `torch.nn.functional`.

use shardwise::ops::{CtcOptions, LossOptions, NllOptions, Reduction, TripletOptions};
use shardwise::prelude::*;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "nn.functional.mse_loss(input, target, size_average=None, reduce=None, reduction='mean', weight=None)" => |a|
        a.tensor("input")?.mse_loss(&a.tensor("target")?, reduction(a));
    "nn.functional.l1_loss(input, target, size_average=None, reduce=None, reduction='mean', weight=None)" => |a|
        a.tensor("input")?.l1_loss(&a.tensor("target")?, reduction(a));
    "nn.functional.smooth_l1_loss(input, target, size_average=None, reduce=None, reduction='mean', beta=1.0)" => |a|
        a.tensor("input")?.smooth_l1_loss(&a.tensor("target")?, a.float("beta")?, reduction(a));
    "nn.functional.huber_loss(input, target, reduction='mean', delta=1.0, weight=None)" => |a|
        a.tensor("input")?.huber_loss(&a.tensor("target")?, a.float("delta")?, reduction(a));
    "nn.functional.kl_div(input, target, size_average=None, reduce=None, reduction='mean', log_target=False)" => |a| {
        let (x, target) = (a.tensor("input")?, a.tensor("target")?);
        match (a.flag("log_target"), reduction(a)) {
            (false, reduction) => x.kl_div(&target, reduction),
            (true, reduction) => x.kl_div_log_target(&target, reduction),
        }
    };
    // Targets of the type of the logits are probabilities of classes; weights are one per class.
    "nn.functional.cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', label_smoothing=0.0)" =>
        |a| a.tensor("input")?.cross_entropy_with(
            &a.tensor("target")?, a.optional_tensor("weight").as_ref(), options(a)?);
    "nn.functional.linear_cross_entropy(input, linear_weight, target, *, linear_bias=None, weight=None, reduction='mean', ignore_index=-100, label_smoothing=0.0, options=None)" =>
        |a| a.tensor("input")?.linear_cross_entropy(&a.tensor("linear_weight")?, a.optional_tensor("linear_bias").as_ref(),
            &a.tensor("target")?, a.optional_tensor("weight").as_ref(), options(a)?);
    "nn.functional.nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean')" =>
        |a| match a.optional_tensor("weight") {
            Some(weight) => a.tensor("input")?.nll_loss_weighted(&a.tensor("target")?, &weight, options(a)?),
            None => a.tensor("input")?.nll_loss(&a.tensor("target")?, options(a)?),
        };
    "nn.functional.binary_cross_entropy(input, target, weight=None, size_average=None, reduce=None, reduction='mean')" =>
        |a| a.tensor("input")?.binary_cross_entropy(
            &a.tensor("target")?, a.optional_tensor("weight").as_ref(), reduction(a));
    "nn.functional.binary_cross_entropy_with_logits(input, target, weight=None, size_average=None, reduce=None, reduction='mean', pos_weight=None)" =>
        |a| a.tensor("input")?.bce_with_logits_weighted(&a.tensor("target")?, a.optional_tensor("weight").as_ref(),
            a.optional_tensor("pos_weight").as_ref(), reduction(a));
    "nn.functional.hinge_embedding_loss(input, target, margin=1.0, size_average=None, reduce=None, reduction='mean')" =>
        |a| a.tensor("input")?.hinge_embedding_loss(&a.tensor("target")?, a.float("margin")?, reduction(a));
    "nn.functional.gaussian_nll_loss(input, target, var, full=False, eps=1e-06, reduction='mean')" => |a|
        a.tensor("input")?.gaussian_nll_loss(&a.tensor("target")?, &a.tensor("var")?, NllOptions {
            full: a.flag("full"), eps: a.float("eps")?, reduction: reduction(a) });
    "nn.functional.poisson_nll_loss(input, target, log_input=True, full=False, size_average=None, eps=1e-08, reduce=None, reduction='mean')" =>
        |a| a.tensor("input")?.poisson_nll_loss(&a.tensor("target")?, a.flag("log_input"), NllOptions {
            full: a.flag("full"), eps: a.float("eps")?, reduction: reduction(a) });
    "nn.functional.margin_ranking_loss(input1, input2, target, margin=0, size_average=None, reduce=None, reduction='mean')" =>
        |a| a.tensor("input1")?.margin_ranking_loss(
            &a.tensor("input2")?, &a.tensor("target")?, a.float("margin")?, reduction(a));
    "nn.functional.soft_margin_loss(input, target, size_average=None, reduce=None, reduction='mean')" => |a|
        a.tensor("input")?.soft_margin_loss(&a.tensor("target")?, reduction(a));
    "nn.functional.multilabel_soft_margin_loss(input, target, weight=None, size_average=None, reduce=None, reduction='mean')" =>
        |a| a.tensor("input")?.multilabel_soft_margin_loss(
            &a.tensor("target")?, a.optional_tensor("weight").as_ref(), reduction(a));
    "nn.functional.multi_margin_loss(input, target, p=1, margin=1.0, weight=None, size_average=None, reduce=None, reduction='mean')" =>
        |a| a.tensor("input")?.multi_margin_loss(&a.tensor("target")?, a.float("p")?, a.float("margin")?,
            a.optional_tensor("weight").as_ref(), reduction(a));
    "nn.functional.multilabel_margin_loss(input, target, size_average=None, reduce=None, reduction='mean')" => |a|
        a.tensor("input")?.multilabel_margin_loss(&a.tensor("target")?, reduction(a));
    "nn.functional.cosine_embedding_loss(input1, input2, target, margin=0, size_average=None, reduce=None, reduction='mean')" =>
        |a| a.tensor("input1")?.cosine_embedding_loss(
            &a.tensor("input2")?, &a.tensor("target")?, a.float("margin")?, reduction(a));
    "nn.functional.triplet_margin_loss(anchor, positive, negative, margin=1.0, p=2, eps=1e-06, swap=False, size_average=None, reduce=None, reduction='mean')" =>
        |a| a.tensor("anchor")?.triplet_margin_loss(&a.tensor("positive")?, &a.tensor("negative")?, TripletOptions {
            margin: a.float("margin")?, p: a.float("p")?, eps: a.float("eps")?, swap: a.flag("swap"),
            reduction: reduction(a) });
    "nn.functional.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction='mean', zero_infinity=False)" =>
        |a| a.tensor("log_probs")?.ctc_loss(&a.tensor("targets")?, &lengths(a, "input_lengths")?,
            &lengths(a, "target_lengths")?, CtcOptions {
                blank: a.size("blank")?, reduction: reduction(a), zero_infinity: a.flag("zero_infinity") });
}

/// `reduction=` of a loss.
pub(super) fn reduction(a: &Arguments<'_>) -> Reduction {
    match a.text("reduction").as_deref() {
        Some("sum") => Reduction::Sum,
        Some("none") => Reduction::None,
        Some("batchmean") => Reduction::BatchMean,
        _ => Reduction::Mean,
    }
}

fn options(a: &Arguments<'_>) -> Result<LossOptions> {
    let ignore_index = a.optional_int("ignore_index").map_or(-100, |i| i as i64);
    Ok(LossOptions {
        reduction: reduction(a),
        ignore_index,
        label_smoothing: a.float("label_smoothing").unwrap_or(0.0),
    })
}

/// Lengths, as a list or a tensor.
fn lengths(a: &Arguments<'_>, name: &str) -> Result<Vec<usize>> {
    match a.optional_tensor(name) {
        Some(tensor) => {
            let numbers = tensor.full_tensor()?.flatten_all()?.to_vec1::<i64>()?;
            Ok(numbers.into_iter().map(|n| n as usize).collect())
        }
        None => Ok(a.sizes(name)),
    }
}
