//! Converting a checkpoint and reporting the result.

use std::io::Write;
use std::path::Path;

use serde_json::json;
use shardwise::Result;
use shardwise::checkpoint::{self, Conversion, ConvertOptions};

use super::progress::byte_bar;

/// How many keys of left-out values the report lists: the settings of an optimizer can be dozens.
const LISTED: usize = 8;
/// Width of the report in columns.
const COLUMNS: usize = 80;

pub(super) fn run(from: &Path, to: &Path, options: &ConvertOptions, json: bool) -> Result<()> {
    let bar = byte_bar(checkpoint::open(from)?.bytes() as u64);
    let done = checkpoint::convert(from, to, options, &|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    let Conversion { tensors, files, bytes, left_out, unreadable } = done;
    if json {
        let format = options.format;
        let report = json!({
            "format": format, "tensors": tensors, "bytes": bytes, "files": files, "left_out": left_out,
            "unreadable": unreadable,
        });
        writeln!(out, "{report}")?;
        return Ok(());
    }
    writeln!(out, "{tensors} tensors, {bytes} bytes in {files} file(s): {}", to.display())?;
    if !left_out.is_empty() {
        writeln!(out, "{} values left out, because {} stores tensors only:", left_out.len(), options.format)?;
        list(&left_out).iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    }
    if !unreadable.is_empty() {
        writeln!(out, "{} entries left out, because they cannot be read (`ckpt inspect` says why):", unreadable.len())?;
        list(&unreadable).iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    }
    Ok(())
}

/// The first keys, wrapped, and how many more there are.
fn list(keys: &[String]) -> Vec<String> {
    let more = keys.len().saturating_sub(LISTED);
    let comma = |i: usize| if i + 1 == keys.len() { "" } else { "," };
    let mut words: Vec<String> =
        keys.iter().take(LISTED).enumerate().map(|(i, key)| format!("{key}{}", comma(i))).collect();
    if more > 0 {
        words.push(format!("and {more} more (--json lists all)"));
    }
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if 2 + line.chars().count() + 1 + word.chars().count() <= COLUMNS => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_wrapped_and_counted() {
        let keys: Vec<String> = (0..80).map(|i| format!("optimizer.param_groups.{i}.weight_decay")).collect();
        let lines = list(&keys);
        assert!(lines.iter().all(|line| line.chars().count() + 2 <= COLUMNS), "{lines:?}");
        assert!(lines.last().unwrap().ends_with("and 72 more (--json lists all)"), "{lines:?}");
        assert_eq!(list(&keys[..1]), ["optimizer.param_groups.0.weight_decay"]);
        assert_eq!(list(&["step".to_string(), "epoch".to_string()]), ["step, epoch"]);
    }
}
