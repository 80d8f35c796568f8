//! Losses of `torch.nn.functional`.

use shardwise::ops::Reduction;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "nn.functional.mse_loss(input, target, size_average=None, reduce=None, reduction='mean', weight=None)" => |a|
        a.tensor("input")?.mse_loss(&a.tensor("target")?, reduction(a));
    "nn.functional.l1_loss(input, target, size_average=None, reduce=None, reduction='mean', weight=None)" => |a|
        a.tensor("input")?.l1_loss(&a.tensor("target")?, reduction(a));
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
