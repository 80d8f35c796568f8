//! Models of other libraries: their configuration, and the model that it describes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use candle_core::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};

use super::cache::KvCache;
use super::decoder::{Decoder, DecoderSpec, DropoutSpec, Logits};
use super::encoder::{Encoder, EncoderSpec};
use super::families::{Architecture, Family};
use super::fields::ConfigFields;
use super::language::{LanguageModel, batch_loss, example_batch, initialize_weights, loss_of_logits};
use super::model::{Model, ModelSpec};
use super::names::{WeightNames, torch_name};
use super::source::{gguf_file, load_tokenizer};
use crate::checkpoint::{Catalog, gguf};
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result};
use crate::nn::{Builder, Forward, Module, ModuleItem};
use crate::param::Param;
use crate::read_file::{MOST_CONFIG_BYTES, read_text};
use crate::tensor::DTensor;
use crate::text::Tokenizer;

/// The configuration of a model in Hugging Face's form, `config.json`, of any family that this library knows.
///
/// Both dialects are read: that of transformers 5 (`rope_parameters`, `dtype`) and the older one (`rope_theta`, `rope_scaling`,
/// `torch_dtype`). Fields that change the result and are not supported are errors that name them.
///
/// It is a [`ModelSpec`], so planners, [`estimate_step`](super::estimate_step), [`build`](super::build) and
/// [`export_hf`](super::export_hf) take it as they take the configurations of the models of this crate.
///
/// ```
/// use shardwise::models::PretrainedConfig;
///
/// let json = serde_json::json!({"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72});
/// let config = PretrainedConfig::from_json(&json)?;
/// assert_eq!((config.model_type(), config.heads()), ("llama", (9, 3)));
/// let error = PretrainedConfig::from_json(&serde_json::json!({"model_type": "llama", "sliding_tiles": 4})).unwrap_err();
/// assert!(error.to_string().contains("`sliding_tiles`"));
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "AutoConfig")]
#[derive(Clone)]
pub struct PretrainedConfig {
    family: &'static Family,
    architecture: Arc<ModelArchitecture>,
    json: Value,
}

/// As [`Architecture`], with a decoder that is shared.
enum ModelArchitecture {
    Decoder(Arc<DecoderSpec>),
    Encoder(EncoderSpec),
}

