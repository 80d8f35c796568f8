//! Numeric arguments of operators, compared and hashed by their bits: operators are keys of the decision cache.

use std::hash::{Hash, Hasher};

/// An f64 argument of an operator, equal to another if the bits are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar(pub(crate) f64);

impl PartialEq for Scalar {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Scalar {}

impl Hash for Scalar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}
