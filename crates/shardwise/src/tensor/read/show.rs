//! Tensors as text: `Display` and `Debug` write the local part and never communicate; `show` returns the whole tensor.

use std::fmt;
use std::panic::Location;

use candle_core::{DType, Device, Tensor, WithDType};

use crate::comm::{Call, Group, record_operator};
use crate::error::{Result, Site};
use crate::layout::Runs;
use crate::placement::ReduceOp;
use crate::tensor::DTensor;
use shardwise_kernels::convert;

/// Tensors with more elements than this are abbreviated: PyTorch's `threshold`.
const ABBREVIATE_FROM: usize = 1000;

/// Indices shown at each end of an abbreviated dimension: PyTorch's `edgeitems`.
const EDGE: usize = 3;

/// With more shown elements than this, as in tensors of many dimensions, only one index is shown at each end.
const MAX_SHOWN: usize = 10_000;

impl fmt::Display for DTensor {
    /// Writes the local part of this rank, abbreviated if it is large, with type and layout of the whole tensor.
    ///
    /// Local, so that a single rank may print. [`show`](DTensor::show) returns the whole tensor.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let elements = self.elements_text();
        let rank = self.device_mesh().world().rank();
        let (dtype, layout) = (self.dtype().as_str(), self.layout());
        write!(f, "{elements}\n{dtype} {layout}, rank {rank} holds {:?}", self.local().dims())
    }
}

impl fmt::Debug for DTensor {
    /// Writes the same as `Display`, with the type and layout first. Local.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.device_mesh().world().rank();
        let (dtype, layout, elements) = (self.dtype().as_str(), self.layout(), self.elements_text());
        write!(f, "DTensor({dtype} {layout}, rank {rank} holds {:?}: {elements})", self.local().dims())
    }
}

impl DTensor {
    /// Returns the whole tensor as text, abbreviated in the middle of large dimensions, with its type and layout: the same text
    /// on every rank.
    ///
    /// Collective: every rank of the mesh must call it, outside of `println!`, which would hold the lock of stdout meanwhile.
    /// Communicates the elements that are shown; a partial tensor is reduced first.
    ///
    /// ```
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::arange(0.0..4.0, DType::F32, &mesh, [Shard(0)])?;
    ///     let text = x.show()?; // on all ranks
    ///     assert_eq!(text, "[0, 1, 2, 3]\nf32 [4] on dp=2: S(0)");
    ///     assert_eq!(x.to_string().lines().next(), Some(["[0, 1]", "[2, 3]"][world.rank()]));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) in a dry run and on a rank outside the mesh: there are no values to show.
    #[doc(alias = "visualize_sharding")]
    #[track_caller]
    pub fn show(&self) -> Result<String> {
        self.check_readable("show")?;
        let site = Location::caller();
        let values = record_operator("show", || {
            let source = self.reduced(site)?;
            let (layout, me) = (source.layout(), self.device_mesh().world().rank());
            // One of the ranks that hold replicas contributes.
            let mut parts = Vec::new();
            if layout.primary_boxes().any(|owned| owned.rank == me) {
                let coordinate = layout.mesh().coordinate(me).expect("readers are on the mesh");
                let indices = (0..self.ndim()).map(|dim| layout.owned(dim, &coordinate)).collect();
                parts.push(ShownPart { indices, tensor: source.local().clone() });
            }
            show_parts(&self.device_mesh().whole_group()?, self.shape(), self.dtype(), &parts, site)
        })?;
        Ok(format!("{values}\n{} {}", self.dtype().as_str(), self.layout()))
    }

    /// The elements of the local part as text.
    fn elements_text(&self) -> String {
        let world = self.device_mesh().world();
        match (world.is_dry(), self.layout().mesh().contains(world.rank())) {
            (true, _) => "without data".to_string(),
            (_, false) => "nothing, outside the mesh".to_string(),
            _ => local_text(self.local()),
        }
    }
}

/// A part of a tensor on this rank: per dimension its indices in the whole tensor, and its elements.
pub(crate) struct ShownPart {
    pub(crate) indices: Vec<Runs>,
    pub(crate) tensor: Tensor,
}

/// The elements of a plain tensor as text, abbreviated in the middle of large dimensions.
pub(crate) fn local_text(tensor: &Tensor) -> String {
    let shown = shown_indices(tensor.dims());
    let part =
        ShownPart { indices: tensor.dims().iter().map(|&n| Runs::range(0..n)).collect(), tensor: tensor.clone() };
    match texts(tensor.dtype(), &shown, &[part], Ok) {
        Ok(values) => written(&values, &shown, tensor.dims()),
        Err(error) => format!("<{error}>"),
    }
}

