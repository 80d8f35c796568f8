//! Values as text, as Python writes them.

use super::Problem;
use super::machine::{Machine, Outcome};
use super::value::TemplateValue;

impl Machine<'_> {
    /// Adds the text of a value: `str` of Python.
    pub(super) fn write(&mut self, out: &mut String, value: &TemplateValue) -> Outcome<()> {
        match value {
            TemplateValue::Undefined => Ok(()),
            TemplateValue::Text(text) => self.push(out, text),
            other => self.represent(out, other),
        }
    }

    /// The text of a value.
    pub(super) fn text_of(&mut self, value: &TemplateValue) -> Outcome<std::sync::Arc<str>> {
        if let TemplateValue::Text(text) = value {
            return Ok(text.clone());
        }
        let mut text = String::new();
        self.write(&mut text, value)?;
        Ok(text.into())
    }

    /// Adds the text of a value in a list: `repr` of Python.
    pub(super) fn represent(&mut self, out: &mut String, value: &TemplateValue) -> Outcome<()> {
        match value {
            TemplateValue::Undefined => self.push(out, "Undefined"),
            TemplateValue::None => self.push(out, "None"),
            TemplateValue::Bool(value) => self.push(out, if *value { "True" } else { "False" }),
            TemplateValue::Int(value) => self.push(out, &value.to_string()),
            TemplateValue::Float(value) => self.push(out, &float(*value)),
            TemplateValue::Text(text) => self.quoted(out, text),
            TemplateValue::List(list) => {
                let (open, close) = if list.is_tuple { ("(", ")") } else { ("[", "]") };
                self.push(out, open)?;
                for (at, item) in list.items.iter().enumerate() {
                    if at > 0 {
                        self.push(out, ", ")?;
                    }
                    self.nested(|machine| machine.represent(out, item))?;
                }
                if list.is_tuple && list.items.len() == 1 {
                    self.push(out, ",")?;
                }
                self.push(out, close)
            }
            TemplateValue::Map(map) => {
                self.push(out, "{")?;
                for (at, (key, value)) in map.entries.iter().enumerate() {
                    if at > 0 {
                        self.push(out, ", ")?;
                    }
                    self.nested(|machine| machine.represent(out, key))?;
                    self.push(out, ": ")?;
                    self.nested(|machine| machine.represent(out, value))?;
                }
                self.push(out, "}")
            }
            TemplateValue::Namespace(index) => {
                let fields = self.namespaces[*index].clone();
                self.charge_list(2 * fields.len())?;
                self.push(out, "<Namespace {")?;
                for (at, (name, value)) in fields.iter().enumerate() {
                    if at > 0 {
                        self.push(out, ", ")?;
                    }
                    self.quoted(out, name)?;
                    self.push(out, ": ")?;
                    // A namespace may contain itself; the levels end it.
                    self.nested(|machine| machine.represent(out, value))?;
                }
                self.push(out, "}>")
            }
            TemplateValue::Macro(_) => self.push(out, "<Macro>"),
            TemplateValue::Loop(_) => self.push(out, "<LoopContext>"),
            TemplateValue::Function(name) => self.push(out, &format!("<function {name}>")),
        }
    }

    /// Adds a text in quotes, with Python's choice of them.
    fn quoted(&mut self, out: &mut String, text: &str) -> Outcome<()> {
        // The longest form of a byte has four.
        self.charge_text(4 * text.len())?;
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        out.push(quote);
        for c in text.chars() {
            match c {
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                c if c == quote => out.extend(['\\', c]),
                c if c < ' ' || ('\u{7f}'..='\u{a0}').contains(&c) || c == '\u{ad}' => {
                    *out += &format!("\\x{:02x}", u32::from(c));
                }
                c => out.push(c),
            }
        }
        out.push(quote);
        Ok(())
    }

    /// Writes a value as JSON.
    pub(super) fn json(&mut self, value: &TemplateValue, style: &JsonStyle) -> Outcome<TemplateValue> {
        let mut text = String::new();
        self.write_json(&mut text, value, style, 0)?;
        self.text(&text)
    }
}

