//! Reading `config.json`: typed access to its fields, and which of them nobody has read.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::decoder::{Rope, RopeScaling};
use crate::error::{Error, ErrorKind, Result};
use crate::nn::Activation;

/// The fields of a `config.json`, each read at least once or known to change nothing.
pub(super) struct ConfigFields<'a> {
    fields: &'a Map<String, Value>,
    /// Where the fields are, for messages: empty, or `rope_scaling.`.
    place: String,
    read: RefCell<BTreeSet<String>>,
}

/// Largest number of layers, and of experts in a layer. The largest models that are known have 126 layers and 2,048 experts.
const MAX_COUNT: usize = 4096;

/// Fields that say that the tensors in files are not the weights themselves, but codes and scales.
const QUANTIZATION: &[&str] = &["quantization_config", "compression_config"];

/// Fields that do not change what a forward pass computes: names, tokens, training, generation and formats.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "attn_pdrop",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "decoder_start_token_id",
    "directionality",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "export_model_type",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "license",
    "mask_token_id",
    "max_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pad_token_id",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_last_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "use_return_dict",
];

impl<'a> ConfigFields<'a> {
    pub(super) fn new(json: &'a Value) -> Result<Self> {
        let fields = json.as_object().ok_or_else(|| {
            let found = format!("{json:.60}");
            ErrorKind::Model.error::<Error>("config.json", found, "an object", "correct the file")
        })?;
        Ok(ConfigFields { fields, place: String::new(), read: RefCell::default() })
    }

