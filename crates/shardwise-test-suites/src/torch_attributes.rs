//! The keyword arguments of an operator in the recorded vectors, with PyTorch's defaults where an argument is absent.

use serde_json::Value;
use shardwise::ops::{ConvOptions, LossOptions, Reduction};

/// Keyword arguments by PyTorch's names.
#[derive(Clone, Copy)]
pub struct Attributes<'a>(
    /// A JSON object.
    pub &'a Value,
);

impl<'a> Attributes<'a> {
    /// A number, if it is given.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.0[key].as_f64()
    }

    /// A number, or its default.
    pub fn number_or(&self, key: &str, default: f64) -> f64 {
        self.number(key).unwrap_or(default)
    }

    /// A bool, or its default.
    pub fn flag_or(&self, key: &str, default: bool) -> bool {
        self.0[key].as_bool().unwrap_or(default)
    }

    /// A bool that defaults to false.
    pub fn flag(&self, key: &str) -> bool {
        self.flag_or(key, false)
    }

    /// A string, if it is given.
    pub fn text(&self, key: &str) -> Option<&'a str> {
        self.0[key].as_str()
    }

    /// Dimensions or other signed integers: one or a list. Empty if absent, which reductions read as all dimensions.
    pub fn dims(&self, key: &str) -> Vec<isize> {
        match &self.0[key] {
            Value::Array(all) => all.iter().filter_map(Value::as_i64).map(|d| d as isize).collect(),
            Value::Number(n) => n.as_i64().map(|d| d as isize).into_iter().collect(),
            _ => Vec::new(),
        }
    }

    /// One dimension, offset or shift; 0 if absent.
    pub fn dim(&self, key: &str) -> isize {
        self.optional_dim(key).unwrap_or(0)
    }

    /// One dimension or index, if it is given.
    pub fn optional_dim(&self, key: &str) -> Option<isize> {
        self.0[key].as_i64().map(|d| d as isize)
    }

    /// Sizes or counts: one or a list.
    pub fn counts(&self, key: &str) -> Vec<usize> {
        self.dims(key).into_iter().map(|n| n as usize).collect()
    }

    /// One size or count (the first of a list); 0 if absent.
    pub fn count(&self, key: &str) -> usize {
        self.counts(key).first().copied().unwrap_or(0)
    }

    /// Whether the argument is a list.
    pub fn is_list(&self, key: &str) -> bool {
        self.0[key].is_array()
    }

    /// `reduction=` of a loss.
    pub fn reduction(&self) -> Reduction {
        match self.text("reduction") {
            Some("sum") => Reduction::Sum,
            Some("none") => Reduction::None,
            Some("batchmean") => Reduction::BatchMean,
            _ => Reduction::Mean,
        }
    }

    /// `reduction=`, `ignore_index=` and `label_smoothing=` of a classification loss.
    pub fn loss_options(&self) -> LossOptions {
        LossOptions {
            reduction: self.reduction(),
            ignore_index: self.0["ignore_index"].as_i64().unwrap_or(-100),
            label_smoothing: self.number_or("label_smoothing", 0.0),
        }
    }

    /// `stride=` and `padding=` of a convolution.
    pub fn convolution(&self) -> ConvOptions {
        let stride = self.0["stride"].as_u64().unwrap_or(1) as usize;
        ConvOptions { stride, padding: self.count("padding"), ..ConvOptions::default() }
    }

    /// `ord=` of a norm, in which infinities are strings.
    pub fn norm_order(&self) -> f64 {
        match self.text("ord") {
            Some("inf") => f64::INFINITY,
            Some("-inf") => f64::NEG_INFINITY,
            _ => self.number_or("ord", 2.0),
        }
    }

    /// `pad=`: pairs of (before, after), the last dimension first, as PyTorch lists them.
    pub fn padding_pairs(&self) -> Vec<(usize, usize)> {
        self.counts("pad").chunks(2).map(|pair| (pair[0], pair[1])).collect()
    }
}
