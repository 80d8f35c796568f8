//! Distributed tensors for Rust.

pub mod comm;
pub mod error;
mod intern;
pub mod layout;
mod local;
pub mod mesh;
pub mod placement;

pub use comm::{DeviceMesh, Group, ThreadWorld, World, launch};
pub use error::{Error, Result};
pub use layout::{Layout, OwnedBox, TensorBox, TensorMeta};
pub use mesh::Mesh;
pub use placement::{Placement, ReduceOp};
