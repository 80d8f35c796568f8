//! Generated text and figures on standard output and standard error.

use std::io::Write;

use serde::Serialize;
use shardwise::generate::{GenerationStats, StopReason};
use shardwise::picture::bytes_text;
use shardwise::prelude::*;

use super::job::GenerateJob;
use super::source::StoredForm;

/// A row of a batch, with the figures of the batch, as `--json` prints it.
#[derive(Serialize)]
pub(super) struct GeneratedRecord<'a> {
    pub(super) prompt: &'a str,
    pub(super) text: &'a str,
    /// Ids of the new tokens.
    pub(super) tokens: &'a [u32],
    /// Why the text ends: `eos`, `stop`, `length` or `context`.
    pub(super) stop: Option<&'static str>,
    pub(super) prompt_tokens: usize,
    pub(super) new_tokens: usize,
    pub(super) mesh: String,
    pub(super) dtype: &'static str,
    /// Whether weights stay quantized in memory.
    pub(super) quantized: bool,
    #[serde(flatten)]
    pub(super) figures: &'a Figures,
}

/// Figures of the rows that were generated together.
#[derive(Serialize, Clone)]
pub(super) struct Figures {
    /// Seconds until the model was loaded.
    pub(super) load_s: f64,
    /// Rows that were generated together.
    pub(super) rows: usize,
    /// New tokens of all rows per second, after the first of each.
    pub(super) tokens_per_s: f64,
    pub(super) time_to_first_token_ms: f64,
    /// Largest memory of tensors, of each rank.
    pub(super) peak_memory_bytes: Vec<u64>,
}

impl Figures {
    /// Collects the figures of all ranks. Collective.
    pub(super) fn gather(world: &World, load_s: f64, rows: usize, stats: GenerationStats) -> Result<Self> {
        let mine = candle_core::Tensor::new(&[world.memory().peak() as i64], &candle_core::Device::Cpu)?;
        let peaks = world.all_gather(&mine, 0, &vec![1; world.size()])?.to_vec1::<i64>()?;
        Ok(Figures {
            load_s,
            rows,
            tokens_per_s: stats.tokens_per_second(),
            time_to_first_token_ms: stats.time_to_first_token.as_secs_f64() * 1e3,
            peak_memory_bytes: peaks.into_iter().map(i64::cast_unsigned).collect(),
        })
    }

    /// One line for people.
    pub(super) fn summary(&self, new_tokens: usize) -> String {
        let peaks = &self.peak_memory_bytes;
        let size = |bytes: &u64| bytes_text(*bytes as usize);
        let memory = match (peaks.iter().min(), peaks.iter().max()) {
            (Some(least), Some(most)) if least != most => format!("{} to {}", size(least), size(most)),
            (_, most) => most.map_or_else(String::new, size),
        };
        format!(
            "{new_tokens} new token(s), {:.1} tokens/s, first after {:.0} ms, peak memory per rank {memory}",
            self.tokens_per_s, self.time_to_first_token_ms
        )
    }
}

/// A row that was generated.
pub(super) struct GeneratedText {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) stop: Option<StopReason>,
}

/// Prints the rows of a batch on the first rank, unless their text was streamed already.
pub(super) fn print_rows(job: &GenerateJob, rows: &[PrintedRow<'_>], figures: &Figures, streamed: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for (i, PrintedRow { prompt, is_text, prompt_tokens, generated }) in rows.iter().enumerate() {
        if job.json {
            let record = GeneratedRecord {
                prompt,
                text: &generated.text,
                tokens: &generated.tokens,
                stop: generated.stop.map(StopReason::name),
                prompt_tokens: *prompt_tokens,
                new_tokens: generated.tokens.len(),
                mesh: job.mesh.to_string(),
                dtype: job.source.dtype.as_str(),
                quantized: job.source.stored == StoredForm::KeptQuantized,
                figures,
            };
            writeln!(out, "{}", serde_json::to_string(&record).map_err(Error::other)?)?;
        } else if streamed {
            writeln!(out)?;
        } else {
            let gap = if i > 0 { "\n" } else { "" };
            writeln!(out, "{gap}{}{}", if *is_text { prompt } else { "" }, generated.text)?;
        }
    }
    out.flush()?;
    Ok(())
}

/// A row with its prompt.
pub(super) struct PrintedRow<'a> {
    pub(super) prompt: &'a str,
    pub(super) is_text: bool,
    pub(super) prompt_tokens: usize,
    pub(super) generated: GeneratedText,
}

/// Prints a piece of text at once, on the first rank.
pub(super) fn stream(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Prints a line for people on standard error.
pub(super) fn note(line: &str) {
    // Nobody has to read it.
    let _ = writeln!(std::io::stderr(), "{line}");
}
