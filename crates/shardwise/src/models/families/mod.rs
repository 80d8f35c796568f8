//! Families of models of other libraries: one file each, which says what differs from the shared decoder.
//!
//! A family is a [`Family`]: how its `config.json` is read, and the table of its names, which serves loading and saving. To
//! add one, write such a file and list it in [`FAMILIES`].

mod bert;
mod camembert;
#[cfg(test)]
mod default_configurations;
mod distilbert;
mod electra;
mod gemma2;
mod gemma3;
mod gpt2;
mod gpt_neox;
mod llama;
mod mistral;
mod mixtral;
mod mpnet;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod roberta;
mod xlm_roberta;

use std::collections::BTreeMap;

use super::decoder::DecoderSpec;
use super::encoder::EncoderSpec;
use super::fields::ConfigFields;
use super::names::WeightNames;
use crate::error::{Error, ErrorKind, Result, nearest};
use crate::param::Param;

/// All families, in alphabetical order.
const FAMILIES: &[&Family] = &[
    &bert::FAMILY,
    &camembert::FAMILY,
    &distilbert::FAMILY,
    &electra::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &gpt2::FAMILY,
    &gpt_neox::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &mixtral::FAMILY,
    &mpnet::FAMILY,
    &olmoe::FAMILY,
    &phi3::FAMILY,
    &qwen2::FAMILY,
    &qwen2_moe::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &roberta::FAMILY,
    &xlm_roberta::FAMILY,
];

/// A family of models, as Hugging Face's `transformers` names them.
pub(super) struct Family {
    /// Value of `model_type` in `config.json`.
    pub(super) model_type: &'static str,
    /// Class in `architectures` of files that are written.
    pub(super) architecture: &'static str,
    /// Prefix of the names of the model without its head. Files may lack it, or have it where they should not.
    pub(super) prefix: &'static str,
    /// Names of weights in files, in both directions.
    pub(super) names: &'static [NameEntry],
    /// Other names that files may have, only for loading: if one of these is there, it takes the place of the names of the same
    /// parameters.
    pub(super) other_names: &'static [NameEntry],
    /// Tensors in files that are not weights of the model: patterns with `*` for any text.
    pub(super) ignored_tensors: &'static [&'static str],
    /// Reads sizes and options; every field that it supports, and no other.
    pub(super) read: fn(&ConfigFields<'_>) -> Result<Architecture>,
}

/// What a configuration describes.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Architecture {
    /// A causal language model.
    Decoder(DecoderSpec),
    /// An encoder such as BERT.
    Encoder(EncoderSpec),
}

impl Family {
    /// The family of a configuration.
    pub(super) fn of(fields: &ConfigFields<'_>) -> Result<&'static Family> {
        let Some(name) = fields.text("model_type")? else {
            return Err(fields.bad("model_type", "the kind of the model"));
        };
        FAMILIES.iter().copied().find(|family| family.model_type == name).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
            let mut found = format!("model_type {name:?} in config.json");
            let mut fix = format!("use a model of a known kind; nearest: {}", nearest(name, known.iter().copied()));
            if let Some(text) = fields.text_part() {
                found += ", a model of text and other inputs";
                // The nearest name would be that of another model.
                fix = match known.contains(&text) {
                    true => format!("use a text-only version of the model, of kind `{text}`"),
                    false => "use a text-only model, of a known kind".to_string(),
                };
            }
            ErrorKind::unknown(name).error::<Error>("model", found, format!("one of {}", known.join(", ")), fix)
        })
    }

    /// Names of all families.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        FAMILIES.iter().map(|family| family.model_type)
    }

    /// Names in files of these parameters.
    pub(super) fn weight_names(&self, params: &BTreeMap<String, Param>, layers: usize, heads: usize) -> WeightNames {
        expanded(self.names, params, layers, heads)
    }

    /// As [`weight_names`](Self::weight_names), with the other names that these files have.
    pub(super) fn stored_names(
        &self,
        params: &BTreeMap<String, Param>,
        layers: usize,
        heads: usize,
        is_stored: impl Fn(&str) -> bool,
    ) -> WeightNames {
        let mut names = self.weight_names(params, layers, heads);
        for other in expanded(self.other_names, params, layers, heads).0 {
            if is_stored(&other.name) {
                names.0.retain(|name| name.paths.iter().all(|path| !other.paths.contains(path)));
                names.0.push(other);
            }
        }
        names
    }
}

/// The names of a table for a model with these parameters.
fn expanded(table: &[NameEntry], params: &BTreeMap<String, Param>, layers: usize, heads: usize) -> WeightNames {
    table.iter().fold(WeightNames::new(), |names, entry| {
        let count = if entry.stored.contains("{i}") { layers } else { 1 };
        (0..count).fold(names, |names, i| entry.extend(names, params, i, heads))
    })
}

/// A line of a table of names: a module or tensor in files, and the modules or parameters that it holds. `{i}` stands for the
/// number of a layer, `{e}` for that of an expert.
pub(super) struct NameEntry {
    stored: &'static str,
    paths: &'static [&'static str],
    form: NameForm,
}

