//! The generation loop.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::choose::{RowHistory, choose};
use super::predict::NextLogits;
use super::sampling::Sampling;
use super::stop::{StopReason, StopTexts};
use crate::comm::record_operator;
use crate::error::{ErrorKind, Result};
use crate::text::{TextStream, Tokenizer};

/// Tokens that a model generates for one or more prompts, as an iterator.
///
/// Every step generates one token per row that has not ended; the iterator returns them in the order of the rows. Prompts of
/// different lengths are padded in front, and each row gives what it gives alone.
///
/// Collective: every rank of the model's mesh iterates, and gets the same tokens. Tokens are chosen by every rank for itself
/// from what the logits' exchange gives to all of them, so agreeing on them costs no further communication.
pub struct Generation<'a> {
    predictor: Box<dyn NextLogits + 'a>,
    sampling: Sampling,
    rows: Vec<GeneratedRow<'a>>,
    /// Tokens for the next pass, one list per row.
    pending: Vec<Vec<u32>>,
    ready: VecDeque<GeneratedToken>,
    eos: Vec<u32>,
    pad: u32,
    /// Steps so far.
    steps: usize,
    /// Steps that the context of the model allows.
    most_steps: usize,
    stats: GenerationStats,
    failed: bool,
}

struct GeneratedRow<'a> {
    /// Prompt and new tokens, without padding.
    seen: Vec<u32>,
    prompt: usize,
    stream: TextStream<'a>,
    stop: StopTexts,
    ended: Option<StopReason>,
}

/// A generated token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GeneratedToken {
    /// Number of the row: that of the prompt.
    pub row: usize,
    /// Token id.
    pub id: u32,
    text: String,
    /// Why the row ends with this token, if it does.
    pub stop: Option<StopReason>,
}

impl GeneratedToken {
    /// The text that is certain with this token: complete characters, without special tokens and stop texts.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Counts and times of a generation, on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GenerationStats {
    /// Tokens of all prompts, without padding.
    pub prompt_tokens: usize,
    /// New tokens of all rows.
    pub new_tokens: usize,
    /// From the first pass to the first new token.
    pub time_to_first_token: Duration,
    /// From the first new token to the last one.
    pub decoding: Duration,
    /// New tokens after the first one of each row.
    pub decoded_tokens: usize,
}

impl GenerationStats {
    /// New tokens per second after the first one of each row; 0 if there are none.
    pub fn tokens_per_second(&self) -> f64 {
        match self.decoded_tokens {
            0 => 0.0,
            tokens => tokens as f64 / self.decoding.as_secs_f64().max(1e-9),
        }
    }
}

impl<'a> Generation<'a> {
    /// Starts the generation for encoded prompts. Local, but all ranks must pass the same.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for settings that are out of range, no prompt, an empty prompt, one that is longer than the
    /// model allows, and token ids that the model does not have.
    pub fn new(
        mut predictor: impl NextLogits + 'a,
        tokenizer: &'a Tokenizer,
        prompts: &[Vec<u32>],
        sampling: Sampling,
    ) -> Result<Self> {
        sampling.check()?;
        check_prompts(&predictor, prompts)?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let padding: Vec<usize> = prompts.iter().map(|prompt| longest - prompt.len()).collect();
        predictor.start(&padding)?;
        let pad = tokenizer.special().pad.unwrap_or(0);
        let padded = prompts.iter().zip(&padding).map(|(prompt, &count)| [vec![pad; count], prompt.clone()].concat());
        let pending = padded.collect();
        Ok(Self::resume(predictor, tokenizer, prompts, pending, sampling))
    }

    /// Continues rows, of which the predictor has seen all but the `pending` tokens.
    pub(super) fn resume(
        predictor: impl NextLogits + 'a,
        tokenizer: &'a Tokenizer,
        prompts: &[Vec<u32>],
        pending: Vec<Vec<u32>>,
        sampling: Sampling,
    ) -> Self {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let rows = prompts.iter().map(|prompt| GeneratedRow {
            seen: prompt.clone(),
            prompt: prompt.len(),
            stream: tokenizer.stream(prompt),
            stop: StopTexts::new(&sampling.stop),
            ended: None,
        });
        Generation {
            rows: rows.collect(),
            pending,
            ready: VecDeque::new(),
            eos: sampling.eos.clone().unwrap_or_else(|| tokenizer.special().eos.clone()),
            pad: tokenizer.special().pad.unwrap_or(0),
            steps: 0,
            // The last token need not fit: nothing follows it.
            most_steps: predictor.context().map_or(usize::MAX, |context| context.saturating_sub(longest) + 1),
            stats: GenerationStats { prompt_tokens: prompts.iter().map(Vec::len).sum(), ..GenerationStats::default() },
            failed: false,
            predictor: Box::new(predictor),
            sampling,
        }
    }