    /// The fields of an object in a field; none if it is absent or null.
    pub(super) fn object(&self, name: &str) -> Result<Option<ConfigFields<'a>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let fields = value.as_object().ok_or_else(|| self.bad(name, "an object"))?;
        let place = format!("{}{name}.", self.place);
        Ok(Some(ConfigFields { fields, place, read: RefCell::default() }))
    }

    /// The value of a field; none if it is absent or null.
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(name.to_string());
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is there, even if it is null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// Whether the field is there and null.
    pub(super) fn is_null(&self, name: &str) -> bool {
        self.fields.get(name).is_some_and(Value::is_null)
    }

    /// The error for a field whose value is not supported, or not valid.
    pub(super) fn bad(&self, name: &str, needed: &str) -> Error {
        let value = self.fields.get(name).unwrap_or(&Value::Null);
        let found = format!("field `{}{name}` with the value {value}", self.place);
        ErrorKind::Model.error("config.json", found, needed, "correct the field, or use a model without it")
    }

    pub(super) fn size(&self, name: &str) -> Result<Option<usize>> {
        let read = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        // No real model comes near; products of sizes stay far from overflow.
        let small = |value: &Value| read(value).filter(|n| *n <= 1 << 32);
        self.get(name).map(|value| small(value).ok_or_else(|| self.bad(name, "a size"))).transpose()
    }

    pub(super) fn size_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.size(name)?.unwrap_or(default))
    }

    /// A number of layers or experts, which are built one by one: bounded, so that a wrong number is an error and not a wait.
    pub(super) fn count_or(&self, name: &str, default: usize) -> Result<usize> {
        match self.size_or(name, default)? {
            count if count <= MAX_COUNT => Ok(count),
            _ => Err(self.bad(name, &format!("at most {MAX_COUNT}"))),
        }
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>> {
        let read = |value: &Value| value.as_f64().filter(|x| x.is_finite()).ok_or_else(|| self.bad(name, "a number"));
        self.get(name).map(read).transpose()
    }

    pub(super) fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.number(name)?.unwrap_or(default))
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        let read = |value: &Value| value.as_bool().ok_or_else(|| self.bad(name, "true or false"));
        self.get(name).map_or(Ok(default), read)
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.get(name).map(|value| value.as_str().ok_or_else(|| self.bad(name, "a text"))).transpose()
    }

    /// For the configuration of a model of text and images or sounds, the kind of the part for text; empty if it has none.
    pub(super) fn text_part(&self) -> Option<&'a str> {
        let has = |name: &&str| self.fields.get(*name).is_some_and(Value::is_object);
        ["text_config", "vision_config", "audio_config"].into_iter().find(has)?;
        Some(self.fields.get("text_config").and_then(|part| part["model_type"].as_str()).unwrap_or_default())
    }

    fn list<T>(&self, name: &str, needed: &str, read: fn(&'a Value) -> Option<T>) -> Result<Option<Vec<T>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let items = value.as_array().and_then(|items| items.iter().map(read).collect::<Option<Vec<T>>>());
        items.map(Some).ok_or_else(|| self.bad(name, needed))
    }

    pub(super) fn texts(&self, name: &str) -> Result<Option<Vec<&'a str>>> {
        self.list(name, "a list of texts", Value::as_str)
    }

    pub(super) fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>> {
        self.list(name, "a list of numbers", Value::as_f64)
    }

    pub(super) fn sizes(&self, name: &str) -> Result<Option<Vec<usize>>> {
        self.list(name, "a list of sizes", |value| value.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// An error unless a flag has the one value that is supported.
    pub(super) fn only(&self, name: &str, supported: bool) -> Result<()> {
        match self.flag(name, supported)? == supported {
            true => Ok(()),
            false => Err(self.bad(name, &format!("{supported}, the only value that is supported"))),
        }
    }

    /// The activation function in a field.
    pub(super) fn activation(&self, name: &str, default: Activation) -> Result<Activation> {
        Ok(match self.text(name)? {
            None => default,
            Some("silu" | "swish") => Activation::Silu,
            Some("gelu" | "gelu_python") => Activation::Gelu,
            Some("gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" | "gelu_python_tanh" | "gelu_accurate") => {
                Activation::GeluTanh
            }
            Some("quick_gelu") => Activation::QuickGelu,
            Some("relu") => Activation::Relu,
            Some("relu2") => Activation::ReluSquared,
            Some("tanh") => Activation::Tanh,
            Some("sigmoid") => Activation::Sigmoid,
            Some(_) => {
                return Err(self.bad(
                    name,
                    "silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, quick_gelu, relu, relu2, tanh or sigmoid",
                ));
            }
        })
    }

    /// An error that names the fields that were not read and may change the result: neither known to be harmless, nor
    /// switched off (null, false, an empty list or object).
    pub(super) fn refuse_unread(&self, ignored: &[String]) -> Result<()> {
        let read = self.read.borrow();
        let off = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            _ => false,
        };
        let known = |name: &String| {
            read.contains(name) || self.place.is_empty() && HARMLESS.contains(&name.as_str()) || ignored.contains(name)
        };
        let mut unread: Vec<String> = Vec::new();
        let mut quantized = None;
        for (name, value) in self.fields.iter().filter(|(name, value)| !known(name) && !off(value)) {
            if QUANTIZATION.contains(&name.as_str()) {
                quantized = Some((name, value));
            }
            unread.push(format!("`{}{name}` ({value:.40})", self.place));
        }
        if unread.is_empty() {
            return Ok(());
        }
        if let Some((name, value)) = quantized {
            let method = value["quant_method"].as_str().map_or(String::new(), |method| format!(" with {method:.40}"));
            let found = format!("weights that are quantized{method}: field `{name}`");
            let needed = "weights in f32, f16 or bf16, or a GGUF file, which may be quantized";
            let fix = "use the model that was quantized, or a GGUF file of it, or dequantize it with the library that quantized it";
            return Err(ErrorKind::Unsupported.error("config.json", found, needed, fix));
        }
        Err(ErrorKind::Unsupported.error(
            "config.json",
            format!("field(s) {}, which this library does not know for this kind of model", unread.join(", ")),
            "fields that it honours: an unknown one may change the result",
            "if it changes nothing, set it to null in config.json; a program may list it in `LoadOptions::ignored_fields`",
        ))
    }
}

/// What a family says about its rotary positions.
pub(super) struct RopeDefaults {
    pub(super) theta: f64,
    pub(super) theta_field: &'static str,
    /// Part of the features of a head that turns.
    pub(super) part: f64,
    pub(super) part_field: &'static str,
}

impl Default for RopeDefaults {
    fn default() -> Self {
        RopeDefaults { theta: 10000.0, theta_field: "rope_theta", part: 1.0, part_field: "partial_rotary_factor" }
    }
}

/// Sizes that the angles depend on.
#[derive(Clone, Copy)]
pub(super) struct RopeSizes {
    pub(super) head_dim: usize,
    pub(super) max_positions: usize,
}

/// Reads the rotary embedding of a model in either dialect: `rope_parameters`, or `rope_theta` and `rope_scaling`.
pub(super) fn read_rope(fields: &ConfigFields<'_>, defaults: &RopeDefaults, sizes: RopeSizes) -> Result<Rope> {
    let inner = match fields.object("rope_scaling")? {
        Some(inner) => Some(inner),
        None => fields.object("rope_parameters")?,
    };
    // Both may be there; the one that is not used then has to be known as read.
    fields.object("rope_parameters")?;
    read_rope_object(fields, inner.as_ref(), defaults, sizes)
}

