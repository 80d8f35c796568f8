//! Generation of text with a language model.

mod sampling;

pub use sampling::Sampling;