impl PretrainedConfig {
    /// Reads the configuration of a model directory, of a GGUF file, or a `config.json`. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such file, it is not JSON, the model is of an unknown kind, or a field is not
    /// supported.
    #[doc(alias = "from_pretrained")]
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        Self::read_ignoring(path.as_ref(), &[])
    }

    pub(super) fn read_ignoring(path: &Path, ignored: &[String]) -> Result<Self> {
        if let Some(file) = gguf_file(path) {
            return Self::from_json_ignoring(&gguf::open_as_hf(file)?.config, ignored);
        }
        let path = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let unreadable = |found: String| {
            let needed = "a model directory with a config.json";
            ErrorKind::path(&path).error::<Error>("model", found, needed, "check the path, or download the file again")
        };
        let text =
            read_text(&path, MOST_CONFIG_BYTES).map_err(|error| unreadable(format!("{error}: {}", path.display())))?;
        let json = serde_json::from_str(&text).map_err(|error| unreadable(format!("{error} in {}", path.display())))?;
        Self::from_json_ignoring(&json, ignored)
    }

    /// Reads a configuration from JSON. Local; errors as for [`read`](Self::read).
    pub fn from_json(json: &Value) -> Result<Self> {
        Self::from_json_ignoring(json, &[])
    }

    /// The configuration of a causal language model that this crate writes, with dropout, which is not read from JSON.
    pub(super) fn of_sizes(json: &Value, dropout: DropoutSpec) -> Result<Self> {
        let mut config = Self::from_json(json)?;
        let spec = DecoderSpec { dropout, ..DecoderSpec::clone(config.decoder()?) };
        config.architecture = Arc::new(ModelArchitecture::Decoder(Arc::new(spec)));
        Ok(config)
    }

    /// As [`from_json`](Self::from_json), without errors for unknown fields of these names.
    pub fn from_json_ignoring(json: &Value, ignored: &[String]) -> Result<Self> {
        let fields = ConfigFields::new(json)?;
        let family = Family::of(&fields)?;
        let architecture = (family.read)(&fields)?;
        fields.refuse_unread(ignored)?;
        let architecture = match architecture {
            Architecture::Decoder(spec) => {
                spec.check(family.model_type)?;
                ModelArchitecture::Decoder(Arc::new(spec))
            }
            Architecture::Encoder(spec) => {
                spec.check(family.model_type)?;
                ModelArchitecture::Encoder(spec)
            }
        };
        Ok(PretrainedConfig { family, architecture: Arc::new(architecture), json: json.clone() })
    }

    /// Names of all kinds of models, as `model_type` in `config.json` has them.
    pub fn model_types() -> Vec<&'static str> {
        Family::names().collect()
    }

    /// The kind of the model, such as `llama`.
    pub fn model_type(&self) -> &'static str {
        self.family.model_type
    }

    /// Whether it is an encoder such as BERT, and not a causal language model.
    pub fn is_encoder(&self) -> bool {
        matches!(*self.architecture, ModelArchitecture::Encoder(_))
    }

    /// The JSON that was read.
    pub fn json(&self) -> &Value {
        &self.json
    }

    /// Size of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        match &*self.architecture {
            ModelArchitecture::Decoder(spec) => spec.vocab_size,
            ModelArchitecture::Encoder(spec) => spec.vocab_size,
        }
    }

    /// Longest sequence that the model is meant for, in tokens.
    #[doc(alias = "max_position_embeddings")]
    pub fn max_positions(&self) -> usize {
        match &*self.architecture {
            ModelArchitecture::Decoder(spec) => spec.max_positions,
            ModelArchitecture::Encoder(spec) => spec.positions - spec.first_position,
        }
    }

    /// Numbers of query heads and of key heads.
    pub fn heads(&self) -> (usize, usize) {
        match &*self.architecture {
            ModelArchitecture::Decoder(spec) => (spec.attention.heads, spec.attention.key_heads),
            ModelArchitecture::Encoder(spec) => (spec.heads, spec.heads),
        }
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        match &*self.architecture {
            ModelArchitecture::Decoder(spec) => spec.layers.len(),
            ModelArchitecture::Encoder(spec) => spec.layers,
        }
    }

    /// Tokens that end a text, from `eos_token_id`, which is a number or a list.
    pub fn eos_token_ids(&self) -> Vec<u32> {
        let ids = match &self.json["eos_token_id"] {
            Value::Array(ids) => ids.clone(),
            one => vec![one.clone()],
        };
        ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    }

    pub(super) fn family(&self) -> &'static Family {
        self.family
    }

    /// Names in files of the parameters of a module that was built from this configuration.
    pub(super) fn weight_names_of(&self, module: &dyn Module) -> WeightNames {
        let params: BTreeMap<String, Param> = module.named_parameters().into_iter().collect();
        self.family.weight_names(&params, self.layers(), self.heads().0)
    }

    /// Names of these parameters in files that have tensors of certain names.
    pub(super) fn stored_names_of(&self, params: &BTreeMap<String, Param>, stored: &Catalog) -> WeightNames {
        let is_stored = |name: &str| {
            let bare = name.strip_prefix(self.family.prefix).unwrap_or(name);
            stored.tensors.contains_key(name) || stored.tensors.contains_key(bare)
        };
        self.family.stored_names(params, self.layers(), self.heads().0, is_stored)
    }

    /// Builds an encoder; the builder creates its parameters.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is a causal language model.
    pub fn build_encoder(&self, builder: &Builder) -> Result<Encoder> {
        match &*self.architecture {
            ModelArchitecture::Encoder(spec) => Encoder::new(builder, spec),
            ModelArchitecture::Decoder(_) => {
                let found = format!("a causal language model ({})", self.model_type());
                Err(ErrorKind::Model.error("model", found, "an encoder such as bert", "use `models::load` for it"))
            }
        }
    }

    /// The same encoder without a pooler, if files do not have one; models that were trained for other tasks may lack it.
    pub(super) fn with_pooler_of(mut self, stored: &Catalog) -> Self {
        if let ModelArchitecture::Encoder(spec) = &*self.architecture {
            let pooler = spec.pooler && stored.tensors.keys().any(|name| name.ends_with("pooler.dense.weight"));
            self.architecture = Arc::new(ModelArchitecture::Encoder(EncoderSpec { pooler, ..spec.clone() }));
        }
        self
    }

    fn decoder(&self) -> Result<&Arc<DecoderSpec>> {
        match &*self.architecture {
            ModelArchitecture::Decoder(spec) => Ok(spec),
            ModelArchitecture::Encoder(_) => {
                let found = format!("an encoder ({})", self.model_type());
                Err(ErrorKind::Model.error(
                    "model",
                    found,
                    "a causal language model",
                    "use `models::load_encoder` for it",
                ))
            }
        }
    }
}

/// As the JSON that was read.
impl Serialize for PretrainedConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.json.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PretrainedConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        PretrainedConfig::from_json(&Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl fmt::Debug for PretrainedConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PretrainedConfig({})", self.json)
    }
}

impl PartialEq for PretrainedConfig {
    fn eq(&self, other: &Self) -> bool {
        self.json == other.json
    }
}

impl ModelSpec for PretrainedConfig {
    type Model = PretrainedModel;

    fn check(&self) -> Result<()> {
        self.decoder().map(drop)
    }

    fn build(&self, builder: &Builder) -> Result<PretrainedModel> {
        let spec = self.decoder()?;
        let decoder = Decoder::new(builder, spec)?;
        if !builder.is_zeros() {
            initialize_weights(&decoder, spec.layers.len())?;
        }
        Ok(PretrainedModel { decoder, config: self.clone(), source: None, tokenizer: OnceLock::new() })
    }

    fn example_batch(&self, samples: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
        example_batch(samples, self.max_positions().min(EXAMPLE_LENGTH), mesh)
    }