/// As [`read_rope`], from the object that has the parameters.
pub(super) fn read_rope_object(
    fields: &ConfigFields<'_>,
    inner: Option<&ConfigFields<'_>>,
    defaults: &RopeDefaults,
    sizes: RopeSizes,
) -> Result<Rope> {
    let outer_theta = fields.number(defaults.theta_field)?;
    let outer_part = fields.number(defaults.part_field)?;
    let original = fields.size("original_max_position_embeddings")?;
    let theta = inner.map_or(Ok(None), |inner| inner.number("rope_theta"))?;
    let base = theta.or(outer_theta).unwrap_or(defaults.theta);
    let part = inner.map_or(Ok(None), |inner| inner.number("partial_rotary_factor"))?;
    let part = part.or(outer_part).unwrap_or(defaults.part);
    let size = (sizes.head_dim as f64 * part) as usize;
    let scaling = match inner {
        None => RopeScaling::None,
        Some(inner) => read_scaling(inner, original, size, sizes.max_positions)?,
    };
    if base <= 0.0 {
        return Err(fields.bad(defaults.theta_field, "a number above 0"));
    }
    Ok(Rope { base, size, scaling })
}

fn read_scaling(
    fields: &ConfigFields<'_>,
    outer_original: Option<usize>,
    size: usize,
    max_positions: usize,
) -> Result<RopeScaling> {
    let kind = match fields.text("rope_type")? {
        Some(kind) => Some(kind),
        None => fields.text("type")?,
    };
    // Older files have both names.
    fields.text("type")?;
    let above_zero = |name: &str, value: Option<f64>| -> Result<f64> {
        value.filter(|x| *x > 0.0).ok_or_else(|| fields.bad(name, "a number above 0"))
    };
    let needed = |name: &str| -> Result<f64> { above_zero(name, fields.number(name)?) };
    let original = || -> Result<usize> {
        let own = fields.size("original_max_position_embeddings")?;
        Ok(outer_original.or(own).unwrap_or(max_positions))
    };
    // The first Phi-3 files call it so.
    let kind = if fields.has("short_factor") && kind == Some("yarn") { Some("longrope") } else { kind };
    let scaling = match kind.unwrap_or("default") {
        "default" => {
            // Numbers that other types use change nothing here.
            fields.number("factor")?;
            fields.size("original_max_position_embeddings")?;
            RopeScaling::None
        }
        "linear" => RopeScaling::Linear { factor: needed("factor")? },
        "dynamic" => {
            fields.size("original_max_position_embeddings")?;
            RopeScaling::Dynamic { factor: needed("factor")?, positions: max_positions }
        }
        "llama3" => RopeScaling::Llama3 {
            factor: needed("factor")?,
            low: needed("low_freq_factor")?,
            high: needed("high_freq_factor")?,
            original: original()? as f64,
        },
        "yarn" => {
            let original = original()? as f64;
            let factor = match fields.number("factor")? {
                Some(factor) => above_zero("factor", Some(factor))?,
                None => max_positions as f64 / original,
            };
            let mscale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
            let both = fields.number("mscale")?.zip(fields.number("mscale_all_dim")?);
            let inferred = match both.filter(|(a, b)| *a != 0.0 && *b != 0.0) {
                Some((some, all)) => mscale(some) / mscale(all),
                None => mscale(1.0),
            };
            let or = |name: &str, default: f64| -> Result<f64> {
                Ok(fields.number(name)?.filter(|x| *x != 0.0).unwrap_or(default))
            };
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast: or("beta_fast", 32.0)?,
                beta_slow: or("beta_slow", 1.0)?,
                truncate: fields.flag("truncate", true)?,
                attention_factor: fields.number("attention_factor")?.unwrap_or(inferred),
            }
        }
        "longrope" | "su" => {
            let original = original()?;
            let divisors = |name: &str| -> Result<Vec<f64>> {
                let found = fields.numbers(name)?.filter(|d| d.len() == size.div_ceil(2) && d.iter().all(|x| *x > 0.0));
                found.ok_or_else(|| fields.bad(name, &format!("{} numbers above 0", size.div_ceil(2))))
            };
            let factor = fields.number("factor")?.unwrap_or(max_positions as f64 / original as f64);
            let inferred = match factor <= 1.0 {
                true => 1.0,
                false => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
            };
            RopeScaling::Long {
                short: divisors("short_factor")?,
                long: divisors("long_factor")?,
                original,
                attention_factor: fields.number("attention_factor")?.unwrap_or(inferred),
            }
        }
        _ => {
            let name = if fields.has("rope_type") { "rope_type" } else { "type" };
            return Err(fields.bad(name, "default, linear, dynamic, yarn, longrope or llama3"));
        }
    };
    fields.refuse_unread(&[])?;
    Ok(scaling)
}