/// The text of the whole tensor whose parts the ranks of a group hold, each element in one part. Collective: one all-reduce
/// of the shown elements.
pub(crate) fn show_parts(
    group: &Group,
    shape: &[usize],
    dtype: DType,
    parts: &[ShownPart],
    site: Site,
) -> Result<String> {
    let shown = shown_indices(shape);
    let values = texts(dtype, &shown, parts, |mine| {
        Ok(group.run(&Call::AllReduce { op: ReduceOp::Sum }, &[mine], site)?.swap_remove(0))
    })?;
    Ok(written(&values, &shown, shape))
}

/// The indices to show, per dimension.
fn shown_indices(shape: &[usize]) -> Vec<Vec<usize>> {
    let count = |sizes: &mut dyn Iterator<Item = usize>| sizes.fold(1usize, |count, n| count.saturating_mul(n));
    let all = count(&mut shape.iter().copied()) <= ABBREVIATE_FROM && shape.iter().all(|&n| n <= ABBREVIATE_FROM);
    let edge = if count(&mut shape.iter().map(|&n| n.min(2 * EDGE))) > MAX_SHOWN { 1 } else { EDGE };
    let shown = |&n: &usize| match all || n <= 2 * edge {
        true => (0..n).collect(),
        false => (0..edge).chain(n - edge..n).collect(),
    };
    shape.iter().map(shown).collect()
}

/// The shown elements as text, in order, after `combine` has added up what the ranks hold of them.
fn texts(
    dtype: DType,
    shown: &[Vec<usize>],
    parts: &[ShownPart],
    combine: impl FnOnce(Tensor) -> Result<Tensor>,
) -> Result<Vec<String>> {
    Ok(match dtype.is_float() {
        true => combine(picked::<f64>(shown, parts)?)?.to_vec1::<f64>()?.into_iter().map(number).collect(),
        false => combine(picked::<i64>(shown, parts)?)?.to_vec1::<i64>()?.iter().map(ToString::to_string).collect(),
    })
}

/// The shown elements that this rank holds, in a type that holds every value exactly; zero for the other ranks' elements.
fn picked<T: WithDType>(shown: &[Vec<usize>], parts: &[ShownPart]) -> Result<Tensor> {
    let sizes: Vec<usize> = shown.iter().map(Vec::len).collect();
    let mut values = vec![T::zero(); sizes.iter().product()];
    for ShownPart { indices, tensor } in parts {
        // Select the shown elements of the part and write them to their positions in the text.
        let mut part = tensor.clone();
        let mut places = Vec::new();
        for (dim, (shown, indices)) in shown.iter().zip(indices).enumerate() {
            let both: Vec<(usize, usize)> =
                shown.iter().enumerate().filter_map(|(s, &i)| Some((s, position(indices, i)?))).collect();
            let pick: Vec<i64> = both.iter().map(|&(_, h)| h as i64).collect();
            let count = pick.len();
            part = match count {
                0 => part.narrow(dim, 0, 0)?,
                _ => part.index_select(&Tensor::from_vec(pick, count, &Device::Cpu)?, dim)?,
            };
            places.push(both.into_iter().map(|(s, _)| s).collect::<Vec<_>>());
        }
        if part.elem_count() > 0 {
            let numbers = convert(&part, T::DTYPE)?.flatten_all()?.to_vec1::<T>()?;
            let mut flat = vec![0usize];
            for (places, &size) in places.iter().zip(&sizes) {
                flat = flat.iter().flat_map(|f| places.iter().map(move |p| f * size + p)).collect();
            }
            flat.into_iter().zip(numbers).for_each(|(place, number)| values[place] = number);
        }
    }
    let count = values.len();
    Ok(Tensor::from_vec(values, count, &Device::Cpu)?)
}

/// The position of an index in ascending runs of indices.
fn position(indices: &Runs, index: usize) -> Option<usize> {
    let mut before = 0;
    for run in indices.iter() {
        if run.contains(&index) {
            return Some(before + index - run.start);
        }
        before += run.len();
    }
    None
}

fn written(values: &[String], shown: &[Vec<usize>], shape: &[usize]) -> String {
    let mut text = String::new();
    write_dim(&mut text, values, shown, shape, 0, &mut 0);
    text
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