    /// Counts and times so far.
    pub fn stats(&self) -> GenerationStats {
        self.stats
    }

    /// New tokens of a row so far.
    pub fn tokens(&self, row: usize) -> &[u32] {
        &self.rows[row].seen[self.rows[row].prompt..]
    }

    /// Generates all tokens and returns those of each row, with [`pad`](crate::text::SpecialTokens::pad) after rows that ended
    /// before the longest one, as transformers does. Collective.
    ///
    /// # Errors
    /// Those of the model's forward pass.
    pub fn collect_padded(mut self) -> Result<Vec<Vec<u32>>> {
        self.by_ref().try_for_each(|token| token.map(drop))?;
        let rows: Vec<Vec<u32>> = (0..self.rows.len()).map(|row| self.tokens(row).to_vec()).collect();
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        let padded = |mut row: Vec<u32>| {
            row.resize(longest, self.pad);
            row
        };
        Ok(rows.into_iter().map(padded).collect())
    }

    /// Generates all tokens and returns the text of each row. Collective.
    ///
    /// # Errors
    /// Those of the model's forward pass.
    pub fn text(mut self) -> Result<Vec<String>> {
        let mut texts = vec![String::new(); self.rows.len()];
        self.by_ref().try_for_each(|token| token.map(|token| texts[token.row] += token.text()))?;
        Ok(texts)
    }

    /// Whether no further token follows.
    fn is_done(&self) -> bool {
        self.failed || self.sampling.max_tokens == 0 || self.rows.iter().all(|row| row.ended.is_some())
    }

    /// Generates one token for every row that has not ended.
    fn step(&mut self) -> Result<()> {
        let start = Instant::now();
        let logits = self.predictor.next_logits(&self.pending)?;
        let rows = self.rows.iter();
        let rows = rows.map(|row| RowHistory { seen: &row.seen, number: (row.seen.len() - row.prompt) as u64 });
        let rows = rows.collect::<Vec<_>>();
        let chosen = record_operator("next_token", || choose(&logits, &self.sampling, &rows))?;
        self.steps += 1;
        let took = start.elapsed();
        let mut added = 0;
        for (i, (row, id)) in self.rows.iter_mut().zip(chosen).enumerate() {
            if row.ended.is_some() {
                self.pending[i] = vec![self.pad];
                continue;
            }
            added += 1;
            row.seen.push(id);
            self.pending[i] = vec![id];
            let (mut text, stopped) = row.stop.push(&row.stream.push(id)?);
            row.ended = if self.eos.contains(&id) {
                Some(StopReason::EndToken)
            } else if stopped {
                Some(StopReason::StopText)
            } else if self.steps >= self.sampling.max_tokens {
                Some(StopReason::MaxTokens)
            } else if self.steps >= self.most_steps {
                Some(StopReason::Context)
            } else {
                None
            };
            if row.ended.is_some() && !stopped {
                let (rest, stopped) = row.stop.push(&row.stream.finish()?);
                text += &rest;
                if !stopped {
                    text += &row.stop.finish();
                }
            }
            self.ready.push_back(GeneratedToken { row: i, id, text, stop: row.ended });
        }
        self.stats.new_tokens += added;
        if self.steps == 1 {
            self.stats.time_to_first_token = took;
        } else {
            self.stats.decoding += took;
            self.stats.decoded_tokens += added;
        }
        Ok(())
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<GeneratedToken>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(token) = self.ready.pop_front() {
            return Some(Ok(token));
        }
        if self.is_done() {
            return None;
        }
        if let Err(error) = self.step() {
            // Ranks must not go on with half a step.
            self.failed = true;
            return Some(Err(error));
        }
        self.ready.pop_front().map(Ok)
    }
}

fn check_prompts(predictor: &impl NextLogits, prompts: &[Vec<u32>]) -> Result<()> {
    let bad = |found: String, needed: String, fix: &str| Err(ErrorKind::Argument.error("prompt", found, needed, fix));
    if prompts.is_empty() {
        return bad("none".into(), "at least one".into(), "pass a prompt");
    }
    for (i, prompt) in prompts.iter().enumerate() {
        let which = if prompts.len() == 1 { String::new() } else { format!(" in prompt {i}") };
        if prompt.is_empty() {
            return bad(format!("no tokens{which}"), "at least one".into(), "give a prompt that is not empty");
        }
        if let Some(context) = predictor.context().filter(|&context| prompt.len() > context) {
            let found = format!("{} tokens{which}", prompt.len());
            return bad(found, format!("at most {context}, the context of the model"), "shorten the prompt");
        }
        let vocabulary = predictor.vocab_size();
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= vocabulary) {
            let found = format!("token {id}{which}");
            let needed = format!("tokens below {vocabulary}, the vocabulary of the model");
            return bad(found, needed, "use the tokenizer that belongs to the model");
        }
    }
    Ok(())
}
