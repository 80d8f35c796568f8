//! Generation of text with a language model: sampling, the loop with a key/value cache, conversations.
//!
//! ```no_run
//! use shardwise::generate::Sampling;
//! use shardwise::models;
//! use shardwise::plan::TensorParallel;
//! use shardwise::prelude::*;
//!
//! launch(3, |world| {
//!     let mesh = world.mesh([("tp", 3)])?;
//!     let model = models::load("path/to/model", &mesh, TensorParallel::new("tp"))?;
//!     for token in model.generate("The number of heads", Sampling::greedy().tokens(64))? {
//!         let token = token?; // the same on every rank
//!         if world.rank() == 0 {
//!             print!("{}", token.text());
//!         }
//!     }
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! * [`Sampling`]: how tokens are chosen, as pure functions of logits.
//! * [`Generation`]: the loop, for one prompt or a batch of them.
//! * [`ChatSession`]: a conversation that keeps its cache.
//! * [`NextLogits`]: where logits come from; a model with a cache ([`CachedPredictor`]) or without ([`UncachedPredictor`]).
//! * [`perplexity`]: how well a model predicts a text.

mod chat_session;
mod choose;
mod generation;
mod perplexity;
mod predict;
mod sampling;
mod stop;

pub use chat_session::{ChatAnswer, ChatSession};
pub use generation::{GeneratedToken, Generation, GenerationStats};
pub use perplexity::{Perplexity, perplexity};
pub use predict::{CachedPredictor, NextLogits, UncachedPredictor};
pub use sampling::Sampling;
pub use stop::StopReason;

use crate::error::Result;
use crate::models::PretrainedModel;
use crate::text::{ChatOptions, Message};

impl PretrainedModel {
    /// Generates the text that follows a prompt, token by token.
    ///
    /// Collective: all ranks of the model's mesh must call it with the same arguments and iterate; all get the same tokens.
    ///
    /// # Errors
    /// Those of the [tokenizer](Self::tokenizer) and of [`Generation::new`].
    pub fn generate(&self, prompt: &str, sampling: Sampling) -> Result<Generation<'_>> {
        let tokenizer = self.tokenizer()?;
        Generation::new(CachedPredictor::new(self)?, tokenizer, &[tokenizer.encode_prompt(prompt)?], sampling)
    }

    /// Generates the texts that follow several prompts, as one batch. Collective; errors as for
    /// [`generate`](Self::generate).
    pub fn generate_batch(&self, prompts: &[impl AsRef<str>], sampling: Sampling) -> Result<Generation<'_>> {
        let tokenizer = self.tokenizer()?;
        let ids = prompts.iter().map(|prompt| tokenizer.encode_prompt(prompt.as_ref())).collect::<Result<Vec<_>>>()?;
        Generation::new(CachedPredictor::new(self)?, tokenizer, &ids, sampling)
    }

    /// Generates the answer to the last message of a conversation, with the chat template of the model. Collective; errors as
    /// for [`generate`](Self::generate), and those of the template.
    pub fn answer(&self, messages: &[Message], sampling: Sampling) -> Result<Generation<'_>> {
        let tokenizer = self.tokenizer()?;
        let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
        Generation::new(CachedPredictor::new(self)?, tokenizer, &[tokenizer.encode_chat(messages, &options)?], sampling)
    }
}
