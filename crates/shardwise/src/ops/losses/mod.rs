//! Losses.

pub(in crate::ops) mod loss;
pub(in crate::ops) mod class_loss;
pub(in crate::ops) mod margin_loss;
