//! Distributed checkpoints: saved from any layout, loaded into any other, in several formats.
//!
//! The counterpart of `torch.distributed.checkpoint` (DCP). A checkpoint is a directory, or a single safetensors, GGUF
//! or `torch.save` file.
//!
//! * [`save_from`], [`load_into`] and [`resume`] save and restore a training run in one call: model, optimizer with its
//!   schedule, random generator of the mesh and position in the data. [`ModelPart`] adds a name prefix and non-strict loads.
//! * [`save`], [`async_save`] and [`load`] work on a nested [`State`] of tensors and values, PyTorch's state dict. [`Series`]
//!   keeps the last few checkpoints of a run. [`load_with`], [`load_into_with`] and [`save_with`] take options; [`load_placed`] needs no
//!   template.
//! * [`open`] reads the metadata of a checkpoint of any format as a [`Catalog`], without a world. [`verify`], [`diff`],
//!   [`convert`] and [`dry_load`] are built on it.
//! * [`gguf`] sees a GGUF file as a Hugging Face directory.
//! * [`CheckpointFormat`] describes a file format; [`Format::register`] adds a custom one.
//!
//! Saves and loads are collective: every rank of the world calls them with the same path. Each rank writes and reads its own
//! bytes; ranks exchange only plans, fingerprints and errors, and elements if they share reads
//! ([`StateLoadOptions::share_reads`]). A save replaces the old checkpoint atomically.

mod assign;
mod block_scales;
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
mod encoding;
mod files;
mod format;
mod formats;
pub mod gguf;
mod hf;
mod load;
mod load_options;
mod mapped;
mod model_part;
mod native;
mod open;
mod parts;
mod pickle;
mod plan_cache;
mod planned;
mod read;
mod read_encoded;
mod read_tensor;
mod safetensors;
mod save;
mod save_options;
mod save_plan;
mod series;
mod shared_reads;
mod state;
mod state_exchange;
mod stored;
mod template;
mod torch;
mod torch_optim;
mod value;
mod verify;
mod weight_index;
mod write;
mod zip;

pub use blocks::BlockChecksums;
pub use catalog::Catalog;
pub use content::BoxToWrite;
pub use convert::{Conversion, ConvertOptions, FileOfFn, ReshardFn, convert};
pub(crate) use convert::{FilesBeside, convert_beside};
pub use diff::{DiffOptions, Difference, diff};
pub(crate) use directory::unwritable;
pub use dry_load::{RankLoad, dry_load};
pub use element::ElementType;
pub use encoding::ChunkEncoding;
pub use files::{Files, LoadReport};
pub use format::{CheckpointFormat, FileRole, FileToWrite, Format, FormatWriter, ValueStorage, WrittenFile};
pub(crate) use load::load_consistent;
pub use load::{load, load_placed, load_with};
pub use load_options::{LoadedState, StateLoadOptions};
pub(crate) use mapped::{MAPPED_BUFFER, MappedBox, read_mapped, read_mapped_blocks};
pub use model_part::ModelPart;
pub use open::open;
pub use parts::{
    Named, Restore, RestoreParts, Stateful, StatefulParts, load_into, load_into_with, named, save_from, save_from_with,
};
pub use plan_cache::PlanCache;
pub use save::{AsyncSave, async_save, save, save_with};
pub use save_options::{CommitHook, SaveOptions};
pub use series::{Resumed, Series, resume};
pub use state::State;
pub use stored::{Chunk, Contents, StoredTensor};
pub use value::{Key, Value, flat_key};
pub use verify::{Verification, verify};
