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

mod metadata;
mod bytes;
mod catalogs;
mod formats;
mod save;
mod load;
mod run;
mod tools;

pub use formats::gguf;

pub use bytes::content::BoxToWrite;
pub use bytes::files::{Files, LoadReport};
pub use catalogs::catalog::Catalog;
pub(crate) use catalogs::directory::unwritable;
pub use catalogs::format::{CheckpointFormat, FileRole, FileToWrite, Format, FormatWriter, ValueStorage, WrittenFile};
pub use catalogs::open::open;
pub use load::dry_load::{RankLoad, dry_load};
pub(crate) use load::load_consistent;
pub use load::load_options::{LoadedState, StateLoadOptions};
pub(crate) use load::mapped::{MAPPED_BUFFER, MappedBox, read_mapped, read_mapped_blocks};
pub use load::{load, load_placed, load_with};
pub use metadata::blocks::BlockChecksums;
pub use metadata::element::ElementType;
pub use metadata::encoding::ChunkEncoding;
pub use metadata::state::State;
pub use metadata::stored::{Chunk, Contents, StoredTensor};
pub use metadata::value::{Key, Value, flat_key};
pub use run::model_part::ModelPart;
pub use run::parts::{
    Named, Restore, RestoreParts, Stateful, StatefulParts, load_into, load_into_with, named, save_from, save_from_with,
};
pub use run::series::{Resumed, Series, resume};
pub use save::plan_cache::PlanCache;
pub use save::save_options::{CommitHook, SaveOptions};
pub use save::{AsyncSave, async_save, save, save_with};
pub use tools::convert::{Conversion, ConvertOptions, FileOfFn, ReshardFn, convert};
pub(crate) use tools::convert::{FilesBeside, convert_beside};
pub use tools::diff::{DiffOptions, Difference, diff};
pub use tools::verify::{Verification, verify};
