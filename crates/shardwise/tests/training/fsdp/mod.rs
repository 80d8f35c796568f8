//! FSDP as PyTorch's users know it: when weights are gathered and gradients reduced, in which types, what is frozen, and the
//! states of models and optimizers.

mod experts;
mod frozen;
mod gathering;
mod hooks;
mod init;
mod mixed_precision;
pub(crate) mod net;
mod parity;
mod scaler;
mod states;
mod sync;
mod training;
