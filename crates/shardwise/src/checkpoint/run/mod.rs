//! The state of a training run as one call saves and restores it.

pub(in crate::checkpoint) mod parts;
pub(in crate::checkpoint) mod model_part;
pub(in crate::checkpoint) mod series;
pub(in crate::checkpoint) mod torch_optim;
pub(in crate::checkpoint) mod state_exchange;
