//! The tests of this crate extend Shardwise with public items only, as a program would.
#![cfg(test)]

mod checkpoint_faults;
mod checkpoint_format;
mod model;
mod operator;
mod optimizer;
mod sharding_spec;
