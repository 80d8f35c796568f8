//! Tests, which templates write after `is`.

use super::ast::Comparison;
use super::expressions::Given;
use super::machine::{Machine, Outcome};
use super::value::TemplateValue;
use super::{Problem, check};

impl Machine<'_> {
    pub(super) fn test(&mut self, value: &TemplateValue, name: &str, given: &Given) -> Outcome<bool> {
        let whole = |value: &TemplateValue| match value {
            TemplateValue::Int(value) => Ok(*value),
            TemplateValue::Bool(value) => Ok(i128::from(*value)),
            other => Err(Problem::new(format!("`{name}` of {}", other.kind()))),
        };
        let comparison = match name {
            "eq" | "equalto" => Some(Comparison::Equal),
            "ne" => Some(Comparison::NotEqual),
            "lt" | "lessthan" => Some(Comparison::Less),
            "le" => Some(Comparison::LessEqual),
            "gt" | "greaterthan" => Some(Comparison::Greater),
            "ge" => Some(Comparison::GreaterEqual),
            "in" => Some(Comparison::In),
            _ => comparison_of_symbol(name),
        };
        if let Some(comparison) = comparison {
            return self.compare(comparison, value, &given.need(0, "other")?);
        }
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => value.is_none(),
            "boolean" => matches!(value, TemplateValue::Bool(_)),
            "true" => matches!(value, TemplateValue::Bool(true)),
            "false" => matches!(value, TemplateValue::Bool(false)),
            "number" => matches!(value, TemplateValue::Int(_) | TemplateValue::Float(_) | TemplateValue::Bool(_)),
            "integer" | "int" => matches!(value, TemplateValue::Int(_)),
            "float" => matches!(value, TemplateValue::Float(_)),
            "string" => matches!(value, TemplateValue::Text(_)),
            "mapping" => matches!(value, TemplateValue::Map(_)),
            // In Python texts and dictionaries are sequences too: whatever has a length and items.
            "sequence" => matches!(value, TemplateValue::List(_) | TemplateValue::Text(_) | TemplateValue::Map(_)),
            "iterable" => matches!(
                value,
                TemplateValue::List(_) | TemplateValue::Text(_) | TemplateValue::Map(_) | TemplateValue::Undefined
            ),
            "callable" => {
                matches!(value, TemplateValue::Macro(_) | TemplateValue::Function(_) | TemplateValue::Loop(_))
            }
            "escaped" | "safe" => false,
            "odd" => whole(value)? % 2 != 0,
            "even" => whole(value)? % 2 == 0,
            "divisibleby" => {
                let divisor = whole(&given.need(0, "num")?)?;
                check(divisor != 0, || "`divisibleby` 0".to_string())?;
                whole(value)?.checked_rem(divisor).unwrap_or(0) == 0
            }
            "sameas" => self.same(value, &given.need(0, "other")?)?,
            "lower" | "upper" => {
                let TemplateValue::Text(text) = value else { return Ok(false) };
                self.charge_read(text.len())?;
                let has_lower = text.chars().any(char::is_lowercase);
                let has_upper = text.chars().any(char::is_uppercase);
                if name == "lower" { has_lower && !has_upper } else { has_upper && !has_lower }
            }
            "startingwith" | "endingwith" => {
                let (TemplateValue::Text(text), part) = (value, given.text(0, "other")?) else { return Ok(false) };
                self.charge_read(part.len())?;
                if name == "startingwith" { text.starts_with(&*part) } else { text.ends_with(&*part) }
            }
            "filter" => super::filters::is_filter(&given_name(value)?),
            "test" => {
                let name = given_name(value)?;
                comparison_of_symbol(&name).is_some() || is_test(&name)
            }
            _ => return Err(Problem::new(format!("there is no test `{name}`"))),
        })
    }

    /// Identity of Python for the values for which templates ask it.
    fn same(&mut self, left: &TemplateValue, right: &TemplateValue) -> Outcome<bool> {
        match (left, right) {
            (TemplateValue::Bool(left), TemplateValue::Bool(right)) => Ok(left == right),
            (TemplateValue::Bool(_), _) | (_, TemplateValue::Bool(_)) => Ok(false),
            (TemplateValue::List(left), TemplateValue::List(right)) => Ok(std::sync::Arc::ptr_eq(left, right)),
            (TemplateValue::Map(left), TemplateValue::Map(right)) => Ok(std::sync::Arc::ptr_eq(left, right)),
            (TemplateValue::Int(_), TemplateValue::Float(_)) | (TemplateValue::Float(_), TemplateValue::Int(_)) => {
                Ok(false)
            }
            _ => self.equal(left, right),
        }
    }
}

fn given_name(value: &TemplateValue) -> Outcome<String> {
    value.as_str().map(str::to_string).ok_or_else(|| Problem::new("a name that is not a text"))
}

fn comparison_of_symbol(name: &str) -> Option<Comparison> {
    Some(match name {
        "==" => Comparison::Equal,
        "!=" => Comparison::NotEqual,
        "<" => Comparison::Less,
        "<=" => Comparison::LessEqual,
        ">" => Comparison::Greater,
        ">=" => Comparison::GreaterEqual,
        _ => return None,
    })
}

fn is_test(name: &str) -> bool {
    const NAMES: [&str; 34] = [
        "eq",
        "equalto",
        "ne",
        "lt",
        "lessthan",
        "le",
        "gt",
        "greaterthan",
        "ge",
        "in",
        "defined",
        "undefined",
        "none",
        "boolean",
        "true",
        "false",
        "number",
        "integer",
        "int",
        "float",
        "string",
        "mapping",
        "sequence",
        "iterable",
        "callable",
        "escaped",
        "odd",
        "even",
        "divisibleby",
        "sameas",
        "lower",
        "upper",
        "filter",
        "test",
    ];
    NAMES.contains(&name)
}
