//! How much longer a tokenizer can make a text before it is divided into tokens, or after: a file decides it, so it is bounded.

use serde::Deserialize;
use serde_json::Value;

/// Largest factor by which the steps of a file may lengthen a text. Tokenizers of public models stay below 100: a space becomes
/// three bytes, and one is put in front.
const MAX_GROWTH: f64 = 65536.0;

/// The parts of a `tokenizer.json` that rewrite text.
#[derive(Deserialize)]
struct RewritingSteps {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    decoder: Value,
}

/// Describes what a `tokenizer.json` does to the length of a text if that is out of bounds.
pub(super) fn unbounded_growth(file: &[u8]) -> Option<String> {
    // What is not such a file is refused by the library that reads all of it.
    let steps: RewritingSteps = serde_json::from_slice(file).ok()?;
    let too_long = |part: &str, growth: f64| {
        (growth > MAX_GROWTH).then(|| format!("a {part} that lengthens a text up to {growth:.0e} times"))
    };
    too_long("normalizer", growth(&steps.normalizer)).or_else(|| too_long("decoder", growth(&steps.decoder)))
}

/// An upper bound of the factor for a text of at least one byte.
fn growth(step: &Value) -> f64 {
    let length = |text: &Value| text.as_str().map_or(0.0, |text| text.len() as f64);
    let steps = ["normalizers", "decoders"].iter().filter_map(|name| step[name].as_array()).flatten();
    let of_steps: f64 = steps.map(growth).product();
    of_steps
        * match step["type"].as_str() {
            Some("Prepend") => 1.0 + length(&step["prepend"]),
            Some("Replace") => match length(&step["pattern"]["String"]) {
                // A regular expression may match between any two bytes.
                0.0 => 1.0 + 2.0 * length(&step["content"]),
                pattern => (length(&step["content"]) / pattern).max(1.0),
            },
            _ => 1.0,
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_what_multiplies_a_text_is_refused() {
        let replace = |to: &str| json!({ "type": "Replace", "pattern": { "String": "a" }, "content": to });
        let file =
            |steps: Vec<Value>| json!({ "normalizer": { "type": "Sequence", "normalizers": steps } }).to_string();
        let found = |steps: Vec<Value>| unbounded_growth(file(steps).as_bytes());
        let usual = json!({ "type": "Prepend", "prepend": "\u{2581}" });
        let space = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
        assert_eq!(found(vec![usual, space]), None);
        assert_eq!(found(vec![replace("aa"); 10]), None);
        assert!(found(vec![replace("aaaaaaaaaa"); 12]).unwrap().contains("1e12 times"));
        let prepend = json!({ "type": "Prepend", "prepend": "x".repeat(1 << 20) });
        assert!(found(vec![prepend]).unwrap().contains("normalizer"));
        let between = json!({ "type": "Replace", "pattern": { "Regex": "" }, "content": "x".repeat(1 << 16) });
        assert!(unbounded_growth(json!({ "decoder": between }).to_string().as_bytes()).unwrap().contains("decoder"));
        assert_eq!(unbounded_growth(b"no JSON"), None);
    }
}
