//! On whose behalf a rank communicates: the operator and the value.
//!
//! Ranks that run different operators, or the same ones on tensors of different shapes, often make the same collective: the
//! sum and the mean of a sharded tensor both end in an all-reduce of one number. So every distributed value carries a hash
//! of how it was computed, and ranks compare it along with the call. Values that a rank keeps to itself are never compared.

use std::fmt;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;
use smallvec::SmallVec;

use super::trace::current_operator;
use crate::rank_context::{RankContext, in_scope, rank_context};

/// How a distributed value was computed. Equal on ranks that ran the same operators on tensors of the same layouts.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    hash: u64,
    /// The operator; none for a value that did not come from one.
    operator: Option<&'static str>,
    /// Shape of the first input of the operator, or of the value.
    shape: SmallVec<[usize; 4]>,
}

impl Origin {
    /// A value that did not come from an operator. `layout` is a hash of its layout.
    pub(crate) fn leaf(layout: u64, shape: &[usize]) -> Self {
        Origin { hash: layout, operator: None, shape: shape.into() }
    }

    /// The results of an operator. `call` is a hash of the operator with its arguments and the layouts of its inputs.
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

    /// One of several results.
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

/// The same number for the same two numbers, in this order.
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
    // A name that the program gave to a scope may depend on the rank.
    if let Some((name, true)) = operator {
        name.hash(&mut hasher);
    }
    hasher.finish()
}

/// On whose behalf a rank makes a collective. Engines describe calls with it; [`fingerprint`](super::engine::fingerprint)
/// contains it.
#[derive(Debug, Clone)]
pub struct Purpose {
    hash: u64,
    operator: Option<&'static str>,
    origin: Origin,
}

/// The value on behalf of which this rank communicates, and a hash of what else ranks must have in common.
type Current = Option<(Origin, u64)>;

/// Runs `body`; the collectives in it are on behalf of a value. `also` is a hash of what else ranks must have in common.
pub(crate) fn on_behalf_of<R>(origin: &Origin, also: u64, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.purpose.replace::<Current>(Some((origin.clone(), also)));
    in_scope(enter, |context, before| drop(context.purpose.replace(before)), body)
}

impl Purpose {
    /// What this thread is communicating for, if that is known.
    pub fn current() -> Option<Self> {
        let (origin, also) = rank_context(|context| context.purpose.with(|current: &mut Current| current.clone()))?;
        let operator = current_operator();
        Some(Purpose { hash: hash(&origin, also, operator), operator: operator.map(|(name, _)| name), origin })
    }

    /// The hash of what this thread is communicating for; 0 if that is not known.
    pub(super) fn current_hash() -> u64 {
        let operator = current_operator();
        let of = |current: &mut Current| current.as_ref().map_or(0, |(origin, also)| hash(origin, *also, operator));
        rank_context(|context| context.purpose.with(of))
    }

    /// A number that all ranks of a collective have in common.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operator {
            Some(operator) => write!(f, "for {operator} of {}", self.origin),
            None => write!(f, "for {}", self.origin),
        }
    }
}
