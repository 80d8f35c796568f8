//! Filters of texts, numbers and single values; those of lists are in `sequences`.

use super::ast::Invocation;
use super::expressions::Given;
use super::machine::{Machine, Outcome};
use super::value::TemplateValue;
use super::write::JsonStyle;
use super::{Problem, check, sequences};

const NAMES: [&str; 30] = [
    "abs",
    "attr",
    "bool",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "e",
    "escape",
    "float",
    "forceescape",
    "format",
    "indent",
    "int",
    "length",
    "lines",
    "lower",
    "pprint",
    "replace",
    "round",
    "safe",
    "split",
    "string",
    "title",
    "tojson",
    "trim",
    "truncate",
    "upper",
    "wordcount",
];

/// Digits that `round` may be asked for; a float has 17.
const MOST_DIGITS: i128 = 300;

pub(super) fn is_filter(name: &str) -> bool {
    NAMES.contains(&name) || sequences::NAMES.contains(&name)
}

impl<'t> Machine<'t> {
    pub(super) fn filter(&mut self, value: TemplateValue, invocation: &'t Invocation) -> Outcome<TemplateValue> {
        let given = self.given(&invocation.arguments)?;
        self.apply_filter(&invocation.name, value, &given)
    }

    pub(super) fn apply_filter(&mut self, name: &str, value: TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        if sequences::NAMES.contains(&name) {
            return self.sequence_filter(name, &value, given);
        }
        match name {
            "default" | "d" => {
                let replaced = value.is_undefined() || given.flag(1, "boolean") && !value.is_true();
                if !replaced {
                    return Ok(value);
                }
                Ok(given.get(0, "default_value").unwrap_or_else(|| TemplateValue::text("")))
            }
            "safe" | "string" => Ok(TemplateValue::Text(self.text_of(&value)?)),
            "length" | "count" => Ok(self.length(&value)?.into()),
            "abs" => match value {
                TemplateValue::Int(value) => {
                    Ok(TemplateValue::Int(value.checked_abs().ok_or_else(|| Problem::new("`abs` beyond 128 bits"))?))
                }
                TemplateValue::Float(value) => Ok(TemplateValue::Float(value.abs())),
                other => Err(Problem::new(format!("`abs` of {}", other.kind()))),
            },
            "bool" => Ok(value.is_true().into()),
            "int" => self.int(&value, given),
            "float" => {
                let default = given.get(0, "default").unwrap_or(TemplateValue::Float(0.0));
                let found = match &value {
                    TemplateValue::Int(value) => Some(*value as f64),
                    TemplateValue::Bool(value) => Some(f64::from(u8::from(*value))),
                    TemplateValue::Float(value) => Some(*value),
                    TemplateValue::Text(text) => {
                        self.charge_read(text.len())?;
                        text.trim().parse().ok()
                    }
                    _ => None,
                };
                Ok(found.map_or(default, TemplateValue::Float))
            }
            "round" => round(&value, given),
            "attr" => {
                let name = given.text(0, "name")?;
                self.attribute(&value, &name)
            }
            "pprint" => {
                let mut text = String::new();
                self.represent(&mut text, &value)?;
                self.text(&text)
            }
            "tojson" => self.tojson(&value, given),
            "escape" | "e" | "forceescape" => {
                let text = self.text_of(&value)?;
                // The longest form of a byte has five.
                self.charge_text(5 * text.len())?;
                let mut escaped = String::new();
                for c in text.chars() {
                    match c {
                        '&' => escaped += "&amp;",
                        '<' => escaped += "&lt;",
                        '>' => escaped += "&gt;",
                        '"' => escaped += "&#34;",
                        '\'' => escaped += "&#39;",
                        c => escaped.push(c),
                    }
                }
                self.text(&escaped)
            }
            "indent" => self.indent(&value, given),
            "format" => {
                let format = self.text_of(&value)?;
                self.printf(&format, given)
            }
            "split" => {
                let text = self.text_of(&value)?;
                self.split(&text, given)
            }
            "lines" => {
                let text = TemplateValue::Text(self.text_of(&value)?);
                self.method(&text, "splitlines", &Given::none())
            }
            "upper" | "lower" | "title" | "capitalize" | "center" | "replace" => {
                let text = TemplateValue::Text(self.text_of(&value)?);
                if name == "replace" {
                    let text_at = |machine: &mut Self, at: usize, name: &str| {
                        let part = given.need(at, name)?;
                        Ok(TemplateValue::Text(machine.text_of(&part)?))
                    };
                    let mut positional = vec![text_at(self, 0, "old")?, text_at(self, 1, "new")?];
                    positional.extend(given.get(2, "count"));
                    return self.method(&text, name, &Given { positional, named: Vec::new() });
                }
                if name == "center" && given.get(0, "width").is_none() {
                    return self.method(&text, name, &Given::one(TemplateValue::Int(80)));
                }
                self.method(&text, name, given)
            }
            "trim" => {
                let text = TemplateValue::Text(self.text_of(&value)?);
                self.method(&text, "strip", given)
            }
            "truncate" => self.truncate(&value, given),
            "wordcount" => {
                let text = self.text_of(&value)?;
                self.charge_read(text.len())?;
                Ok(text.split_whitespace().count().into())
            }
            _ => Err(Problem::new(format!("there is no filter `{name}`"))),
        }
    }

