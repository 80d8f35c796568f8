//! Chat templates: conversations as text.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer};

use super::files::TextFiles;
use super::jinja::{Problem, Template, TemplateValue};
use super::special::SpecialTokens;
use crate::error::{Error, ErrorKind, Result};

/// Characters of a template's complaint that an error repeats.
const MOST_SHOWN: usize = 2000;

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
    fields: TemplateValue,
}

impl Message {
    /// A message with a text.
    pub fn new(role: &str, content: &str) -> Self {
        let entries = vec![
            (TemplateValue::text("role"), TemplateValue::text(role)),
            (TemplateValue::text("content"), TemplateValue::text(content)),
        ];
        // Two texts are never too deep.
        Message { role: role.into(), fields: TemplateValue::map(entries).unwrap_or_default() }
    }

    /// Who says it: `system`, `user`, `assistant` or `tool`.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// The text, if the content is one.
    pub fn content(&self) -> Option<String> {
        self.fields.field("content")?.as_str().map(str::to_string)
    }

    /// The fields as templates see them: with the reasoning under both names that they read.
    fn for_template(&self) -> TemplateValue {
        let reasoning = REASONING.iter().find_map(|name| self.fields.field(name).filter(|value| !value.is_none()));
        let (Some(reasoning), TemplateValue::Map(map)) = (reasoning, &self.fields) else { return self.fields.clone() };
        let mut fields = map.entries.clone();
        let mut set = |name: &str, replace: bool| match fields.iter().position(|(own, _)| own.as_str() == Some(name)) {
            Some(at) if replace => fields[at].1 = reasoning.clone(),
            Some(_) => {}
            None => fields.push((TemplateValue::text(name), reasoning.clone())),
        };
        set("thinking", false);
        set("reasoning_content", true);
        // Not deeper than the fields of the message.
        TemplateValue::map(fields).unwrap_or_default()
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.fields)
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = TemplateValue::deserialize(deserializer)?;
        let role = fields.field("role").and_then(TemplateValue::as_str).map(Arc::from);
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
/// Python's texts, lists and dictionaries exist. It reads no files. Whatever its source is, compiling and rendering end: the
/// size and the nesting of the source are bounded (256 KiB, 100 levels), and so are the steps and the bytes of all texts and lists that a rendering
/// builds, each by a constant (2 million, 8 MiB) plus 64 for every byte of what is rendered.
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
    /// The template, and the one of conversations with tools.
    templates: Arc<(Template, Option<Template>)>,
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
        Self::compile(source, None)
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
                let called = |wanted| named.iter().find(|(name, _)| name == wanted).map(|(_, source)| source.as_str());
                let default = called(DEFAULT).ok_or_else(|| bad("a list without a template called `default`"))?;
                Self::compile(default, called(TOOL_USE)).map(Some)
            }
            Some(_) => Err(bad("another type")),
        }
    }

    fn compile(source: &str, with_tools: Option<&str>) -> Result<Self> {
        let parsed = |source| Template::parse(source).map_err(|problem| invalid(&problem));
        Ok(ChatTemplate { templates: Arc::new((parsed(source)?, with_tools.map(parsed).transpose()?)) })
    }

    /// Renders a conversation. Local.
    ///
    /// # Errors
    /// [`ErrorKind::Data`] if the template refuses the messages or fails on them, with its reason.
    pub fn render(&self, messages: &[Message], options: &ChatOptions, special: &SpecialTokens) -> Result<String> {
        let bad_tools = |found: &dyn fmt::Display| -> Error {
            ErrorKind::Data.error("tools", found, "a JSON list", "correct the list of tools")
        };
        let tools = match &options.tools {
            None => TemplateValue::None,
            Some(text) => serde_json::from_str(text).map_err(|error| bad_tools(&error))?,
        };
        let messages = messages.iter().map(Message::for_template).collect();
        let template = match &self.templates.1 {
            Some(template) if !tools.is_none() => template,
            _ => &self.templates.0,
        };
        let rendered = TemplateValue::list(messages).and_then(|messages| {
            let mut variables: Vec<(Arc<str>, TemplateValue)> = vec![
                ("messages".into(), messages),
                ("tools".into(), tools),
                ("documents".into(), TemplateValue::None),
                ("add_generation_prompt".into(), options.add_generation_prompt.into()),
            ];
            variables
                .extend(special.texts.iter().map(|(name, text)| (name.as_str().into(), TemplateValue::text(text))));
            for (name, value) in &options.variables {
                variables.push((name.as_str().into(), TemplateValue::of_json(value)?));
            }
            template.render(variables)
        });
        rendered.map_err(|problem| {
            let needed = "messages that the model's template accepts";
            let fix = "change the roles or contents of the messages";
            ErrorKind::Data.error("conversation", describe(&problem, "of the template"), needed, fix)
        })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChatTemplate")
    }
}

/// The error of a template that does not compile.
fn invalid(problem: &Problem) -> Error {
    let (needed, fix) = ("a valid Jinja template", "correct the template of the model");
    ErrorKind::Model.error("chat template", describe(problem, ""), needed, fix)
}

/// The text of a problem, with its line.
fn describe(problem: &Problem, of: &str) -> String {
    let text: String = problem.text.chars().take(MOST_SHOWN).collect();
    match problem.line {
        0 => text,
        line => format!("{text} in line {line} {of}").trim_end().to_string(),
    }
}