    fn hf_config(&self, dtype: DType) -> Value {
        let mut config = self.json.clone();
        let name = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        config[name] = json!(torch_name(dtype));
        config["architectures"] = json!([self.family.architecture]);
        config
    }
}

/// Tokens of a sequence in estimates: models are meant for sequences that nobody would train a step on.
const EXAMPLE_LENGTH: usize = 2048;

/// A causal language model of any family, built from a [`PretrainedConfig`].
///
/// [`load`](super::load) loads one. `forward` returns logits of all positions; generation uses
/// [`forward_cached`](Self::forward_cached).
#[doc(alias = "AutoModelForCausalLM")]
pub struct PretrainedModel {
    decoder: Decoder,
    config: PretrainedConfig,
    /// Where it was loaded from.
    source: Option<PathBuf>,
    tokenizer: OnceLock<Tokenizer>,
}

impl PretrainedModel {
    /// The configuration that the model was built from.
    pub fn config(&self) -> &PretrainedConfig {
        &self.config
    }

    /// Returns the mean cross entropy of the targets, as [`LanguageModel::loss`] does. Collective.
    #[track_caller]
    pub fn loss(&self, ids: &DTensor, targets: &DTensor) -> Result<DTensor> {
        LanguageModel::loss(self, ids, targets)
    }

    /// The tokenizer of the files that the model was loaded from; read when it is first needed. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the model was not loaded, and those of [`load_tokenizer`].
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer);
        }
        let Some(source) = &self.source else {
            let found = "a model that was built and not loaded";
            let fix = "load it with `models::load`, or encode the text with a tokenizer of your own";
            return Err(ErrorKind::Model.error("tokenizer", found, "a model that was loaded from files", fix));
        };
        let read = load_tokenizer(source)?;
        Ok(self.tokenizer.get_or_init(|| read))
    }

    /// Remembers where the model was loaded from.
    pub(super) fn loaded_from(self, path: &Path) -> Self {
        PretrainedModel { source: Some(path.to_path_buf()), ..self }
    }

    /// Computes the logits `[batch, vocabulary]` of the token after ids `[batch, new tokens]`, which follow the tokens that the
    /// cache has seen, and adds the new tokens to the cache.
    ///
    /// Collective: all ranks of the mesh must call it, each with its own cache. Logits are sharded on the vocabulary if the head is.
    /// Nothing is recorded for a backward pass through the cache. If it fails, the cache may have been changed: drop it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the batch has other rows than the cache, or the model has no positions for so many tokens.
    #[doc(alias = "past_key_values")]
    #[track_caller]
    pub fn forward_cached(&self, ids: &DTensor, cache: &mut KvCache) -> Result<DTensor> {
        self.decoder.run(ids, None, Some(cache), Logits::Last, &mut |_| Ok(()))
    }

    /// As [`forward_cached`](Self::forward_cached), with the logits of all new positions: `[batch, new tokens, vocabulary]`.
    #[track_caller]
    pub fn forward_cached_all(&self, ids: &DTensor, cache: &mut KvCache) -> Result<DTensor> {
        self.decoder.run(ids, None, Some(cache), Logits::All, &mut |_| Ok(()))
    }

    /// Computes logits and hidden states: the output of the embedding, of every layer but the last, and of the final norm.
    /// Collective.
    #[doc(alias = "output_hidden_states")]
    #[track_caller]
    pub fn forward_hidden(&self, ids: &DTensor) -> Result<(DTensor, Vec<DTensor>)> {
        let mut hidden = Vec::new();
        let logits = self.decoder.run(ids, None, None, Logits::All, &mut |x| {
            hidden.push(x.clone());
            Ok(())
        })?;
        Ok((logits, hidden))
    }
}

impl PretrainedModel {
    /// Computes the logits `[batch, length, vocabulary]` of sequences of several documents, each as if it were alone: a token
    /// attends to no token of another document. `positions`, integers `[batch, length]`, are those of the tokens in their
    /// documents, as [`PackedSequences::with_positions`](crate::data::PackedSequences::with_positions) gives them.
    ///
    /// Collective. Allocates a mask of a byte per pair of positions. Rotary angles that depend on the length are those of
    /// the whole sequence.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the positions have another shape than the ids, or are not integers.
    #[doc(alias = "position_ids")]
    #[track_caller]
    pub fn forward_documents(&self, ids: &DTensor, positions: &DTensor) -> Result<DTensor> {
        self.decoder.forward_documents(ids, positions)
    }
}

impl Module for PretrainedModel {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        self.decoder.walk(path, visit);
    }
}

impl Forward for PretrainedModel {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.decoder.forward(ids)
    }
}

impl LanguageModel for PretrainedModel {}

impl Model for PretrainedModel {
    /// The loss of ids and targets, and of the positions of packed documents if there are three tensors.
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
        match batch {
            [ids, targets, positions] => loss_of_logits(&self.forward_documents(ids, positions)?, targets),
            _ => batch_loss(self, batch),
        }
    }

    fn weight_names(&self) -> WeightNames {
        self.config.weight_names_of(self)
    }
}
