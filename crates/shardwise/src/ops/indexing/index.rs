//! Indexing, `x.i(...)` and `x.set(...)`: by numbers, ranges, masks and lists of indices.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use crate::error::{ErrorKind, Result};
use crate::ops::arguments::indices::wrapped;
use crate::ops::indexing::index_argument::{ALL, Index, Indices};
use crate::placement::Placement;
use crate::tensor::{Arange, DTensor, Operand};

/// Masks and index tensors, each with the first dimension that it indexes.
type TensorIndices<'a> = Vec<(usize, Cow<'a, DTensor>)>;

impl DTensor {
    /// Indexes this tensor, as `x[...]` in PyTorch: by numbers, ranges, masks, lists of indices and new axes.
    ///
    /// Collective: every rank of the mesh must call it. Ranges communicate nothing: every rank keeps what it holds of the slice.
    /// One index of a sharded dimension is sent by the rank that holds it. A mask exchanges how many elements each rank selects,
    /// see [`masked_select`](Self::masked_select). A list of indices of a sharded dimension gives a `Partial(Sum)` result.
    ///
    /// Several masks and lists of indices broadcast and select single elements. Their dimensions replace the first indexed one if
    /// the indexed dimensions are adjacent, and come first if not, as in PyTorch.
    ///
    /// ```
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::arange(0.0..24.0, DType::F32, &mesh, [Shard(0)])?.reshape(&[2, 3, 4])?;
    ///     assert_eq!(x.i((.., 1.., -1))?.full_tensor()?.to_vec2::<f32>()?, [[7.0, 11.0], [19.0, 23.0]]);
    ///     assert_eq!(x.i((.., 0, [3, 0]))?.full_tensor()?.to_vec2::<f32>()?, [[3.0, 0.0], [15.0, 12.0]]);
    ///     assert_eq!(x.i(&x.gt(20.0)?)?.full_tensor()?.to_vec1::<f32>()?, [21.0, 22.0, 23.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there are more indices than dimensions, an index is out of range, or a mask does
    /// not have the shape of the dimensions that it indexes.
    #[doc(alias = "__getitem__")]
    #[track_caller]
    pub fn i<'a>(&self, index: impl Indices<'a>) -> Result<DTensor> {
        let (part, arrays) = self.basic_part(&self.indices_of_all(index.list())?)?;
        part.picked_by(&arrays)
    }

    /// Writes `value`, a tensor that broadcasts or a number, to an indexed part of this tensor, as `x[...] = value` in PyTorch.
    ///
    /// Takes the same indices as [`i`](Self::i).
    ///
    /// Collective: every rank of the mesh must call it. Communicates the elements of `value` that belong to another rank's shard.
    /// Differentiable: the gradient of overwritten elements goes to `value`. Clones of this tensor keep the old elements. An element
    /// that is indexed more than once gets an unspecified one of its values.
    ///
    /// ```
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let mut x = DTensor::arange(0.0..6.0, DType::F32, &mesh, [Shard(0)])?;
    ///     x.set(1..3, -1.0)?;
    ///     x.set(&x.clone().gt(4.0)?, &DTensor::zeros(1, DType::F32, &mesh, [Replicate])?)?;
    ///     x.set([-2, 0], 9)?;
    ///     assert_eq!(x.full_tensor()?.to_vec1::<f32>()?, [9.0, -1.0, -1.0, 3.0, 9.0, 0.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) as for [`i`](Self::i), and if the value does not broadcast to the part.
    #[doc(alias = "__setitem__")]
    #[track_caller]
    pub fn set<'a, 'b>(&mut self, index: impl Indices<'a>, value: impl Into<Operand<'b>>) -> Result<()> {
        let indices = self.indices_of_all(index.list())?;
        let value = value.into();
        if !indices.iter().any(|i| matches!(i, Index::Tensor(_) | Index::List(_))) {
            return self.set_basic(&indices, value);
        }
        let (part, arrays) = self.basic_part(&indices)?;
        let written = part.with_arrays_set(&arrays, value)?;
        let plain = |index: &Index<'a>| match index {
            Index::Tensor(_) | Index::List(_) => ALL,
            other => other.clone(),
        };
        let basic: Vec<Index<'a>> = indices.iter().flat_map(|i| std::iter::repeat_n(plain(i), dims_of(i))).collect();
        self.set_basic(&basic, Operand::Tensor(&written))
    }

    /// Expands the ellipsis, which is at the end if there is none, so that every dimension has one index besides new axes.
    fn indices_of_all<'a>(&self, given: Vec<Index<'a>>) -> Result<Vec<Index<'a>>> {
        let bad = |found: String, fix: &str| {
            let needed = format!("at most one index per dimension of {}", self.layout());
            ErrorKind::Argument.error("index", found, needed, fix)
        };
        let used: usize = given.iter().filter(|i| !matches!(i, Index::NewAxis)).map(dims_of).sum();
        let left = self
            .ndim()
            .checked_sub(used)
            .ok_or_else(|| bad(format!("indices for {used} dimensions"), "leave some out, or unsqueeze the tensor"))?;
        let ellipses = given.iter().filter(|i| matches!(i, Index::Ellipsis)).count();
        if ellipses > 1 {
            return Err(bad(format!("{ellipses} ellipses"), "write .. for each full dimension of all but one"));
        }
        let mut all = Vec::new();
        for index in given {
            match index {
                Index::Ellipsis => all.extend(std::iter::repeat_n(ALL, left)),
                other => all.push(other),
            }
        }
        if ellipses == 0 {
            all.extend(std::iter::repeat_n(ALL, left));
        }
        Ok(all)
    }

    /// Applies numbers, ranges and new axes; returns the result and the masks and lists for its dimensions.
    #[track_caller]
    fn basic_part<'a>(&self, indices: &[Index<'a>]) -> Result<(DTensor, TensorIndices<'a>)> {
        let (mut part, mut arrays, mut dim) = (self.clone(), Vec::new(), 0);
        for index in indices {
            let d = dim as isize;
            match index {
                Index::At(i) => {
                    part = part.select(d, *i)?;
                    continue;
                }
                Index::Range { start, end, step } => part = part.slice(d, start.unwrap_or(0), *end, *step)?,
                Index::NewAxis => part = part.unsqueeze(d)?,
                Index::Tensor(tensor) => arrays.push((dim, tensor.clone())),
                Index::List(list) => {
                    let tensor = Tensor::from_slice(list, list.len(), &Device::Cpu)?;
                    let replicated = vec![Placement::Replicate; self.placements().len()];
                    let tensor = DTensor::distribute_tensor(&tensor, self.device_mesh(), replicated, None)?;
                    arrays.push((dim, Cow::Owned(tensor)));
                }
                Index::Ellipsis => unreachable!("replaced"),
            }
            dim += dims_of(index);
        }
        Ok((part, arrays))
    }

    /// Applies masks and lists of indices.
    #[track_caller]
    fn picked_by(&self, arrays: &TensorIndices<'_>) -> Result<DTensor> {
        match arrays.as_slice() {
            [] => Ok(self.clone()),
            [(dim, mask)] if is_mask(mask) => self.masked_part(*dim, mask),
            [(dim, index)] => self.index_along(*dim, index),
            several => {
                let JoinedIndices { dims, places, adjacent } = self.joined(several)?;
                let order = self.indexed_first(&dims);
                let front = self.permute(&order)?.flatten(0, dims.len() as isize - 1)?.index_along(0, &places)?;
                match adjacent {
                    true => front.permute(&behind_others(places.ndim(), dims[0], front.ndim())),
                    false => Ok(front),
                }
            }
        }
    }

    /// A copy with `value` written where masks and lists index it.
    #[track_caller]
    fn with_arrays_set(&self, arrays: &TensorIndices<'_>, value: Operand<'_>) -> Result<DTensor> {
        let (dims, places, adjacent) = match arrays.as_slice() {
            [(dim, mask)] if is_mask(mask) => {
                return match value {
                    Operand::Number(number) => {
                        let behind = self.ndim().saturating_sub(dim + mask.ndim());
                        let mask = (0..behind).try_fold(mask.clone().into_owned(), |m, _| m.unsqueeze(-1))?;
                        self.masked_fill(&mask, number)
                    }
                    Operand::Tensor(values) => self.masked_put(*dim, mask, values),
                };
            }
            [(dim, index)] => (vec![*dim], wrapped("set", index, self.shape()[*dim])?, true),
            several => {
                let JoinedIndices { dims, places, adjacent } = self.joined(several)?;
                (dims, places, adjacent)
            }
        };
        let order = self.indexed_first(&dims);
        let front = self.permute(&order)?;
        let sizes: Vec<usize> = front.shape().to_vec();
        let flat = front.flatten(0, dims.len() as isize - 1)?;
        // The shape that the same indices would select, and the value expanded to it.
        let rest = &sizes[dims.len()..];
        let before = if adjacent { dims[0] } else { 0 };
        let shape = [&rest[..before], places.shape(), &rest[before..]].concat();
        let value = value.tensor(self)?.to_dtype(self.dtype())?;
        let value = expanded(&value, &shape)?;
        let value = value.permute(&in_front(before, places.ndim(), shape.len()))?;
        let put = flat.index_put(&[&places], &value, false)?.reshape(&signed(&sizes))?;
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(new, &old)| back[old as usize] = new as isize);
        put.permute(&back)
    }

    /// Combines several masks and lists into flat indices of the dimensions that they index.
    #[track_caller]
    fn joined(&self, arrays: &[(usize, Cow<'_, DTensor>)]) -> Result<JoinedIndices> {
        let (mut dims, mut indices) = (Vec::new(), Vec::new());
        for (dim, tensor) in arrays {
            if is_mask(tensor) {
                if self.shape().get(*dim..dim + tensor.ndim()) != Some(tensor.shape()) {
                    let found =
                        format!("a mask of shape {:?} from dimension {dim} of {}", tensor.shape(), self.layout());
                    let needed = "the shape of the dimensions that it indexes";
                    return Err(ErrorKind::shape(tensor.shape()).error("mask", found, needed, "expand the mask"));
                }
                indices.extend(tensor.nonzero()?.unbind(1)?);
                dims.extend(*dim..dim + tensor.ndim());
            } else {
                indices.push(tensor.clone().into_owned());
                dims.push(*dim);
            }
        }
        let mut places = wrapped("index", &indices[0], self.shape()[dims[0]])?;
        for (index, &dim) in indices[1..].iter().zip(&dims[1..]) {
            let n = self.shape()[dim];
            places = places.mul_scalar(n as i64)?.add(&wrapped("index", index, n)?)?;
        }
        let adjacent = dims.windows(2).all(|d| d[1] == d[0] + 1);
        Ok(JoinedIndices { dims, places, adjacent })
    }

    /// A permutation that brings some dimensions to the front.
    fn indexed_first(&self, dims: &[usize]) -> Vec<isize> {
        let others = (0..self.ndim()).filter(|d| !dims.contains(d));
        dims.iter().copied().chain(others).map(|d| d as isize).collect()
    }

    /// Writes to what numbers, ranges and new axes index.
    #[track_caller]
    fn set_basic(&mut self, indices: &[Index<'_>], value: Operand<'_>) -> Result<()> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let (mut steps, mut shape) = (Vec::new(), Vec::new());
        for index in indices {
            if matches!(index, Index::NewAxis) {
                shape.push(1);
                continue;
            }
            let dim = ranges.len();
            let n = self.shape()[dim] as isize;
            let from_front = |i: isize| if i < 0 { i.saturating_add(n) } else { i };
            let edge = |i: isize| from_front(i).clamp(0, n) as usize;
            let (range, step) = match index {
                Index::At(i) if !(0..n).contains(&from_front(*i)) => {
                    let found = format!("index {i} along dimension {dim} in set of {}", self.layout());
                    let needed = format!("an index from {} to {}", -n, n - 1);
                    return Err(ErrorKind::Index { index: *i as i64, size: n as usize }.error(
                        "index",
                        found,
                        needed,
                        "correct the index",
                    ));
                }
                Index::At(i) => (edge(*i)..edge(*i) + 1, 1),
                Index::Range { step: 0, .. } => {
                    let found = format!("step 0 along dimension {dim} in set of {}", self.layout());
                    return Err(ErrorKind::Argument.error("index", found, "a step of at least 1", "correct the step"));
                }
                Index::Range { start, end, step } => {
                    let (start, end) = (edge(start.unwrap_or(0)), edge(end.unwrap_or(n)));
                    let (range, step) = (start..end.max(start), (*step).min(n.max(1) as usize));
                    shape.push(range.len().div_ceil(step));
                    (range, step)
                }
                _ => unreachable!("no arrays"),
            };
            ranges.push(range);
            steps.push(step);
        }
        let strided = steps.iter().any(|&step| step > 1);
        if let Operand::Number(number) = value {
            if !strided {
                return self.fill_range(&ranges, number);
            }
            if let Some(mask) = self.mask_of(&ranges, &steps)? {
                *self = self.masked_fill(&mask, number)?;
            }
            return Ok(());
        }
        let value = expanded(&value.tensor(self)?.to_dtype(self.dtype())?, &shape)?;
        let counts = ranges.iter().zip(&steps).map(|(r, &step)| r.len().div_ceil(step));
        let value = value.reshape(&signed(&counts.collect::<Vec<_>>()))?;
        if value.elem_count() == 0 {
            return Ok(());
        }
        if !strided {
            return self.assign(&ranges, &value);
        }
        let mut hull = ranges.iter().enumerate();
        let hull = hull.try_fold(self.clone(), |x, (d, r)| x.narrow(d as isize, r.start, r.len()))?;
        let filled = hull.with_strides_set(&steps, &value)?;
        self.assign(&ranges, &filled)
    }

    /// A mask with 1 at every `step`-th index of the ranges, sharded like this tensor; `None` if that is everything.
    #[track_caller]
    fn mask_of(&self, ranges: &[Range<usize>], steps: &[usize]) -> Result<Option<DTensor>> {
        let layout = self.layout().reduced();
        let along = |dim: usize| -> Result<DTensor> {
            let like = |p: &Placement| match p.is_shard(Some(dim)) && layout.has_default_order() {
                true => p.with_dim(0),
                false => Placement::Replicate,
            };
            let placements: Vec<Placement> = layout.placements().iter().map(like).collect();
            let (n, start) = (self.shape()[dim] as i64, ranges[dim].start as i64);
            let index = DTensor::arange(-start..n - start, DType::I64, self.device_mesh(), placements)?;
            let inside = index.ge(0)?.logical_and(&index.lt(ranges[dim].len() as i64)?)?;
            let picked = inside.logical_and(&index.remainder(steps[dim] as i64)?.eq(0)?)?;
            (dim + 1..self.ndim()).try_fold(picked, |picked, _| picked.unsqueeze(-1))
        };
        let mut mask: Option<DTensor> = None;
        for dim in (0..self.ndim()).filter(|&d| steps[d] > 1 || ranges[d].len() < self.shape()[d]) {
            let picked = along(dim)?;
            mask = Some(match mask {
                Some(mask) => mask.logical_and(&picked)?,
                None => picked,
            });
        }
        Ok(mask)
    }

    /// A copy with `value` written at every `step`-th index of each dimension.
    #[track_caller]
    fn with_strides_set(&self, steps: &[usize], value: &DTensor) -> Result<DTensor> {
        let Some(dim) = steps.iter().position(|&step| step > 1) else { return Ok(value.clone()) };
        let mut others = steps.to_vec();
        others[dim] = 1;
        let d = dim as isize;
        let rows = self.slice(d, 0, None, steps[dim])?.with_strides_set(&others, value)?;
        let mut column = vec![1; self.ndim()];
        column[dim] = -1;
        let replicated = vec![Placement::Replicate; self.placements().len()];
        let (n, step) = (self.shape()[dim] as i64, steps[dim] as i64);
        let index =
            DTensor::arange(Arange::new(0, n, step), DType::I64, self.device_mesh(), replicated)?.reshape(&column)?;
        self.scatter(d, &index.expand(&signed(rows.shape()))?, &rows)
    }
}

/// Several masks and index tensors as one index.
struct JoinedIndices {
    /// The indexed dimensions.
    dims: Vec<usize>,
    /// Flat indices into these dimensions.
    places: DTensor,
    /// Whether the dimensions are adjacent.
    adjacent: bool,
}

/// How many dimensions an index consumes, or inserts.
fn dims_of(index: &Index<'_>) -> usize {
    match index {
        Index::Tensor(mask) if is_mask(mask) => mask.ndim(),
        Index::Ellipsis => 0,
        _ => 1,
    }
}

fn is_mask(tensor: &DTensor) -> bool {
    tensor.dtype() == DType::U8
}

fn signed(dims: &[usize]) -> Vec<isize> {
    dims.iter().map(|&n| n as isize).collect()
}

/// Expands a value to the shape that it is written to; surplus leading dimensions of size 1 are removed.
#[track_caller]
fn expanded(value: &DTensor, shape: &[usize]) -> Result<DTensor> {
    let surplus = value.ndim().saturating_sub(shape.len());
    let fits = value.shape()[..surplus].iter().all(|&n| n == 1)
        && value.shape()[surplus..].iter().rev().zip(shape.iter().rev()).all(|(&n, &m)| n == m || n == 1);
    if !fits {
        let found = format!("shape {:?}", value.shape());
        let needed = format!("one that broadcasts to {shape:?}");
        return Err(ErrorKind::shape(value.shape()).error(
            "value to set",
            found,
            needed,
            "reshape the value, or correct the indices",
        ));
    }
    let value = (0..surplus).try_fold(value.clone(), |value, _| value.squeeze(Some(0)))?;
    value.expand(&signed(shape))
}

/// The permutation that moves the first `moved` of `ndim` dimensions after the next `before`.
fn behind_others(moved: usize, before: usize, ndim: usize) -> Vec<isize> {
    let order = (moved..moved + before).chain(0..moved).chain(moved + before..ndim);
    order.map(|d| d as isize).collect()
}

/// The permutation that moves the `moved` dimensions after the first `before` of `ndim` to the front.
fn in_front(before: usize, moved: usize, ndim: usize) -> Vec<isize> {
    let order = (before..before + moved).chain(0..before).chain(before + moved..ndim);
    order.map(|d| d as isize).collect()
}
