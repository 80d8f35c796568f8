//! The logits of next tokens: with a key/value cache, or computed anew from all tokens.

use candle_core::{DType, Device, Tensor};

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::models::{KvCache, LanguageModel, PretrainedModel, batch_placements};
use crate::nn::{EvaluationScope, Module};
use crate::placement::Placement;
use crate::tensor::{DTensor, no_grad};

/// Computes the logits of the token after rows that grow.
///
/// All methods are collective unless stated otherwise.
pub trait NextLogits {
    /// Mesh that the model is on. Local.
    fn mesh(&self) -> DeviceMesh;

    /// Longest row that the model accepts, in tokens without padding; `None` if there is no limit. Local.
    fn context(&self) -> Option<usize>;

    /// Size of the vocabulary. Local.
    fn vocab_size(&self) -> usize;

    /// Starts rows anew, with these numbers of padding tokens in front of each. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model cannot ignore padding.
    fn start(&mut self, padding: &[usize]) -> Result<()>;

    /// Adds tokens to every row, the same number to each, and returns the logits `[rows, vocabulary]` of the next ones.
    fn next_logits(&mut self, new: &[Vec<u32>]) -> Result<DTensor>;
}

impl<P: NextLogits + ?Sized> NextLogits for &mut P {
    fn mesh(&self) -> DeviceMesh {
        (**self).mesh()
    }

    fn context(&self) -> Option<usize> {
        (**self).context()
    }

    fn vocab_size(&self) -> usize {
        (**self).vocab_size()
    }

    fn start(&mut self, padding: &[usize]) -> Result<()> {
        (**self).start(padding)
    }

    fn next_logits(&mut self, new: &[Vec<u32>]) -> Result<DTensor> {
        (**self).next_logits(new)
    }
}

/// A model with a key/value cache: a new token costs one pass over one position. The model computes in evaluation mode as long as
/// this exists; its own mode does not change.
pub struct CachedPredictor<'a> {
    model: &'a PretrainedModel,
    mesh: DeviceMesh,
    cache: KvCache,
    /// All tokens of the rows, with padding, if rows may outgrow the context.
    seen: Option<Vec<Vec<u32>>>,
    /// Padding tokens in front of every row.
    padding: Vec<usize>,
    _evaluation: EvaluationScope,
}

impl<'a> CachedPredictor<'a> {
    /// Starts with an empty cache.
    ///
    /// # Errors
    /// [`ErrorKind::Model`] if the model has no parameters.
    pub fn new(model: &'a PretrainedModel) -> Result<Self> {
        Ok(CachedPredictor {
            model,
            mesh: mesh_of(model)?,
            cache: KvCache::new(),
            seen: None,
            padding: Vec::new(),
            _evaluation: EvaluationScope::new(model),
        })
    }

    /// Lets rows outgrow the context of the model: where it ends, the cache is computed anew from half a context of the latest
    /// tokens, and what is before them is forgotten. Short contexts, as those of small trained models, need it to write a page.
    #[must_use]
    pub fn forgetful(mut self) -> Self {
        self.seen = Some(Vec::new());
        self
    }

    /// The tokens to compute next: the new ones, or half a context of the latest tokens for an empty cache.
    fn upcoming(&mut self, new: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let Some(seen) = &mut self.seen else { return new.to_vec() };
        seen.iter_mut().zip(new).for_each(|(seen, new)| seen.extend(new));
        let context = self.model.config().max_positions();
        if self.cache.len() + new.first().map_or(0, Vec::len) <= context {
            return new.to_vec();
        }
        let kept = context.div_ceil(2);
        for (seen, padding) in seen.iter_mut().zip(&mut self.padding) {
            let forgotten = seen.len() - kept;
            seen.drain(..forgotten);
            *padding = padding.saturating_sub(forgotten);
        }
        self.cache = KvCache::with_left_padding(self.padding.clone());
        seen.clone()
    }
}

