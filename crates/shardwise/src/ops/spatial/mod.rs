//! Convolutions, windows and resampling of images and signals.

pub(in crate::ops) mod convolution;
pub(in crate::ops) mod windows;
pub(in crate::ops) mod fold;
pub(in crate::ops) mod resample;
