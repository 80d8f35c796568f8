//! Signatures as PyTorch's documentation writes them: `torch.addmm(input, mat1, mat2, *, beta=1, alpha=1)`.

use serde_json::Value;

/// The name of an operator and its parameters in order, with their defaults.
pub(super) struct Signature {
    /// Name of the operator in PyTorch.
    pub(super) name: String,
    parameters: Vec<Parameter>,
}

struct Parameter {
    name: String,
    default: Option<Value>,
    /// Whether it may be given by position.
    positional: bool,
}

impl Signature {
    /// Reads a signature.
    ///
    /// # Panics
    /// If it has no parentheses, or a default that is neither JSON nor None, True, False, or a quoted word.
    pub(super) fn parse(text: &str) -> Self {
        let (name, rest) = text.split_once('(').expect("a name and parameters in parentheses");
        let rest = rest.strip_suffix(')').expect("a closing parenthesis");
        let mut positional = true;
        let mut parameters = Vec::new();
        for part in rest.split(", ").filter(|p| !p.is_empty()) {
            if part == "*" {
                positional = false;
                continue;
            }
            let (name, default) = match part.split_once('=') {
                Some((name, default)) => (name, Some(value_of(default))),
                None => (part.trim_start_matches('*'), None),
            };
            parameters.push(Parameter { name: name.to_string(), default, positional });
        }
        Signature { name: name.to_string(), parameters }
    }

    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.parameters.iter().filter(|p| p.positional).position(|p| p.name == name)
    }

    pub(super) fn default_of(&self, name: &str) -> Option<&Value> {
        self.parameters.iter().find(|p| p.name == name)?.default.as_ref()
    }

    /// The first argument by name that the signature does not have.
    pub(super) fn unknown<'k>(&self, keyword: &'k Value) -> Option<&'k str> {
        let names = keyword.as_object()?.keys();
        names.map(String::as_str).find(|name| self.parameters.iter().all(|p| p.name != *name))
    }
}

fn value_of(text: &str) -> Value {
    match text {
        "None" => Value::Null,
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "inf" => serde_json::json!({"float": "inf"}),
        _ => match text.strip_prefix('\'').and_then(|t| t.strip_suffix('\'')) {
            Some(word) => Value::String(word.to_string()),
            None => serde_json::from_str(text).unwrap_or_else(|e| panic!("the default {text}: {e}")),
        },
    }
}
