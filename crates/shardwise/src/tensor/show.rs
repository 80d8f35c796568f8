//! Printing: `Display` shows the whole tensor, `Debug` this rank's part.

use std::fmt;
use std::panic::Location;

use candle_core::{Device, Tensor, WithDType};

use super::DTensor;
use crate::comm::{Call, operator};
use crate::error::Result;
use crate::placement::ReduceOp;

/// Tensors with more elements than this are abbreviated.
const ABBREVIATE_FROM: usize = 1000;

/// Indices shown at each end of an abbreviated dimension.
const EDGE: usize = 3;

impl fmt::Display for DTensor {
    /// The whole tensor, abbreviated if it is large, and its layout. All ranks of the mesh must print, because each shows
    /// elements of the others; only the elements shown are communicated, unless a reduction is pending.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.check_readable("printing").and_then(|()| operator("display", || self.shown())) {
            Ok(values) => {
                let mut text = String::new();
                write_dim(&mut text, &values, &self.shown_indices(), self.shape(), 0, &mut 0);
                text
            }
            Err(error) => format!("<{error}>"),
        };
        write!(f, "{text}\n{} {}", self.dtype().as_str(), self.layout())
    }
}

impl fmt::Debug for DTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.device_mesh().world().rank();
        write!(f, "DTensor({} {}, rank {rank} holds ", self.dtype().as_str(), self.layout())?;
        if self.device_mesh().world().is_dry() {
            return write!(f, "{:?} without data)", self.to_local().dims());
        }
        write!(f, "{})", self.to_local())
    }
}

impl DTensor {
    /// Per dimension the indices that are shown.
    fn shown_indices(&self) -> Vec<Vec<usize>> {
        let all = self.elem_count() <= ABBREVIATE_FROM && self.shape().iter().all(|&n| n <= ABBREVIATE_FROM);
        let shown = |&n: &usize| match all || n <= 2 * EDGE {
            true => (0..n).collect(),
            false => (0..EDGE).chain(n - EDGE..n).collect(),
        };
        self.shape().iter().map(shown).collect()
    }

    /// The elements that are shown, in order.
    fn shown(&self) -> Result<Vec<String>> {
        Ok(match self.dtype().is_float() {
            true => self.shown_as::<f64>()?.into_iter().map(number).collect(),
            false => self.shown_as::<i64>()?.iter().map(ToString::to_string).collect(),
        })
    }

    /// The elements that are shown, as numbers of a type that holds them all.
    fn shown_as<T: WithDType>(&self) -> Result<Vec<T>> {
        let site = Location::caller();
        let source = self.reduced(site)?;
        let (layout, me) = (source.layout().clone(), self.device_mesh().world().rank());
        let shown = self.shown_indices();
        let sizes: Vec<usize> = shown.iter().map(Vec::len).collect();
        let mut values = vec![T::zero(); sizes.iter().product()];
        let primary = layout.primary_boxes().any(|owned| owned.rank == me);
        if primary {
            // Pick the shown elements of this rank's part, and put them where they are shown.
            let mut part = source.to_local().clone();
            let mut places = Vec::new();
            for (dim, shown) in shown.iter().enumerate() {
                let held = layout.global_indices(me, dim);
                let both: Vec<(usize, usize)> =
                    shown.iter().enumerate().filter_map(|(s, i)| Some((s, held.binary_search(i).ok()?))).collect();
                let pick: Vec<u32> = both.iter().map(|&(_, h)| h as u32).collect();
                let count = pick.len();
                part = match count {
                    0 => part.narrow(dim, 0, 0)?,
                    _ => part.contiguous()?.index_select(&Tensor::from_vec(pick, count, &Device::Cpu)?, dim)?,
                };
                places.push(both.into_iter().map(|(s, _)| s).collect::<Vec<_>>());
            }
            if part.elem_count() > 0 {
                let numbers = part.to_dtype(T::DTYPE)?.flatten_all()?.to_vec1::<T>()?;
                let mut flat = vec![0usize];
                for (places, &size) in places.iter().zip(&sizes) {
                    flat = flat.iter().flat_map(|f| places.iter().map(move |p| f * size + p)).collect();
                }
                flat.into_iter().zip(numbers).for_each(|(place, number)| values[place] = number);
            }
        }
        let count = values.len();
        let mine = Tensor::from_vec(values, count, &Device::Cpu)?;
        let sum = self.device_mesh().whole_group()?.run(&Call::AllReduce { op: ReduceOp::Sum }, &[mine], site)?;
        Ok(sum[0].to_vec1()?)
    }
}

fn write_dim(
    text: &mut String,
    values: &[String],
    shown: &[Vec<usize>],
    shape: &[usize],
    dim: usize,
    next: &mut usize,
) {
    if dim == shape.len() {
        *text += &values[*next];
        *next += 1;
        return;
    }
    text.push('[');
    for (i, &index) in shown[dim].iter().enumerate() {
        if i > 0 {
            let gap = index != shown[dim][i - 1] + 1;
            let line = dim + 1 < shape.len();
            let separator = if line { format!(",\n{}", " ".repeat(dim + 1)) } else { ", ".into() };
            *text += &separator;
            if gap {
                *text += "...";
                *text += &separator;
            }
        }
        write_dim(text, values, shown, shape, dim + 1, next);
    }
    text.push(']');
}

fn number(x: f64) -> String {
    match x {
        x if x == x.trunc() && x.abs() < 1e15 => format!("{x:.0}"),
        x if x.is_finite() && (x.abs() < 1e-4 || x.abs() >= 1e6) => format!("{x:.4e}"),
        x => format!("{x:.4}"),
    }
}
