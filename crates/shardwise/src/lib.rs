//! Distributed tensors for Rust.

pub mod error;
mod intern;
pub mod mesh;
pub mod placement;
pub mod layout;
mod local;
pub mod comm;

pub use comm::{DeviceMesh, Group, ThreadWorld, World, launch};
pub use error::{Error, Result};
pub use layout::{Layout, OwnedBox, TensorBox, TensorMeta};
pub use mesh::Mesh;
pub use placement::{Placement, ReduceOp};
