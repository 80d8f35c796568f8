//! JSON as Python's `json.dumps` writes it, which is what models saw in training.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// The layout of the text.
struct Style {
    ensure_ascii: bool,
    indent: Option<usize>,
    /// Between items, and between a key and its value.
    separators: (String, String),
    sort_keys: bool,
}

/// The filter `tojson` of chat templates, with the options of `json.dumps`.
#[expect(clippy::needless_pass_by_value, reason = "the type of a filter's named arguments")]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let item = if indent.is_some() { "," } else { ", " };
    let style = Style {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        separators: match separators.as_deref() {
            Some([item, key]) => (item.clone(), key.clone()),
            Some(other) => {
                let problem = format!("`separators` with {} texts instead of 2", other.len());
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
            None => (item.to_string(), ": ".to_string()),
        },
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut text = String::new();
    style.write(&mut text, value, 0)?;
    Ok(text)
}

impl Style {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        // Templates cannot build deeper values than this without the recursion limit of the template engine.
        if depth > 100 {
            return Err(Error::new(ErrorKind::InvalidOperation, "a value nested more than 100 levels deep"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(out, ['[', ']'], items.len(), depth, |out, i| self.write(out, &items[i], depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort_by_key(ToString::to_string);
                }
                self.write_items(out, ['{', '}'], keys.len(), depth, |out, i| {
                    let key = &keys[i];
                    let name = match key.kind() {
                        ValueKind::None => "null".to_string(),
                        ValueKind::Bool => key.to_string().to_lowercase(),
                        _ => key.to_string(),
                    };
                    self.write_text(out, &name);
                    out.push_str(&self.separators.1);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            other => return Err(Error::new(ErrorKind::InvalidOperation, format!("{other} has no form in JSON"))),
        }
        Ok(())
    }

    /// Writes the items of a list or an object between brackets.
    fn write_items(
        &self,
        out: &mut String,
        brackets: [char; 2],
        count: usize,
        depth: usize,
        mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |out: &mut String, depth: usize| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.push_str(&" ".repeat(indent.min(100) * depth));
            }
        };
        out.push(brackets[0]);
        for i in 0..count {
            if i > 0 {
                out.push_str(&self.separators.0);
            }
            new_line(out, depth + 1);
            item(out, i)?;
        }
        if count > 0 {
            new_line(out, depth);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && !c.is_ascii() => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        write!(out, "\\u{unit:04x}").expect("a string can be written to");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A float as Python's `repr` has it.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_string();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_string();
    }
    // Both languages write the shortest digits that give the number back; the exponent differs.
    let text = format!("{value:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, number) = exponent.strip_prefix('-').map_or(('+', exponent), |number| ('-', number));
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            format!("{digits}e{sign}{number:0>2}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_that_of_json_dumps() {
        let value: Value = serde_json::from_str(
            r#"{"b": [1, 2.5, -3e-7, 1e16, true, null], "a": {"x": "é\"\\\n\u0001\ud83d\ude42 <&'>"}, "e": [], "f": {}}"#,
        )
        .unwrap();
        let with = |options: Vec<(&str, Value)>| tojson(&value, options.into_iter().collect()).unwrap();
        // json.dumps(value, ensure_ascii=False), with indent=2 and sort_keys, and with ensure_ascii and separators
        assert_eq!(
            with(vec![]),
            r#"{"b": [1, 2.5, -3e-07, 1e+16, true, null], "a": {"x": "é\"\\\n\u0001🙂 <&'>"}, "e": [], "f": {}}"#
        );
        assert_eq!(
            with(vec![("indent", 2.into()), ("sort_keys", true.into())]),
            "{\n  \"a\": {\n    \"x\": \"é\\\"\\\\\\n\\u0001🙂 <&'>\"\n  },\n  \"b\": [\n    1,\n    2.5,\n    -3e-07,\n    \
             1e+16,\n    true,\n    null\n  ],\n  \"e\": [],\n  \"f\": {}\n}"
        );
        assert_eq!(
            with(vec![("ensure_ascii", true.into()), ("separators", Value::from(vec![",", ":"]))]),
            r#"{"b":[1,2.5,-3e-07,1e+16,true,null],"a":{"x":"\u00e9\"\\\n\u0001\ud83d\ude42 <&'>"},"e":[],"f":{}}"#
        );
    }
}
