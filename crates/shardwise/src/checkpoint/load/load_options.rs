//! Options and result of a load.

use std::fmt;

use crate::checkpoint::bytes::files::LoadReport;
use crate::checkpoint::metadata::state::State;

/// What a load accepts that differs between checkpoint and template, and which rank reads what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLoadOptions {
    /// Whether the checkpoint may lack entries of the template; false by default. They keep the template's values and are
    /// listed in [`LoadedState::missing_keys`].
    #[doc(alias = "allow_partial_load")]
    pub allow_partial: bool,
    /// Whether elements may be converted to a type that does not hold all of their values, such as `f32` to `bf16`; true by
    /// default, as in PyTorch. The tensors concerned are listed in [`LoadedState::narrowed_keys`]. Widening is always allowed.
    pub allow_narrowing: bool,
    /// Rows and columns of a block, if matrices are stored with a scale per block in a tensor `NAME_scale_inv`, such as
    /// `Some([128, 128])` for `f8` weights of Hugging Face directories; `None` by default. Such a matrix is loaded as its
    /// elements times the scales of their blocks, computed in `f32`.
    #[doc(alias = "QuantizedHuggingFaceStorageReader")]
    pub block_scales: Option<[usize; 2]>,
    /// Whether a part of a tensor that several ranks need, such as replicas, is read by one of them and broadcast to
    /// the remaining ones; false by default: then every rank reads what it needs. The bytes are balanced over the reading ranks. For
    /// files on a slow or remote disk; ranks on one host read what another one has read from the page cache anyway.
    pub share_reads: bool,
}

impl Default for StateLoadOptions {
    fn default() -> Self {
        StateLoadOptions { allow_partial: false, allow_narrowing: true, block_scales: None, share_reads: false }
    }
}

impl fmt::Display for StateLoadOptions {
    /// All options in one line, as ranks compare them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StateLoadOptions { allow_partial, allow_narrowing, block_scales, share_reads } = self;
        write!(f, "allow_partial: {allow_partial}, allow_narrowing: {allow_narrowing}, ")?;
        write!(f, "block_scales: {block_scales:?}, share_reads: {share_reads}")
    }
}

/// What [`load_with`](crate::checkpoint::load_with) returns: the state, and how it differs from template and checkpoint.
#[derive(Clone)]
pub struct LoadedState {
    /// The loaded state, with the structure of the template.
    pub state: State,
    /// How much this rank read, and what of it no checksum covers.
    pub report: LoadReport,
    /// Flat keys of the template that the checkpoint lacks; empty unless [`StateLoadOptions::allow_partial`].
    pub missing_keys: Vec<String>,
    /// Flat keys of the checkpoint that the template lacks.
    pub unexpected_keys: Vec<String>,
    /// Flat keys of tensors that were converted to a type that does not hold all values of the stored one.
    pub narrowed_keys: Vec<String>,
}
