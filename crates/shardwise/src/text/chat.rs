//! Chat templates: conversations as text.

use std::fmt;
use std::sync::Arc;

use minijinja::value::ValueKind;
use minijinja::{Environment, Value, context};
use serde::{Deserialize, Deserializer};

use super::files::TextFiles;
use super::json::tojson;
use super::special::SpecialTokens;
use super::strftime::strftime_now;
use crate::error::{Error, ErrorKind, Result};

/// Instructions that rendering may execute: a thousand times those of a conversation of a hundred messages. It bounds the
/// time of a template that was written to run forever.
const MOST_INSTRUCTIONS: u64 = 20_000_000;

/// Names under which messages have their reasoning; templates read the first or the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message of a conversation: a role, a content, and whatever else a template reads, such as `tool_calls`.
///
/// ```
/// use shardwise::text::Message;
///
/// let message: Message = serde_json::from_str(r#"{"role": "user", "content": "Hello"}"#).unwrap();
/// assert_eq!((message.role(), message.content()), ("user", Some("Hello".to_string())));
/// assert!(serde_json::from_str::<Message>(r#"{"content": "Hello"}"#).is_err());
/// ```
#[derive(Clone)]
pub struct Message {
    role: Arc<str>,
    fields: Value,
}

impl Message {
    /// A message with a text.
    pub fn new(role: &str, content: &str) -> Self {
        Message { role: role.into(), fields: Value::from_pairs([("role", role), ("content", content)]) }
    }

    /// Who says it: `system`, `user`, `assistant` or `tool`.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// The text, if the content is one.
    pub fn content(&self) -> Option<String> {
        self.fields.get_attr("content").ok()?.as_str().map(str::to_string)
    }

    /// The fields as templates see them: with the reasoning under both names that they read.
    fn for_template(&self) -> Value {
        let reasoning = REASONING
            .iter()
            .find_map(|name| self.fields.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none()));
        let Some(reasoning) = reasoning else { return self.fields.clone() };
        let names = self.fields.try_iter().into_iter().flatten();
        let own = names.filter_map(|name| Some((name.clone(), self.fields.get_item(&name).ok()?)));
        let mut fields: Vec<(Value, Value)> = own.collect();
        let mut set = |name: &str, replace: bool| match fields.iter().position(|(own, _)| own.as_str() == Some(name)) {
            Some(at) if replace => fields[at].1 = reasoning.clone(),
            Some(_) => {}
            None => fields.push((Value::from(name), reasoning.clone())),
        };
        set("thinking", false);
        set("reasoning_content", true);
        Value::from_pairs(fields)
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.fields)
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Value::deserialize(deserializer)?;
        let role = fields.get_attr("role").ok().and_then(|role| role.to_str());
        let problem = "a message is an object with a text as its `role`";
        Ok(Message { role: role.ok_or_else(|| serde::de::Error::custom(problem))?, fields })
    }
}

/// What a chat template renders besides the messages.
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// Ends the text with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// A JSON list of the tools that the model may call; `None` if there are none.
    pub tools: Option<String>,
    /// More variables of the template, such as `enable_thinking`.
    pub variables: serde_json::Map<String, serde_json::Value>,
}

/// A chat template: Jinja, in the environment that transformers gives it.
///
/// Blocks are trimmed, `raise_exception`, `strftime_now` (in UTC), `namespace`, `tojson`, loop controls and the methods of
/// Python's texts, lists and dictionaries exist. It reads no files, and what it may execute is bounded.
///
/// ```
/// use shardwise::text::{ChatOptions, ChatTemplate, Message, SpecialTokens};
///
/// let source = "{% for m in messages %}[{{ m.role }}] {{ m.content.strip() }}\n{% endfor %}";
/// let template = ChatTemplate::new(source)?;
/// let text = template.render(&[Message::new("user", " Hello ")], &ChatOptions::default(), &SpecialTokens::default())?;
/// assert_eq!(text, "[user] Hello\n");
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Clone)]
#[doc(alias = "apply_chat_template")]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
}

