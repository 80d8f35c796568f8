//! A conversation with a model, whose cache is kept between turns.

use super::generation::{GeneratedToken, Generation, GenerationStats};
use super::predict::{CachedPredictor, NextLogits};
use super::sampling::Sampling;
use super::stop::StopReason;
use crate::error::{ErrorKind, Result};
use crate::models::PretrainedModel;
use crate::text::{ChatOptions, Message, Tokenizer};

/// A conversation with a model.
///
/// What the model has seen stays in its key/value cache: a turn computes only what is new, unless the chat template changes
/// earlier messages. All ranks of the model's mesh hold the same conversation.
pub struct ChatSession<'a> {
    predictor: CachedPredictor<'a>,
    tokenizer: &'a Tokenizer,
    messages: Vec<Message>,
    cached: Option<CachedTurns>,
}

/// What the model has seen of the conversation.
struct CachedTurns {
    text: String,
    ids: Vec<u32>,
    /// The last token, if it belongs to the text and the model has not seen it.
    unseen: Option<u32>,
}

/// The answer of a turn.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatAnswer {
    /// Text of the answer.
    pub text: String,
    /// Counts and times; the tokens of the prompt are those of the whole conversation.
    pub stats: GenerationStats,
    /// Tokens of the conversation that were computed for this turn, before the answer.
    pub computed_tokens: usize,
}

impl<'a> ChatSession<'a> {
    /// Starts a conversation. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model has no chat template.
    pub fn new(model: &'a PretrainedModel, tokenizer: &'a Tokenizer) -> Result<Self> {
        if tokenizer.chat_template().is_none() {
            tokenizer.chat_text(&[], &ChatOptions::default())?;
        }
        Ok(ChatSession { predictor: CachedPredictor::new(model)?, tokenizer, messages: Vec::new(), cached: None })
    }

    /// Messages so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Adds a message without an answer, such as the instructions of a `system` message. Local.
    pub fn add(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// Adds a message of the user and generates the answer; `show` sees every token as it comes.
    ///
    /// Collective: every rank of the model's mesh must call it with the same text.
    ///
    /// # Errors
    /// As [`Generation::new`], and those of the template and of `show`. The conversation is then as before.
    pub fn say(
        &mut self,
        text: &str,
        sampling: &Sampling,
        mut show: impl FnMut(&GeneratedToken) -> Result<()>,
    ) -> Result<ChatAnswer> {
        sampling.check()?;
        self.messages.push(Message::new("user", text));
        let answer = self.answer(sampling, &mut show);
        match &answer {
            Ok(answer) => self.messages.push(Message::new("assistant", &answer.text)),
            Err(_) => {
                self.messages.pop();
                self.cached = None;
            }
        }
        answer
    }

    fn answer(
        &mut self,
        sampling: &Sampling,
        show: &mut dyn FnMut(&GeneratedToken) -> Result<()>,
    ) -> Result<ChatAnswer> {
        let options = ChatOptions { add_generation_prompt: true, ..ChatOptions::default() };
        let text = self.tokenizer.chat_text(&self.messages, &options)?;
        let continued = self.cached.take().and_then(|cached| Some((text.strip_prefix(&cached.text)?, cached)));
        let (ids, pending) = match continued {
            Some((rest, cached)) => {
                let new = self.tokenizer.encode_without_special(rest)?;
                let new: Vec<u32> = cached.unseen.into_iter().chain(new).collect();
                ([cached.ids, new.clone()].concat(), new)
            }
            None => {
                self.predictor.start(&[0])?;
                let ids = self.tokenizer.encode_without_special(&text)?;
                (ids.clone(), ids)
            }
        };
        if let Some(context) = self.predictor.context().filter(|&context| ids.len() > context) {
            let found = format!("{} tokens", ids.len());
            let needed = format!("at most {context}, the context of the model");
            return Err(ErrorKind::Argument.error("conversation", found, needed, "start a new one"));
        }
        if pending.is_empty() {
            let needed = "a text that the template renders";
            return Err(ErrorKind::Data.error("conversation", "no new tokens", needed, "say something"));
        }
        let computed_tokens = pending.len();
        let prompts = [ids.clone()];
        let mut generation =
            Generation::resume(&mut self.predictor, self.tokenizer, &prompts, vec![pending], sampling.clone());
        let (mut answer, mut reason) = (String::new(), None);
        for token in generation.by_ref() {
            let token = token?;
            answer += token.text();
            reason = token.stop;
            show(&token)?;
        }
        let (stats, new) = (generation.stats(), generation.tokens(0).to_vec());
        drop(generation);
        if let Some((&last, seen)) = new.split_last().filter(|_| reason != Some(StopReason::StopText)) {
            // Templates write the end token after every answer.
            let unseen = (reason != Some(StopReason::EndToken)).then_some(last);
            self.cached = Some(CachedTurns { text: text + &answer, ids: [&ids[..], seen].concat(), unseen });
        }
        Ok(ChatAnswer { text: answer, stats, computed_tokens })
    }
}
