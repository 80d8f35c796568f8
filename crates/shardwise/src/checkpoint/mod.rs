//! Checkpoints: any layout to any layout, in the formats that people have.

mod catalog;
mod content;
mod convert;
mod dcp;
mod directory;
mod element;
mod hf;
mod native;
mod open;
mod pickle;
mod read;
mod safetensors;
mod torch;
mod value;
mod zip;

pub use catalog::{Catalog, Chunk, Format, StoredTensor};
pub use element::ElementType;
pub use open::open;
pub use value::{Key, Value, flat_key};
