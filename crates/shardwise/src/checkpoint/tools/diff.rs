//! Comparing two checkpoints.

use std::collections::BTreeSet;
use std::fmt;

use candle_core::DType;

use crate::checkpoint::bytes::cast::to_tensor;
use crate::checkpoint::bytes::content::split_box;
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::StoredTensor;
use crate::checkpoint::metadata::value::Value;
use crate::error::Result;
use crate::layout::TensorBox;

/// How an entry differs between two checkpoints.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Difference {
    /// Only the first checkpoint has the entry.
    OnlyFirst,
    /// Only the second checkpoint has the entry.
    OnlySecond,
    /// The shapes differ.
    Shape(Vec<usize>, Vec<usize>),
    /// The element types differ, and the numbers are equal.
    Type(ElementType, ElementType),
    /// Elements differ.
    Elements {
        /// Number of elements that differ.
        count: usize,
        /// The largest absolute difference; NaN if an element is NaN in one checkpoint only.
        largest: f64,
        /// Index of the first element that differs.
        first: Vec<usize>,
    },
    /// The values differ.
    Values(Value, Value),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::OnlyFirst => f.write_str("only in the first"),
            Difference::OnlySecond => f.write_str("only in the second"),
            Difference::Shape(a, b) => write!(f, "shape {a:?} and {b:?}"),
            Difference::Type(a, b) => write!(f, "type {a} and {b}"),
            Difference::Elements { count, largest, first } => {
                write!(f, "{count} elements, first at {first:?}, largest difference {largest:e}")
            }
            Difference::Values(a, b) => write!(f, "{a} and {b}"),
        }
    }
}

/// Elements compared at a time: bounds the memory to a few times 8 MiB.
const ELEMENTS_AT_A_TIME: usize = 1 << 20;

/// Tolerances of [`diff`].
///
/// Elements differ where `|a - b| > atol + rtol * |b|`, as in `torch.allclose`. Without tolerances bytes are compared, so equal
/// NaNs are equal.
#[derive(Clone, Copy, Default)]
pub struct DiffOptions<'a> {
    /// Relative tolerance; 0 by default.
    pub rtol: f64,
    /// Absolute tolerance; 0 by default.
    pub atol: f64,
    /// Called with the number of bytes of the first checkpoint that were compared since the last call.
    pub progress: Option<&'a dyn Fn(u64)>,
}

/// Compares two checkpoints, of any formats and layouts, and returns the differences by flat key.
///
/// Local: needs no world. Reads both completely, in bounded memory.
///
/// # Errors
/// As [`Catalog::read_box`]: a checksum that does not match, a file that cannot be read.
pub fn diff(first: &Catalog, second: &Catalog, options: DiffOptions<'_>) -> Result<Vec<(String, Difference)>> {
    let mut found = Vec::new();
    let keys: BTreeSet<&String> = first.tensors.keys().chain(second.tensors.keys()).collect();
    let (files, other_files) = (&*first.files, &*second.files);
    for key in keys {
        let difference = match (first.tensors.get(key), second.tensors.get(key)) {
            (Some(_), None) => Some(Difference::OnlyFirst),
            (None, Some(_)) => Some(Difference::OnlySecond),
            (Some(a), Some(b)) if a.shape != b.shape => Some(Difference::Shape(a.shape.clone(), b.shape.clone())),
            (Some(a), Some(b)) => {
                let compared = TensorComparison { key, files, first: a, other_files, second: b };
                let differing = compared.elements(options)?;
                differing.or_else(|| (a.element != b.element).then_some(Difference::Type(a.element, b.element)))
            }
            (None, None) => None,
        };
        found.extend(difference.map(|difference| (key.clone(), difference)));
    }
    let keys: BTreeSet<&String> = first.values.keys().chain(second.values.keys()).collect();
    for key in keys {
        let difference = match (first.values.get(key), second.values.get(key)) {
            (Some(_), None) => Some(Difference::OnlyFirst),
            (None, Some(_)) => Some(Difference::OnlySecond),
            (Some(a), Some(b)) if a != b => Some(Difference::Values(a.clone(), b.clone())),
            _ => None,
        };
        found.extend(difference.map(|difference| (key.clone(), difference)));
    }
    Ok(found)
}

/// A tensor of the same shape in two checkpoints.
struct TensorComparison<'a> {
    key: &'a str,
    files: &'a Files,
    first: &'a StoredTensor,
    other_files: &'a Files,
    second: &'a StoredTensor,
}

impl TensorComparison<'_> {
    fn elements(&self, options: DiffOptions<'_>) -> Result<Option<Difference>> {
        let DiffOptions { rtol, atol, progress } = options;
        let whole = TensorBox { offsets: vec![0; self.first.shape.len()], sizes: self.first.shape.clone() };
        let (mut count, mut largest, mut place) = (0, 0f64, None);
        for piece in split_box(&whole, ELEMENTS_AT_A_TIME) {
            let read = |files: &Files, stored: &StoredTensor| -> Result<Vec<u8>> {
                let mut bytes = vec![0; piece.volume() * stored.element.size_in_bytes()];
                files.read_box(self.key, stored, &piece, &mut bytes)?;
                Ok(bytes)
            };
            let (a, b) = (read(self.files, self.first)?, read(self.other_files, self.second)?);
            progress.inspect(|progress| progress(a.len() as u64));
            if self.first.element == self.second.element && a == b {
                continue;
            }
            let size = self.first.element.size_in_bytes();
            let exact = self.first.element == self.second.element && rtol == 0.0 && atol == 0.0;
            let same_bytes = |i: usize| a[i * size..(i + 1) * size] == b[i * size..(i + 1) * size];
            let (x, y) = (numbers(&a, self.first.element)?, numbers(&b, self.second.element)?);
            for (i, (x, y)) in x.iter().zip(&y).enumerate() {
                let distance = (x - y).abs();
                let close = distance.is_finite() && distance <= atol + rtol * y.abs();
                // Large integers differ where their nearest f64 does not.
                if if exact { same_bytes(i) } else { x.to_bits() == y.to_bits() || x == y || close } {
                    continue;
                }
                count += 1;
                largest = if distance.is_nan() || largest.is_nan() { f64::NAN } else { largest.max(distance) };
                place.get_or_insert_with(|| index_of(&piece, i));
            }
        }
        Ok(place.map(|first| Difference::Elements { count, largest, first }))
    }
}

/// Elements as `f64`; types that cannot be converted are compared by their bits.
fn numbers(bytes: &[u8], element: ElementType) -> Result<Vec<f64>> {
    match element {
        ElementType::U64 | ElementType::C64 => Ok(bytes
            .chunks_exact(8)
            .map(|b| u64::from_le_bytes(b.try_into().expect("chunks of 8 bytes")) as f64)
            .collect()),
        other => Ok(to_tensor(bytes, other)?.to_dtype(DType::F64)?.to_vec1()?),
    }
}

/// The index in the tensor of the element with a row-major number in a box.
fn index_of(part: &TensorBox, mut number: usize) -> Vec<usize> {
    let mut index = part.offsets.clone();
    for dim in (0..index.len()).rev() {
        index[dim] += number % part.sizes[dim];
        number /= part.sizes[dim];
    }
    index
}
