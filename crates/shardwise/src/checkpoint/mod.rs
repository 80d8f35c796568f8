//! Checkpoints: any layout to any layout, in the formats that people have.
//!
//! * [`save_from`], [`load_into`] and [`resume`] take a model, its optimizer, the generator of a mesh and the position in the
//!   data in one call; [`ModelPart`] has options for the names of a model.
//! * [`save`], [`async_save`] and [`load`] take nested [`State`] of tensors of any kind and of values; [`Series`] keeps the last
//!   few of a run.
//! * [`open`] says what is in a checkpoint of any format, as a [`Catalog`]; [`verify`], [`diff`], [`convert`] and [`dry_load`]
//!   work on all of them.
//! * [`CheckpointFormat`] is what a format has to say; [`Format::register`] adds one of the program.

mod assign;
mod blocks;
mod cast;
mod catalog;
mod content;
mod convert;
mod dcp;
mod diff;
mod directory;
mod dry_load;
mod element;
mod files;
mod format;
mod formats;
mod hf;
mod load;
mod model_part;
mod native;
mod open;
mod parts;
mod pickle;
mod read;
mod safetensors;
mod save;
mod series;
mod state;
mod stored;
mod torch;
mod torch_optim;
mod value;
mod verify;
mod write;
mod zip;

pub use blocks::Blocks;
pub use catalog::Catalog;
pub use content::BoxToWrite;
pub use convert::{Conversion, ConvertOptions, Cut, convert};
pub use diff::{DiffOptions, Difference, diff};
pub use dry_load::{RankLoad, dry_load};
pub use element::ElementType;
pub use files::{Files, LoadReport};
pub use format::{CheckpointFormat, FileRole, FileToWrite, Format, FormatWriter, ValueStorage, WrittenFile};
pub use load::{load, load_placed, load_reporting};
pub use model_part::ModelPart;
pub use open::open;
pub use parts::{Named, Parts, Restore, RestoreParts, Stateful, load_into, named, save_from, save_from_with};
pub use save::{AsyncSave, SaveOptions, async_save, save, save_with};
pub use series::{Resumed, Series, resume};
pub use state::State;
pub use stored::{Chunk, Contents, StoredTensor};
pub use value::{Key, Value, flat_key};
pub use verify::{Verification, verify};
