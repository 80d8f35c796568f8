//! Numbers as arguments of operators: compared and hashed by their bits.

use std::hash::{Hash, Hasher};

/// A number that is an argument of an operator.
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
