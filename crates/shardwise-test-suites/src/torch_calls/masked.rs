//! Reductions and normalizations of the elements that a mask selects, `torch.masked`.

use shardwise::prelude::*;

use super::arguments::Arguments;
use super::calls::calls;
use super::reductions::spread;

calls! {
    "masked.sum(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_sum(&a.ints("dim"), a.flag("keepdim"), mask(a).as_ref());
    "masked.prod(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_prod(&a.ints("dim"), a.flag("keepdim"), mask(a).as_ref());
    "masked.cumsum(input, dim, *, dtype=None, mask=None)" => |a| input(a)?.masked_cumsum(a.int("dim")?, mask(a).as_ref());
    "masked.cumprod(input, dim, *, dtype=None, mask=None)" => |a| input(a)?.masked_cumprod(a.int("dim")?, mask(a).as_ref());
    "masked.amax(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_amax(&a.ints("dim"), a.flag("keepdim"), mask(a).as_ref());
    "masked.amin(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_amin(&a.ints("dim"), a.flag("keepdim"), mask(a).as_ref());
    // PyTorch's indices have the type of the tensor, ours are i64.
    "masked.argmax(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_argmax(a.optional_int("dim"), a.flag("keepdim"), mask(a).as_ref())?.to_dtype(a.tensor("input")?.dtype());
    "masked.argmin(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_argmin(a.optional_int("dim"), a.flag("keepdim"), mask(a).as_ref())?.to_dtype(a.tensor("input")?.dtype());
    "masked.mean(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_mean(&a.ints("dim"), a.flag("keepdim"), mask(a).as_ref());
    "masked.median(input, dim=-1, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_median(a.int("dim")?, a.flag("keepdim"), mask(a).as_ref());
    "masked.norm(input, ord=2.0, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_norm(a.float("ord")?, &a.ints("dim"), a.flag("keepdim"), mask(a).as_ref());
    "masked.normalize(input, ord, dim, *, eps=1e-12, dtype=None, mask=None)" => |a|
        input(a)?.masked_normalize(a.float("ord")?, a.int("dim")?, a.float("eps")?, mask(a).as_ref());
    "masked.var(input, dim=None, unbiased=None, *, correction=1, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_var(&spread(a).0, spread(a).1, a.flag("keepdim"), mask(a).as_ref());
    "masked.std(input, dim=None, unbiased=None, *, correction=1, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_std(&spread(a).0, spread(a).1, a.flag("keepdim"), mask(a).as_ref());
    "masked.softmax(input, dim, *, dtype=None, mask=None)" => |a| input(a)?.masked_softmax(a.int("dim")?, mask(a).as_ref());
    "masked.log_softmax(input, dim, *, dtype=None, mask=None)" => |a|
        input(a)?.masked_log_softmax(a.int("dim")?, mask(a).as_ref());
    "masked.softmin(input, dim, *, dtype=None, mask=None)" => |a| input(a)?.masked_softmin(a.int("dim")?, mask(a).as_ref());
    "masked.logsumexp(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        input(a)?.masked_logsumexp(&a.ints("dim"), a.flag("keepdim"), mask(a).as_ref())?.to_dtype(a.tensor("input")?.dtype());
    "masked.logaddexp(input, other, *, dtype=None, input_mask=None, other_mask=None)" => |a| a.tensor("input")?.masked_logaddexp(
        &a.tensor("other")?, a.optional_tensor("input_mask").as_ref(), a.optional_tensor("other_mask").as_ref());
}

/// The tensor, converted to the type that is asked for.
fn input(a: &Arguments<'_>) -> Result<DTensor> {
    a.converted(&a.tensor("input")?, "dtype")
}

fn mask(a: &Arguments<'_>) -> Option<DTensor> {
    a.optional_tensor("mask")
}