/// The layout of JSON, with the options of `json.dumps`.
pub(super) struct JsonStyle {
    pub(super) ensure_ascii: bool,
    /// What begins a line, once per level.
    pub(super) indent: Option<String>,
    /// Between items, and between a key and its value.
    pub(super) separators: (String, String),
    pub(super) sort_keys: bool,
}

impl Machine<'_> {
    fn write_json(&mut self, out: &mut String, value: &TemplateValue, style: &JsonStyle, depth: usize) -> Outcome<()> {
        match value {
            TemplateValue::None => self.push(out, "null"),
            TemplateValue::Bool(value) => self.push(out, if *value { "true" } else { "false" }),
            TemplateValue::Int(value) => self.push(out, &value.to_string()),
            TemplateValue::Float(value) => self.push(out, &json_float(*value)),
            TemplateValue::Text(text) => self.write_json_text(out, text, style),
            TemplateValue::List(list) => {
                self.push(out, "[")?;
                for (at, item) in list.items.iter().enumerate() {
                    self.json_item(out, style, at, depth + 1)?;
                    self.nested(|machine| machine.write_json(out, item, style, depth + 1))?;
                }
                self.json_end(out, style, list.items.len(), depth)?;
                self.push(out, "]")
            }
            TemplateValue::Map(map) => {
                self.push(out, "{")?;
                self.charge_list(3 * map.entries.len())?;
                let mut entries: Vec<&(TemplateValue, TemplateValue)> = map.entries.iter().collect();
                if style.sort_keys {
                    // Keys that are not texts have none among themselves here, as there are none in JSON.
                    self.charge_steps((entries.len() as u64).saturating_mul(20))?;
                    entries.sort_by(|a, b| a.0.as_str().cmp(&b.0.as_str()));
                }
                for (at, (key, value)) in entries.into_iter().enumerate() {
                    self.json_item(out, style, at, depth + 1)?;
                    let name = match key {
                        TemplateValue::None => "null".into(),
                        TemplateValue::Bool(true) => "true".into(),
                        TemplateValue::Bool(false) => "false".into(),
                        other => self.text_of(other)?,
                    };
                    self.write_json_text(out, &name, style)?;
                    self.push(out, &style.separators.1)?;
                    self.nested(|machine| machine.write_json(out, value, style, depth + 1))?;
                }
                self.json_end(out, style, map.entries.len(), depth)?;
                self.push(out, "}")
            }
            other => Err(Problem::new(format!("{} has no form in JSON", other.kind()))),
        }
    }

    /// What comes before an item.
    fn json_item(&mut self, out: &mut String, style: &JsonStyle, at: usize, depth: usize) -> Outcome<()> {
        if at > 0 {
            self.push(out, &style.separators.0)?;
        }
        self.json_line(out, style, depth)
    }

    fn json_end(&mut self, out: &mut String, style: &JsonStyle, count: usize, depth: usize) -> Outcome<()> {
        if count > 0 { self.json_line(out, style, depth) } else { Ok(()) }
    }

    fn json_line(&mut self, out: &mut String, style: &JsonStyle, depth: usize) -> Outcome<()> {
        let Some(indent) = &style.indent else { return Ok(()) };
        self.push(out, "\n")?;
        (0..depth).try_for_each(|_| self.push(out, indent))
    }

    fn write_json_text(&mut self, out: &mut String, text: &str, style: &JsonStyle) -> Outcome<()> {
        // The longest form of a byte has six.
        self.charge_text(6 * text.len())?;
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
                c if c < ' ' || style.ensure_ascii && !c.is_ascii() => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        *out += &format!("\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
        Ok(())
    }
}

fn json_float(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_string()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity" } else { "-Infinity" }.to_string()
    } else {
        float(value)
    }
}

/// A float as Python's `repr` has it.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_string();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_string();
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
