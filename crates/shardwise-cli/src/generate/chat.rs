//! A conversation on standard input and output.

use std::io::{BufRead, IsTerminal};

use serde_json::json;
use shardwise::generate::{ChatSession, GenerationStats};
use shardwise::models::PretrainedModel;
use shardwise::prelude::*;
use shardwise::text::Message;

use super::job::{GenerateJob, on_all_ranks};
use super::output::{Figures, stream};
use crate::lines;

/// Reads a message per line and prints the answers, until standard input ends. Collective; the first rank reads and prints.
pub(super) fn talk(
    world: &World,
    job: &GenerateJob,
    model: &PretrainedModel,
    system: Option<&str>,
    load_s: f64,
) -> Result<()> {
    let mut session = world.all_ok(ChatSession::new(model, &job.source.tokenizer))?;
    session.messages().is_empty().then(|| system.map(|text| session.add(Message::new("system", text))));
    let first = world.rank() == 0;
    // Prompts are for people; a pipe gets only answers.
    let asks = first && std::io::stdin().is_terminal();
    while let Some(text) = next_line(world, asks)? {
        if text.trim().is_empty() {
            continue;
        }
        let answered =
            session.say(&text, &job.sampling, |token| if first && !job.json { stream(token.text()) } else { Ok(()) });
        let answer = on_all_ranks(world, answered)?;
        let figures = Figures::gather(world, load_s, 1, answer.stats)?;
        if !first {
            continue;
        }
        if !job.json {
            stream("\n")?;
            continue;
        }
        let GenerationStats { prompt_tokens, new_tokens, .. } = answer.stats;
        let mut record = json!({
            "prompt": text, "text": answer.text, "prompt_tokens": prompt_tokens,
            "computed_tokens": answer.computed_tokens, "new_tokens": new_tokens,
        });
        let figures = serde_json::to_value(&figures).map_err(Error::other)?;
        if let (Some(record), serde_json::Value::Object(figures)) = (record.as_object_mut(), figures) {
            record.extend(figures);
        }
        stream(&format!("{record}\n"))?;
    }
    if asks {
        stream("\n")?;
    }
    Ok(())
}

/// The next line of the first rank's standard input, on all ranks; nothing at its end. Collective.
fn next_line(world: &World, asks: bool) -> Result<Option<String>> {
    let read = || -> Result<Option<String>> {
        if asks {
            stream("> ")?;
        }
        let mut line = String::new();
        let count = std::io::stdin().lock().read_line(&mut line)?;
        Ok((count > 0).then(|| line.trim_end_matches(['\n', '\r']).to_string()))
    };
    let line = world.on_first_rank(read)?.flatten();
    lines::broadcast(world, line.as_deref())
}
