//! What a collective is for: the operator and the value for which a rank communicates.
//!
//! Ranks that run different operators, or the same operators on other shapes, often make equal collectives: the sum and the
//! mean of a sharded tensor both end in an all-reduce of one number. Without a check they would silently mix values. So
//! every distributed value carries a hash of how it was computed, and ranks compare it along with the call. Values that
//! are never communicated are never compared.

use std::fmt;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::trace::current_operator;
use crate::rank_context::{RankContext, in_scope, rank_context};

/// How a distributed value was computed. Its hash is equal on ranks that ran the same operators on the same layouts.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    hash: u64,
    /// The operator that returned the value; `None` for a value created otherwise.
    operator: Option<&'static str>,
    /// Shape of the operator's first input, or of the value, for errors.
    shape: SmallVec<[usize; 4]>,
}

impl Origin {
    /// The origin of a value that no operator returned. `layout` is the hash of its layout.
    pub(crate) fn leaf(layout: u64, shape: &[usize]) -> Self {
        Origin { hash: layout, operator: None, shape: shape.into() }
    }

    /// The origin of an operator's results. `call` is the hash of the operator, its arguments and the input layouts.
    pub(crate) fn operator<'a>(
        name: &'static str,
        call: u64,
        inputs: impl Iterator<Item = &'a Origin>,
        shape: &[usize],
    ) -> Self {
        Origin {
            hash: inputs.fold(call, |hash, input| mixed(hash, input.hash)),
            operator: Some(name),
            shape: shape.into(),
        }
    }

    /// The origin of one of several results.
    pub(crate) fn output(&self, index: usize) -> Self {
        Origin { hash: self.hash.wrapping_add(index as u64), ..self.clone() }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operator {
            Some(operator) => write!(f, "the result of {operator} on shape {:?}", self.shape),
            None => write!(f, "a tensor of shape {:?}", self.shape),
        }
    }
}

/// A hash of two hashes, in this order.
fn mixed(a: u64, b: u64) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write_u64(a);
    hasher.write_u64(b);
    hasher.finish()
}

fn hash(origin: &Origin, also: u64, operator: Option<(&'static str, bool)>) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write_u64(origin.hash);
    hasher.write_u64(also);
    // Only names of operators: the name of a `record_operator` scope may differ between ranks.
    if let Some((name, true)) = operator {
        name.hash(&mut hasher);
    }
    hasher.finish()
}

/// The operator and value for which a rank calls a collective.
///
/// Engines put its text into errors; [`fingerprint`](super::engine::fingerprint) includes its hash.
#[derive(Debug, Clone)]
pub struct CallOrigin {
    hash: u64,
    operator: Option<&'static str>,
    origin: Origin,
}

/// The value for which this rank communicates, and a hash of what else must be equal on all ranks.
type CurrentOrigin = Option<(Origin, u64)>;

/// Runs `body`, whose collectives are for the value of `origin`. `also` is a hash of what else must be equal on all ranks.
pub(crate) fn with_call_origin<R>(origin: &Origin, also: u64, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.call_origin.replace::<CurrentOrigin>(Some((origin.clone(), also)));
    in_scope(enter, |context, before| drop(context.call_origin.replace(before)), body)
}

impl CallOrigin {
    /// The operator and value for which this thread communicates, if known.
    pub fn current() -> Option<Self> {
        let (origin, also) =
            rank_context(|context| context.call_origin.with(|current: &mut CurrentOrigin| current.clone()))?;
        let operator = current_operator();
        Some(CallOrigin { hash: hash(&origin, also, operator), operator: operator.map(|(name, _)| name), origin })
    }

    /// The hash of [`current`](Self::current), 0 if unknown.
    pub(super) fn current_hash() -> u64 {
        let operator = current_operator();
        let of =
            |current: &mut CurrentOrigin| current.as_ref().map_or(0, |(origin, also)| hash(origin, *also, operator));
        rank_context(|context| context.call_origin.with(of))
    }

    /// A hash that is equal on all ranks of a correct collective.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Display for CallOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operator {
            Some(operator) => write!(f, "for {operator} of {}", self.origin),
            None => write!(f, "for {}", self.origin),
        }
    }
}