/// Name of the template that conversations without tools use.
const DEFAULT: &str = "default";
/// Name of the template for conversations with tools, if there is one.
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`ErrorKind::Model`] if it is not valid Jinja, with the line.
    pub fn new(source: &str) -> Result<Self> {
        Self::compile([(DEFAULT, source)])
    }

    /// Compiles the template of a model's files, if there is one: `chat_template.jinja`, or the template or list of named
    /// templates in `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ErrorKind::Model`] if it is not valid Jinja, or if a list has no template called `default`.
    pub fn of(files: &TextFiles) -> Result<Option<Self>> {
        if let Some(source) = &files.chat_template {
            return Self::new(source).map(Some);
        }
        let bad = |found: &str| {
            let needed = "a text, or a list of objects with `name` and `template`";
            ErrorKind::Model.error("chat template", found, needed, "correct tokenizer_config.json")
        };
        match files.tokenizer_config.get("chat_template") {
            None | Some(serde_json::Value::Null) => Ok(None),
            Some(serde_json::Value::String(source)) => Self::new(source).map(Some),
            Some(serde_json::Value::Array(list)) => {
                let named = |entry: &'_ serde_json::Value| {
                    Some((entry.get("name")?.as_str()?.to_string(), entry.get("template")?.as_str()?.to_string()))
                };
                let named: Option<Vec<(String, String)>> = list.iter().map(named).collect();
                let named = named.ok_or_else(|| bad("a list with something else"))?;
                if !named.iter().any(|(name, _)| name == DEFAULT) {
                    return Err(bad("a list without a template called `default`"));
                }
                Self::compile(named.iter().map(|(name, source)| (name.as_str(), source.as_str()))).map(Some)
            }
            Some(_) => Err(bad("another type")),
        }
    }

    fn compile<'a>(named: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_syntax(
            minijinja::syntax::SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .map_err(|error| invalid(&error))?,
        );
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(MOST_INSTRUCTIONS));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        // In Python texts and dictionaries are sequences too: whatever has a length and items.
        environment.add_test("sequence", |value: &Value| {
            matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
        });
        environment.add_function("strftime_now", |format: &str| strftime_now(format));
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
        });
        for (name, source) in named {
            environment
                .add_template_owned(name.to_string(), without_generation_tags(source))
                .map_err(|error| invalid(&error))?;
        }
        Ok(ChatTemplate { environment: Arc::new(environment) })
    }

    /// Renders a conversation. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Data`] if the template refuses the messages or fails on them, with its reason.
    pub fn render(&self, messages: &[Message], options: &ChatOptions, special: &SpecialTokens) -> Result<String> {
        let refused = |error: minijinja::Error| -> Error {
            let found = match error.line() {
                Some(line) => format!("{} in line {line} of the template", describe(&error)),
                None => describe(&error),
            };
            let needed = "messages that the model's template accepts";
            ErrorKind::Data.error("conversation", found, needed, "change the roles or contents of the messages")
        };
        let tools = match &options.tools {
            None => Value::from(()),
            Some(text) => serde_json::from_str(text).map_err(|error| {
                ErrorKind::Data.error::<Error>("tools", error, "a JSON list", "correct the list of tools")
            })?,
        };
        let with_tools = !tools.is_none() && self.environment.get_template(TOOL_USE).is_ok();
        let template = self.environment.get_template(if with_tools { TOOL_USE } else { DEFAULT }).map_err(refused)?;
        let messages: Vec<Value> = messages.iter().map(Message::for_template).collect();
        let given = context! {
            messages,
            tools,
            documents => Value::from(()),
            add_generation_prompt => options.add_generation_prompt,
        };
        let texts = special.texts.iter().map(|(name, text)| (name.as_str(), Value::from(text.as_str())));
        let more = options
            .variables
            .iter()
            .map(|(name, value)| (name.as_str(), Value::deserialize(value).unwrap_or_default()));
        let more = Value::from_pairs(texts.chain(more));
        template.render(context! { ..given, ..more }).map_err(refused)
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChatTemplate")
    }
}

/// The error of a template that does not compile.
fn invalid(error: &minijinja::Error) -> Error {
    let line = error.line().map(|line| format!(" in line {line}")).unwrap_or_default();
    let found = format!("{}{line}", describe(error));
    ErrorKind::Model.error("chat template", found, "a valid Jinja template", "correct the template of the model")
}

/// The text of an error, without the name of the template.
fn describe(error: &minijinja::Error) -> String {
    error.detail().map_or_else(|| error.kind().to_string(), str::to_string)
}

/// The source with the tags `generation` and `endgeneration`, which mark answers in the templates of some models and render
/// what is between them, as a condition that always holds.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let Some(length) = tag.find("%}") else { break };
        let inner = &tag[2..length];
        let (left, inner) = inner.split_at(inner.len() - inner.trim_start_matches(['-', '+']).len());
        let (inner, right) = inner.split_at(inner.trim_end_matches(['-', '+']).len());
        result.push_str(before);
        match inner.trim() {
            "generation" => result += &format!("{{%{left} if true {right}%}}"),
            "endgeneration" => result += &format!("{{%{left} endif {right}%}}"),
            _ => result.push_str(&tag[..length + 2]),
        }
        rest = &tag[length + 2..];
    }
    result + rest
}