impl NextLogits for CachedPredictor<'_> {
    fn mesh(&self) -> DeviceMesh {
        self.mesh.clone()
    }

    fn context(&self) -> Option<usize> {
        match self.seen {
            Some(_) => None,
            None => Some(self.model.config().max_positions()),
        }
    }

    fn vocab_size(&self) -> usize {
        self.model.config().vocab_size()
    }

    fn start(&mut self, padding: &[usize]) -> Result<()> {
        self.cache = KvCache::with_left_padding(padding.to_vec());
        self.padding = padding.to_vec();
        if let Some(seen) = &mut self.seen {
            *seen = vec![Vec::new(); padding.len()];
        }
        Ok(())
    }

    fn next_logits(&mut self, new: &[Vec<u32>]) -> Result<DTensor> {
        let ids = placed_ids(&self.upcoming(new), &self.mesh)?;
        no_grad(|| self.model.forward_cached(&ids, &mut self.cache))
    }
}

/// A model without a cache: every new token costs a pass over the last `window` tokens. Rows must have one length. The model
/// computes in evaluation mode as long as this exists; its own mode does not change.
pub struct UncachedPredictor<'a> {
    model: &'a dyn LanguageModel,
    mesh: DeviceMesh,
    vocab_size: usize,
    window: usize,
    seen: Vec<Vec<u32>>,
    _evaluation: EvaluationScope,
}

impl<'a> UncachedPredictor<'a> {
    /// Starts without tokens. Tokens before the last `window` ones are ignored.
    ///
    /// # Errors
    /// [`ErrorKind::Model`] if the model has no parameters.
    pub fn new(model: &'a dyn LanguageModel, vocab_size: usize, window: usize) -> Result<Self> {
        let (mesh, evaluation) = (mesh_of(model)?, EvaluationScope::new(model));
        Ok(UncachedPredictor { model, mesh, vocab_size, window, seen: Vec::new(), _evaluation: evaluation })
    }
}

impl NextLogits for UncachedPredictor<'_> {
    fn mesh(&self) -> DeviceMesh {
        self.mesh.clone()
    }

    fn context(&self) -> Option<usize> {
        None
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn start(&mut self, padding: &[usize]) -> Result<()> {
        if padding.iter().any(|&count| count > 0) {
            let found = format!("rows with {padding:?} tokens of padding, for a model without a key/value cache");
            let fix = "generate from one prompt at a time";
            return Err(ErrorKind::Unsupported.error("batch", found, "prompts of one length", fix));
        }
        self.seen = vec![Vec::new(); padding.len()];
        Ok(())
    }

    fn next_logits(&mut self, new: &[Vec<u32>]) -> Result<DTensor> {
        self.seen.iter_mut().zip(new).for_each(|(seen, new)| seen.extend(new));
        let window = |seen: &Vec<u32>| seen[seen.len().saturating_sub(self.window)..].to_vec();
        let ids = placed_ids(&self.seen.iter().map(window).collect::<Vec<_>>(), &self.mesh)?;
        no_grad(|| self.model.forward(&ids)?.select(1, -1))
    }
}

/// The mesh of a model's parameters.
fn mesh_of(model: &dyn Module) -> Result<DeviceMesh> {
    match model.named_parameters().first() {
        Some((_, param)) => Ok(param.get().device_mesh().clone()),
        None => Err(ErrorKind::Model.error("model", "no parameters", "a language model", "load one")),
    }
}

/// Ids `[rows, length]`, sharded over `dp` if there are rows for every rank of that axis.
fn placed_ids(rows: &[Vec<u32>], mesh: &DeviceMesh) -> Result<DTensor> {
    let (count, length) = (rows.len(), rows.first().map_or(0, Vec::len));
    let ids = Tensor::from_vec(rows.concat(), (count, length), &Device::Cpu)?.to_dtype(DType::I64)?;
    let ranks = mesh.mesh().axis("dp").map_or(1, |axis| mesh.mesh().shape()[axis]);
    let placements = match count < ranks {
        true => vec![Placement::Replicate; mesh.ndim()],
        false => batch_placements(mesh.mesh()),
    };
    DTensor::distribute_tensor(&ids, mesh, placements, None)
}
