//! Special functions, elementwise. Names are those of ATen: PyTorch's `torch.special.erfcx` is `special_erfcx`, and functions that
//! `torch` itself has, such as `lgamma`, have the same name here.

mod binary;
mod unary;

use crate::ops::OpEntry;

pub(in crate::ops) const UNARY_OPS: &[OpEntry] = unary::OPS;
pub(in crate::ops) const ORDER_OPS: &[OpEntry] = unary::ORDER_OPS;
pub(in crate::ops) const BINARY_OPS: &[OpEntry] = binary::OPS;