/// How a line of a table of names is meant.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NameForm {
    /// A module with `weight` and possibly `bias`; several are concatenated.
    Module,
    /// As `Module`, with a transposed weight.
    Transposed,
    /// As `Module`, joined head by head.
    PerHead,
    /// One parameter under exactly this name.
    Exact,
    /// One tensor per expert, a slice of the parameter.
    PerExpert,
    /// Stacks of experts, joined expert by expert.
    Stacked,
}

/// A module under another name.
pub(super) const fn module(stored: &'static str, path: &'static [&'static str; 1]) -> NameEntry {
    NameEntry { stored, paths: path, form: NameForm::Module }
}

/// Several modules in one, with their rows one after the other.
pub(super) const fn joined(stored: &'static str, paths: &'static [&'static str]) -> NameEntry {
    NameEntry { stored, paths, form: NameForm::Module }
}

/// One or several modules whose matrix has inputs first in files.
pub(super) const fn transposed(stored: &'static str, paths: &'static [&'static str]) -> NameEntry {
    NameEntry { stored, paths, form: NameForm::Transposed }
}

/// Several modules in one, joined head by head.
pub(super) const fn per_head(stored: &'static str, paths: &'static [&'static str]) -> NameEntry {
    NameEntry { stored, paths, form: NameForm::PerHead }
}

/// A stack of experts, of which files have one tensor each.
pub(super) const fn per_expert(stored: &'static str, path: &'static [&'static str; 1]) -> NameEntry {
    NameEntry { stored, paths: path, form: NameForm::PerExpert }
}

/// Stacks of experts in one, joined expert by expert.
pub(super) const fn stacked(stored: &'static str, paths: &'static [&'static str]) -> NameEntry {
    NameEntry { stored, paths, form: NameForm::Stacked }
}

/// Names of experts in files that hold all experts of a layer in one tensor, as transformers 5 has them in memory.
pub(super) const STACKED_EXPERTS: &[NameEntry] = &[
    module("model.layers.{i}.mlp.gate", &["blocks.{i}.experts.router"]),
    stacked(
        "model.layers.{i}.mlp.experts.gate_up_proj",
        &["blocks.{i}.experts.experts.gate", "blocks.{i}.experts.experts.up"],
    ),
    stacked("model.layers.{i}.mlp.experts.down_proj", &["blocks.{i}.experts.experts.down"]),
];

/// One parameter.
pub(super) const fn exact(stored: &'static str, path: &'static [&'static str; 1]) -> NameEntry {
    NameEntry { stored, paths: path, form: NameForm::Exact }
}

impl NameEntry {
    /// Adds the names of layer `i`, of parameters that the model has.
    fn extend(&self, taken: WeightNames, params: &BTreeMap<String, Param>, i: usize, heads: usize) -> WeightNames {
        let number = |text: &str| text.replace("{i}", &i.to_string());
        let stored = number(self.stored);
        match self.form {
            NameForm::Exact => match params.contains_key(&number(self.paths[0])) {
                true => taken.add(&stored, &number(self.paths[0])),
                false => taken,
            },
            NameForm::Stacked => {
                let paths: Vec<String> = self.paths.iter().map(|path| number(path)).collect();
                match paths.iter().all(|path| params.contains_key(path)) {
                    true => taken.join_stacked(&stored, paths),
                    false => taken,
                }
            }
            NameForm::PerExpert => {
                let path = number(self.paths[0]);
                let count = params.get(&path).map_or(0, |param| param.shape()[0]);
                (0..count).fold(taken, |names, e| names.slice(&stored.replace("{e}", &e.to_string()), &path, e))
            }
            NameForm::Module | NameForm::Transposed | NameForm::PerHead => {
                ["weight", "bias"].into_iter().fold(taken, |names, kind| {
                    let paths: Vec<String> = self.paths.iter().map(|path| format!("{}.{kind}", number(path))).collect();
                    let name = format!("{stored}.{kind}");
                    match self.form {
                        _ if !paths.iter().all(|path| params.contains_key(path)) => names,
                        NameForm::Transposed if kind == "weight" => names.transposed(&name, paths),
                        NameForm::PerHead => names.join_per_head(&name, paths, heads),
                        _ => names.join(&name, paths),
                    }
                })
            }
        }
    }
}

/// Reads `layer_types`: for every layer whether its attention is local (`sliding_attention`); `default` where there is none.
pub(super) fn local_layers(
    fields: &ConfigFields<'_>,
    layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    let Some(types) = fields.texts("layer_types")? else { return Ok((0..layers).map(default).collect()) };
    let is_local = |kind: &&str| match *kind {
        "sliding_attention" => Some(true),
        "full_attention" => Some(false),
        _ => None,
    };
    let found = types.iter().map(is_local).collect::<Option<Vec<bool>>>().filter(|found| found.len() == layers);
    let needed = format!("full_attention or sliding_attention for each of {layers} layers; there are {}", types.len());
    found.ok_or_else(|| fields.bad("layer_types", &needed))
}
