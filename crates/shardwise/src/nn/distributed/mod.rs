//! Modules whose parameters are placed or gathered: placement by function, full sharding, full states.

pub(in crate::nn) mod distribute;
pub(in crate::nn) mod fsdp;
pub(in crate::nn) mod full_state;
