//! Checkpoints: any layout to any layout, in the formats that people have.

mod assign;
mod catalog;
mod content;
mod convert;
mod diff;
mod cast;
mod directory;
mod dry_load;
mod element;
mod hf;
mod load;
mod native;
mod open;
mod read;
mod safetensors;
mod save;
mod series;
mod state;
mod value;
mod verify;
mod write;

pub use catalog::{Catalog, Chunk, Format, StoredTensor};
pub use convert::{Conversion, ConvertOptions, Cut, convert};
pub use diff::{Difference, diff};
pub use dry_load::{RankLoad, dry_load};
pub use element::ElementType;
pub use load::{load, load_placed};
pub use open::open;
pub use save::{AsyncSave, SaveOptions, async_save, save, save_with};
pub use series::Series;
pub use state::State;
pub use value::{Key, Value, flat_key};
pub use verify::{Verification, verify};
