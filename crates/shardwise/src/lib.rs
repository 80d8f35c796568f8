//! Distributed tensors for Rust.

pub mod error;
mod intern;
pub mod layout;
pub mod mesh;
pub mod placement;

pub use error::{Error, Result};
pub use layout::{Layout, OwnedBox, TensorBox, TensorMeta};
pub use mesh::Mesh;
pub use placement::{Placement, ReduceOp};