    fn int(&mut self, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let default = given.get(0, "default").unwrap_or(TemplateValue::Int(0));
        let found = match value {
            TemplateValue::Int(value) => Some(*value),
            TemplateValue::Bool(value) => Some((*value).into()),
            TemplateValue::Float(value) => value.is_finite().then_some(value.trunc() as i128),
            TemplateValue::Text(text) => {
                self.charge_read(text.len())?;
                let radix = given.integer(1, "base")?.unwrap_or(10);
                let radix = u32::try_from(radix).ok().filter(|radix| (2..=36).contains(radix));
                let radix = radix.ok_or_else(|| Problem::new("`int` with a base that is not between 2 and 36"))?;
                let whole = i128::from_str_radix(text.trim(), radix).ok();
                whole.or_else(|| text.trim().parse::<f64>().ok().filter(|f| f.is_finite()).map(|f| f.trunc() as i128))
            }
            _ => None,
        };
        Ok(found.map_or(default, TemplateValue::Int))
    }

    fn tojson(&mut self, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let known = ["indent", "separators", "ensure_ascii", "sort_keys"];
        for (name, _) in &given.named {
            check(known.contains(&&**name), || format!("`tojson` has no option `{name}`"))?;
        }
        let indent = match given.get(0, "indent") {
            None | Some(TemplateValue::None | TemplateValue::Undefined) => None,
            Some(TemplateValue::Int(width)) => {
                let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX >> 1);
                self.charge_text(width)?;
                Some(" ".repeat(width))
            }
            Some(TemplateValue::Text(text)) => Some(text.to_string()),
            Some(other) => return Err(Problem::new(format!("`tojson` with {} as its indent", other.kind()))),
        };
        let item = if indent.is_some() { "," } else { ", " };
        let separators = match given.get(usize::MAX, "separators") {
            None | Some(TemplateValue::None | TemplateValue::Undefined) => (item.to_string(), ": ".to_string()),
            Some(value) => match &self.items(&value)?[..] {
                [TemplateValue::Text(item), TemplateValue::Text(key)] => (item.to_string(), key.to_string()),
                _ => return Err(Problem::new("`tojson` with `separators` that are not two texts")),
            },
        };
        let ensure_ascii = given.flag(usize::MAX, "ensure_ascii");
        let style = JsonStyle { ensure_ascii, indent, separators, sort_keys: given.flag(usize::MAX, "sort_keys") };
        self.json(value, &style)
    }

    fn indent(&mut self, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let text = self.text_of(value)?;
        let pad: String = match given.get(0, "width") {
            Some(TemplateValue::Text(pad)) => pad.to_string(),
            None => "    ".to_string(),
            Some(_) => {
                let width = given.integer(0, "width")?.unwrap_or(4).max(0);
                let width = usize::try_from(width).unwrap_or(usize::MAX >> 1);
                self.charge_text(width)?;
                " ".repeat(width)
            }
        };
        let (first, blank) = (given.flag(1, "first"), given.flag(2, "blank"));
        let mut result = String::new();
        for (at, line) in text.split('\n').enumerate() {
            if at > 0 {
                self.push(&mut result, "\n")?;
            }
            if (at > 0 || first) && (blank || !line.is_empty()) {
                self.push(&mut result, &pad)?;
            }
            self.push(&mut result, line)?;
        }
        self.text(&result)
    }

    fn truncate(&mut self, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let text = self.text_of(value)?;
        let length = usize::try_from(given.integer(0, "length")?.unwrap_or(255)).unwrap_or(usize::MAX >> 1);
        let end = given.get(2, "end").map_or(Ok("...".into()), |end| self.text_of(&end))?;
        let leeway = usize::try_from(given.integer(3, "leeway")?.unwrap_or(5)).unwrap_or(0);
        self.charge_read(2 * text.len() + end.len())?;
        if text.chars().count() <= length.saturating_add(leeway) {
            return Ok(TemplateValue::Text(text));
        }
        let kept = length.saturating_sub(end.chars().count());
        let cut: usize = text.chars().take(kept).map(char::len_utf8).sum();
        let mut kept = &text[..cut];
        if !given.flag(1, "killwords") {
            kept = kept.rsplit_once(' ').map_or(kept, |(kept, _)| kept);
        }
        self.charge_text(kept.len() + end.len())?;
        self.text(&[kept, &end].concat())
    }
}

fn round(value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
    let number = match value {
        TemplateValue::Int(value) => *value as f64,
        TemplateValue::Float(value) => *value,
        other => return Err(Problem::new(format!("`round` of {}", other.kind()))),
    };
    let digits = given.integer(0, "precision")?.unwrap_or(0);
    check(digits.abs() <= MOST_DIGITS, || format!("`round` to {digits} digits"))?;
    let method = given.get(1, "method");
    let method = method.as_ref().and_then(TemplateValue::as_str).unwrap_or("common");
    let scale = 10f64.powi(digits as i32);
    let rounded = match method {
        // The digits of the number decide, as in Python, not those of its product with the scale.
        "common" if digits >= 0 => format!("{number:.*}", digits as usize).parse().unwrap_or(number),
        "common" => (number * scale).round_ties_even() / scale,
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        other => {
            return Err(Problem::new(format!(
                "`round` with the method {:?}",
                other.chars().take(40).collect::<String>()
            )));
        }
    };
    Ok(TemplateValue::Float(rounded))
}
