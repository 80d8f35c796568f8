//! Shapes by other names: operators composed of views, slices and joins.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::error::{ErrorKind, Result};
use crate::op::check_one_mesh;
use crate::ops::arguments::broadcast::broadcast_shape;
use crate::ops::shapes::slice_sums::EmptyRow;
use crate::ops::{OpEntry, SampleInput};
use crate::placement::Placement;
use crate::tensor::{DTensor, check_whole};
use shardwise_kernels::SliceTable;

impl DTensor {
    /// Returns this tensor with at least one dimension. Local.
    #[track_caller]
    pub fn atleast_1d(&self) -> Result<DTensor> {
        if self.ndim() == 0 { self.unsqueeze(0) } else { Ok(self.clone()) }
    }

    /// Returns this tensor with at least two dimensions; new ones come first. Local.
    #[track_caller]
    pub fn atleast_2d(&self) -> Result<DTensor> {
        match self.ndim() {
            0 | 1 => self.atleast_1d()?.unsqueeze(0),
            _ => Ok(self.clone()),
        }
    }

    /// Returns this tensor with at least three dimensions: a vector becomes `[1, n, 1]`, a matrix `[n, m, 1]`. Local.
    #[track_caller]
    pub fn atleast_3d(&self) -> Result<DTensor> {
        match self.ndim() {
            0..=2 => self.atleast_2d()?.unsqueeze(-1),
            _ => Ok(self.clone()),
        }
    }

    /// Concatenates along the second dimension; scalars and vectors along the first. Communicates as [`cat`](Self::cat) does.
    #[track_caller]
    pub fn hstack(tensors: &[&DTensor]) -> Result<DTensor> {
        let all = each(tensors, DTensor::atleast_1d)?;
        let dim = isize::from(all.first().is_some_and(|t| t.ndim() > 1));
        joined(&all, dim)
    }

    /// Concatenates along the first dimension; vectors are rows. Communicates as [`cat`](Self::cat) does.
    #[track_caller]
    pub fn vstack(tensors: &[&DTensor]) -> Result<DTensor> {
        joined(&each(tensors, DTensor::atleast_2d)?, 0)
    }

    /// Concatenates along the third dimension. Communicates as [`cat`](Self::cat) does.
    #[track_caller]
    pub fn dstack(tensors: &[&DTensor]) -> Result<DTensor> {
        joined(&each(tensors, DTensor::atleast_3d)?, 2)
    }

    /// Concatenates along the second dimension; scalars and vectors are columns. Communicates as [`cat`](Self::cat) does.
    #[track_caller]
    pub fn column_stack(tensors: &[&DTensor]) -> Result<DTensor> {
        let column = |t: &DTensor| if t.ndim() < 2 { t.reshape(&[-1, 1]) } else { Ok(t.clone()) };
        joined(&each(tensors, column)?, 1)
    }

    /// Splits a dimension into `sections` pieces whose sizes differ by one at most, the larger ones first.
    ///
    /// Local, as [`narrow`](Self::narrow).
    #[doc(alias = "hsplit")]
    #[doc(alias = "vsplit")]
    #[doc(alias = "dsplit")]
    #[track_caller]
    pub fn tensor_split(&self, sections: usize, dim: isize) -> Result<Vec<DTensor>> {
        let n = self.shape()[self.resolve_dim("tensor_split", dim)?];
        if sections == 0 {
            return Err(self.bad_dims("tensor_split", &[dim], "at least one section"));
        }
        // Every section is a tensor, with a node of the graph where gradients are recorded.
        check_whole(&[sections, 64 * size_of::<DTensor>()], DType::U8)?;
        let sizes: Vec<usize> = (0..sections).map(|i| n / sections + usize::from(i < n % sections)).collect();
        self.split_sizes(&sizes, dim)
    }

    /// Splits a dimension before each of some indices; negative ones count from the end, and pieces may be empty.
    ///
    /// Local, as [`narrow`](Self::narrow). PyTorch's `tensor_split` with a list.
    #[track_caller]
    pub fn tensor_split_at(&self, indices: &[isize], dim: isize) -> Result<Vec<DTensor>> {
        self.resolve_dim("tensor_split_at", dim)?;
        let mut starts = vec![0];
        starts.extend(indices);
        let ends = indices.iter().map(|&i| Some(i)).chain([None]);
        starts.iter().zip(ends).map(|(&start, end)| self.slice(dim, start, end, 1)).collect()
    }

    /// Moves several dimensions to other positions; the rest keep their order. Local, as [`permute`](Self::permute).
    #[doc(alias = "movedim")]
    #[track_caller]
    pub fn movedims(&self, source: &[isize], destination: &[isize]) -> Result<DTensor> {
        let resolve =
            |dims: &[isize]| dims.iter().map(|&d| self.resolve_dim("movedims", d)).collect::<Result<Vec<_>>>();
        let (from, to) = (resolve(source)?, resolve(destination)?);
        let twice = |dims: &[usize]| (1..dims.len()).any(|i| dims[..i].contains(&dims[i]));
        if from.len() != to.len() || twice(&from) || twice(&to) {
            return Err(self.bad_dims("movedims", source, "as many positions as dimensions, each once"));
        }
        let mut rest = (0..self.ndim()).filter(|d| !from.contains(d));
        let order = (0..self.ndim()).map(|at| match to.iter().position(|&t| t == at) {
            Some(i) => from[i],
            None => rest.next().expect("as many dimensions are left as positions"),
        });
        self.permute(&order.map(|d| d as isize).collect::<Vec<_>>())
    }

    /// Removes those of some dimensions whose size is 1. Communicates as [`squeeze`](Self::squeeze) does.
    #[doc(alias = "squeeze")]
    #[track_caller]
    pub fn squeeze_dims(&self, dims: &[isize]) -> Result<DTensor> {
        let named = dims.iter().filter(|&&d| !self.is_scalar_with(d));
        let mut at = named.map(|&d| self.resolve_dim("squeeze_dims", d)).collect::<Result<Vec<_>>>()?;
        at.sort_unstable();
        at.dedup();
        at.iter().rev().try_fold(self.clone(), |x, &d| x.squeeze(Some(d as isize)))
    }

    /// Repeats the tensor as [`repeat`](Self::repeat) does; dimensions in front that are not named are repeated once.
    #[track_caller]
    pub fn tile(&self, times: &[usize]) -> Result<DTensor> {
        let missing = self.ndim().saturating_sub(times.len());
        self.repeat(&[vec![1; missing], times.to_vec()].concat())
    }

    /// Reverses one pair of dimensions `times` times by 90 degrees, from the first to the second. Communicates as
    /// [`flip`](Self::flip) does.
    #[track_caller]
    pub fn rot90(&self, times: isize, dims: [isize; 2]) -> Result<DTensor> {
        let (a, b) = (self.resolve_dim("rot90", dims[0])?, self.resolve_dim("rot90", dims[1])?);
        if a == b {
            return Err(self.bad_dims("rot90", &dims, "two different dimensions"));
        }
        let (a, b) = (a as isize, b as isize);
        match times.rem_euclid(4) {
            1 => self.flip(&[b])?.transpose(a, b),
            2 => self.flip(&[a, b]),
            3 => self.flip(&[a])?.transpose(a, b),
            _ => Ok(self.clone()),
        }
    }

    /// Returns all windows of `size` elements along a dimension, `step` apart, as a new last dimension.
    ///
    /// Unlike PyTorch's the result is a copy. If the dimension is sharded, windows are too: ranks exchange the borders of their
    /// shards that windows reach over.
    ///
    /// # Errors
    /// If a window is longer than the dimension, or the step is 0.
    #[track_caller]
    pub fn unfold(&self, dim: isize, size: usize, step: usize) -> Result<DTensor> {
        if self.ndim() == 0 {
            return self.unsqueeze(0)?.unfold(dim, size, step)?.squeeze(Some(0));
        }
        let at = self.resolve_dim("unfold", dim)?;
        let n = self.shape()[at];
        if size > n || step == 0 {
            let found = format!("windows of {size} in steps of {step} in unfold of {}", self.layout());
            let needed = format!("at most {n} elements and steps of at least 1");
            return Err(ErrorKind::Argument.error("window", found, needed, "use a shorter window"));
        }
        let count = (n - size) / step + 1;
        check_whole(&[count, size, TABLE_WORDS], DType::F64)?;
        let rows = (0..count).flat_map(|w| (0..size).map(move |i| Some(w * step + i)));
        self.slice_groups("unfold", at, size, rows, EmptyRow::Zero)?.movedim(at as isize + 1, -1)
    }

    /// Sums to a shape that broadcasts to that of this tensor; integers give i64. Communicates as [`sum`](Self::sum) does.
    #[track_caller]
    pub fn sum_to_size(&self, shape: &[usize]) -> Result<DTensor> {
        let new = self.ndim().checked_sub(shape.len());
        let fits = |new: usize| shape.iter().zip(&self.shape()[new..]).all(|(&to, &from)| to == from || to == 1);
        let Some(new) = new.filter(|&new| fits(new)) else {
            let found = format!("{shape:?} in sum_to_size of {}", self.layout());
            let needed = "a shape that broadcasts to that of the tensor";
            return Err(ErrorKind::shape(shape).error("shape", found, needed, "correct the shape"));
        };
        let stretched = |d: &usize| *d < new || shape[*d - new] == 1 && self.shape()[*d] != 1;
        let dims: Vec<isize> = (0..self.ndim()).filter(stretched).map(|d| d as isize).collect();
        if dims.is_empty() {
            return if self.dtype().is_float() { Ok(self.clone()) } else { self.to_dtype(DType::I64) };
        }
        self.sum(&dims, true)?.reshape(&signed(shape))
    }

    /// Expands tensors to their common shape. Local, as [`expand`](Self::expand).
    ///
    /// # Errors
    /// If the shapes do not broadcast.
    #[track_caller]
    pub fn broadcast_tensors(tensors: &[&DTensor]) -> Result<Vec<DTensor>> {
        one_mesh("broadcast_tensors", tensors)?;
        let shapes: Vec<&[usize]> = tensors.iter().map(|t| t.shape()).collect();
        let Some(shape) = broadcast_shape(&shapes) else {
            let found = format!("shapes {shapes:?} in broadcast_tensors");
            let needed = "sizes that are equal or 1 in every dimension, counted from the last";
            return Err(ErrorKind::shape(shapes[0]).error("operands", found, needed, "reshape the tensors"));
        };
        let shape = signed(&shape);
        tensors.iter().map(|t| t.expand(&shape)).collect()
    }

    /// Builds grids from vectors or scalars: result `i` varies along dimension `i` only. With `xy` the first two dimensions are
    /// swapped, PyTorch's `indexing="xy"`. Local.
    #[track_caller]
    pub fn meshgrid(tensors: &[&DTensor], xy: bool) -> Result<Vec<DTensor>> {
        one_mesh("meshgrid", tensors)?;
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        if xy && order.len() > 1 {
            order.swap(0, 1);
        }
        let mut sizes = vec![1; tensors.len()];
        let mut columns = Vec::new();
        for (i, tensor) in tensors.iter().enumerate() {
            let vector = match tensor.ndim() {
                0 => tensor.unsqueeze(0)?,
                1 => (*tensor).clone(),
                _ => return Err(tensor.bad_dims("meshgrid", &[], "vectors or scalars")),
            };
            sizes[order[i]] = vector.shape()[0] as isize;
            let mut column = vec![1; tensors.len()];
            column[order[i]] = -1;
            columns.push(if vector.elem_count() == 0 {
                column[order[i]] = 0;
                vector.reshape(&column)?
            } else {
                vector.reshape(&column)?
            });
        }
        columns.iter().map(|c| c.expand(&sizes)).collect()
    }

    /// Returns the matrices whose diagonals are the last dimension, `offset` columns to the right of the main one, as dimensions
    /// `dims` of the result.
    ///
    /// Local: the last dimension may stay sharded.
    #[track_caller]
    pub fn diag_embed(&self, offset: isize, dims: [isize; 2]) -> Result<DTensor> {
        if self.ndim() == 0 {
            return Err(self.bad_dims("diag_embed", &[], "at least one dimension"));
        }
        let (n, ndim) = (self.shape()[self.ndim() - 1], self.ndim() as isize + 1);
        let resolve = |d: isize| if d < 0 { d + ndim } else { d };
        let (a, b) = (resolve(dims[0]), resolve(dims[1]));
        if a == b || [a, b].iter().any(|d| !(0..ndim).contains(d)) {
            return Err(self.bad_dims("diag_embed", &dims, "two different dimensions of the result"));
        }
        let size = n + offset.unsigned_abs();
        let (rows, columns) = (offset.min(0).unsigned_abs(), offset.max(0) as usize);
        // Each element in its row, zeros next to it: the rows are the elements, the columns a mask of the diagonal.
        let wide = self.unsqueeze(-1)?.expand(&[signed(self.shape()), vec![n as isize]].concat())?;
        let square = wide.tril(0)?.triu(0)?;
        let border = [(columns, size - n - columns), (rows, size - n - rows)];
        let full = square.pad(&border, 0)?;
        full.movedims(&[-2, -1], &[a, b])
    }

    /// Returns the diagonal of two dimensions, `offset` to the right of the main one, as the last dimension.
    ///
    /// Communicates as [`diagonal`](Self::diagonal) does.
    #[doc(alias = "diagonal")]
    #[track_caller]
    pub fn diagonal_of(&self, offset: isize, dims: [isize; 2]) -> Result<DTensor> {
        let (a, b) = (self.resolve_dim("diagonal_of", dims[0])?, self.resolve_dim("diagonal_of", dims[1])?);
        if a == b {
            return Err(self.bad_dims("diagonal_of", &dims, "two different dimensions"));
        }
        self.movedims(&[a as isize, b as isize], &[-2, -1])?.diagonal(offset)
    }

    /// Returns the matrix with a vector on its diagonal, or the diagonal of a matrix.
    #[track_caller]
    pub fn diag(&self, offset: isize) -> Result<DTensor> {
        match self.ndim() {
            1 => self.diag_embed(offset, [0, 1]),
            2 => self.diagonal(offset),
            _ => Err(self.bad_dims("diag", &[], "a vector or a matrix")),
        }
    }

    /// Returns the matrix with the flattened elements on its diagonal.
    #[track_caller]
    pub fn diagflat(&self, offset: isize) -> Result<DTensor> {
        self.reshape(&[-1])?.diag(offset)
    }

    /// Returns the sum of the diagonal of a matrix; integers give i64. Communicates as [`sum`](Self::sum) does.
    #[track_caller]
    pub fn trace(&self) -> Result<DTensor> {
        if self.ndim() != 2 {
            return Err(self.bad_dims("trace", &[], "a matrix"));
        }
        self.diagonal(0)?.sum_all()
    }

    /// Returns a copy with `source` as the diagonal of two dimensions, `offset` to the right of the main one.
    #[track_caller]
    pub fn diagonal_scatter(&self, source: &DTensor, offset: isize, dims: [isize; 2]) -> Result<DTensor> {
        let (a, b) = (self.resolve_dim("diagonal_scatter", dims[0])?, self.resolve_dim("diagonal_scatter", dims[1])?);
        let x = self.movedims(&[a as isize, b as isize], &[-2, -1])?;
        let wanted = x.detach().diagonal(offset)?;
        if source.shape() != wanted.shape() {
            let found = format!("a source {} in diagonal_scatter of {}", source.layout(), self.layout());
            let needed = format!("shape {:?}", wanted.shape());
            return Err(ErrorKind::shape(source.shape()).error("source", found, needed, "reshape the source"));
        }
        let square = source.to_dtype(self.dtype())?.diag_embed(offset, [-2, -1])?;
        let (rows, columns) = (x.shape()[x.ndim() - 2], x.shape()[x.ndim() - 1]);
        let (have_rows, have_columns) = (square.shape()[x.ndim() - 2], square.shape()[x.ndim() - 1]);
        let fitted = square.narrow(-2, 0, rows.min(have_rows))?.narrow(-1, 0, columns.min(have_columns))?;
        let border = [(0, columns.saturating_sub(have_columns)), (0, rows.saturating_sub(have_rows))];
        // Chosen, not added: a sum would lose the sign of zero, and infinities on the old diagonal would leave NaN.
        let on = self.constant(&Tensor::ones((rows, columns), DType::U8, &Device::Cpu)?)?;
        let chosen = on.tril(offset)?.triu(offset)?.where_cond(&fitted.pad(&border, 0)?, &x)?;
        chosen.movedims(&[-2, -1], &[a as isize, b as isize])
    }

    /// Returns a copy with `source` at one index of a dimension.
    #[track_caller]
    pub fn select_scatter(&self, source: &DTensor, dim: isize, index: isize) -> Result<DTensor> {
        let at = self.resolve_dim("select_scatter", dim)?;
        let n = self.shape()[at] as isize;
        let index = if index < 0 { index + n } else { index };
        if !(0..n).contains(&index) {
            return Err(self.bad_dims("select_scatter", &[index], "an index of the dimension"));
        }
        self.slice_scatter(&source.unsqueeze(at as isize)?, dim, index, Some(index + 1), 1)
    }

    /// Returns a copy with `source` as the slice `[start:end:step]` of a dimension.
    ///
    /// # Errors
    /// If the source does not have the shape of the slice.
    #[track_caller]
    pub fn slice_scatter(
        &self,
        source: &DTensor,
        dim: isize,
        start: isize,
        end: Option<isize>,
        step: usize,
    ) -> Result<DTensor> {
        let at = self.resolve_dim("slice_scatter", dim)?;
        let n = self.shape()[at] as isize;
        let edge = |i: isize| (if i < 0 { i.saturating_add(n) } else { i }).clamp(0, n) as usize;
        let (start, end) = (edge(start), edge(end.unwrap_or(n)));
        let places: Vec<i64> = (start..end).step_by(step.max(1)).map(|i| i as i64).collect();
        let mut wanted = self.shape().to_vec();
        wanted[at] = places.len();
        if source.shape() != wanted || step == 0 {
            let found = format!("a source {} in slice_scatter of {}", source.layout(), self.layout());
            let needed = format!("shape {wanted:?} and a step of at least 1");
            return Err(ErrorKind::shape(source.shape()).error("source", found, needed, "reshape the source"));
        }
        let source = source.to_dtype(self.dtype())?;
        if step == 1 {
            let after = self.shape()[at] - start - places.len();
            let (front, back) = (self.narrow(dim, 0, start)?, self.narrow(dim, start + places.len(), after)?);
            return DTensor::cat(&[&front, &source, &back], at as isize);
        }
        let mut column = vec![1; self.ndim()];
        column[at] = places.len();
        let index = self.constant(&Tensor::from_vec(places, column, &Device::Cpu)?)?;
        self.scatter(dim, &index.expand(&signed(source.shape()))?, &source)
    }

    /// Returns the Kronecker product. Communicates as [`mul`](Self::mul) and [`reshape`](Self::reshape) do.
    #[track_caller]
    pub fn kron(&self, other: &DTensor) -> Result<DTensor> {
        let ndim = self.ndim().max(other.ndim());
        let padded = |x: &DTensor| [vec![1; ndim - x.ndim()], signed(x.shape())].concat();
        let (a, b) = (padded(self), padded(other));
        let apart = |sizes: &[isize], first: bool| {
            sizes.iter().flat_map(|&n| if first { [n, 1] } else { [1, n] }).collect::<Vec<_>>()
        };
        let product = self.reshape(&apart(&a, true))?.mul(&other.reshape(&apart(&b, false))?)?;
        product.reshape(&a.iter().zip(&b).map(|(a, b)| a * b).collect::<Vec<_>>())
    }

    /// Returns the matrix with some matrices on its diagonal and zeros next to them; vectors are rows. Communicates as
    /// [`cat`](Self::cat) does.
    #[track_caller]
    pub fn block_diag(tensors: &[&DTensor]) -> Result<DTensor> {
        let blocks = each(tensors, DTensor::atleast_2d)?;
        if let Some(other) = blocks.iter().find(|b| b.ndim() != 2) {
            return Err(other.bad_dims("block_diag", &[], "matrices, vectors or scalars"));
        }
        let width: usize = blocks.iter().map(|b| b.shape()[1]).sum();
        let mut before = 0;
        let mut rows = Vec::new();
        for block in &blocks {
            let after = width - before - block.shape()[1];
            rows.push(block.pad(&[(before, after)], 0)?);
            before += block.shape()[1];
        }
        joined(&rows, 0)
    }

    /// Returns all combinations of the elements of vectors, one per row, in the order of nested loops.
    #[track_caller]
    pub fn cartesian_prod(tensors: &[&DTensor]) -> Result<DTensor> {
        if let [single] = tensors {
            return Ok((*single).clone());
        }
        let grids = DTensor::meshgrid(tensors, false)?;
        let columns = grids.iter().map(|g| g.reshape(&[g.elem_count() as isize])).collect::<Result<Vec<_>>>()?;
        DTensor::stack(&columns.iter().collect::<Vec<_>>(), 1)
    }

    /// Returns all combinations of `length` elements of a vector, one per row, in the order of the elements; with replacement an
    /// element may occur more than once. Communicates as [`index`](Self::index) does.
    ///
    /// # Errors
    /// If their list does not fit into memory; nothing is listed before that is known.
    #[track_caller]
    pub fn combinations(&self, length: usize, with_replacement: bool) -> Result<DTensor> {
        if self.ndim() != 1 {
            return Err(self.bad_dims("combinations", &[], "a vector"));
        }
        if length == 0 {
            return self.narrow(0, 0, 0);
        }
        let n = self.shape()[0];
        let count = number_of_combinations(n, length, with_replacement);
        // The index that is looked up, and its copy on the mesh.
        check_whole(&[count, length, 2], DType::I64)?;
        let index = Tensor::from_vec(all_combinations(n, length, with_replacement), (count, length), &Device::Cpu)?;
        self.index_along(0, &self.constant(&index)?)
    }

    /// Repeats each slice of a dimension as often as a vector says, which is gathered; slices stay on their ranks.
    ///
    /// Collective: every rank of the mesh must call it. PyTorch's `repeat_interleave` with a tensor.
    ///
    /// # Errors
    /// If a number is negative, or a table of all repeats does not fit into memory.
    #[doc(alias = "repeat_interleave")]
    #[track_caller]
    pub fn repeat_interleave_each(&self, times: &DTensor, dim: isize) -> Result<DTensor> {
        one_mesh("repeat_interleave_each", &[self, times])?;
        let at = self.resolve_dim("repeat_interleave_each", dim)?;
        let n = self.shape()[at];
        if times.ndim() > 1 || times.elem_count() != n && times.elem_count() != 1 {
            let found = format!("{} repeats in repeat_interleave_each of {}", times.layout(), self.layout());
            let needed = format!("a vector of {n} numbers");
            return Err(ErrorKind::shape(times.shape()).error("repeats", found, needed, "list one number per slice"));
        }
        let counts = match times.is_readable() {
            false => vec![1; times.elem_count()],
            true => times.detach().full_tensor()?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?,
        };
        if let Some(&negative) = counts.iter().find(|&&c| c < 0) {
            let found = format!("{negative} among the repeats of repeat_interleave_each");
            return Err(ErrorKind::Argument.error("repeats", found, "numbers from 0", "correct the repeats"));
        }
        let count = |i: usize| if counts.len() == 1 { counts[0] } else { counts[i] };
        let total = (0..n).fold(0usize, |sum, i| sum.saturating_add(count(i) as usize));
        check_whole(&[total, TABLE_WORDS], DType::F64)?;
        let rows = (0..n).flat_map(|i| std::iter::repeat_n([(i, 1.0)], count(i) as usize));
        self.slice_sums("repeat_interleave_each", at, SliceTable::new(n, rows))
    }

    /// A plain tensor that every rank has, replicated on the mesh of this tensor.
    #[track_caller]
    pub(in crate::ops) fn constant(&self, tensor: &Tensor) -> Result<DTensor> {
        let replicated = vec![Placement::Replicate; self.placements().len()];
        DTensor::distribute_tensor(tensor, self.device_mesh(), replicated, None)
    }
}

/// Fails if tensors are on different meshes: an operator that gathers one of them would not find it out.
#[track_caller]
pub(in crate::ops) fn one_mesh(name: &str, tensors: &[&DTensor]) -> Result<()> {
    if tensors.is_empty() { Ok(()) } else { check_one_mesh(name, tensors, Location::caller()) }
}

/// Words of a [`SliceTable`] per row that is the copy of one slice: where it begins, the slice and its weight.
const TABLE_WORDS: usize = 3;

/// How many combinations there are, or `usize::MAX` if there are more.
fn number_of_combinations(n: usize, length: usize, with_replacement: bool) -> usize {
    let of = if with_replacement { n.saturating_add(length) - usize::from(n > 0) } else { n };
    if n == 0 || length > of {
        return 0;
    }
    // Of a number or its complement, the smaller one: then every factor at least doubles the product, which soon overflows.
    let mut count: u128 = 1;
    for i in 0..length.min(of - length) as u128 {
        count = match count.checked_mul(of as u128 - i) {
            Some(product) if product / (i + 1) < usize::MAX as u128 => product / (i + 1),
            _ => return usize::MAX,
        };
    }
    count as usize
}

/// All combinations of `length` indices below `n`, in lexicographic order.
fn all_combinations(n: usize, length: usize, with_replacement: bool) -> Vec<i64> {
    let step = usize::from(!with_replacement);
    let mut all = Vec::new();
    if n == 0 || step * length > n {
        return all;
    }
    let mut row: Vec<usize> = (0..length).map(|i| i * step).collect();
    loop {
        all.extend(row.iter().map(|&i| i as i64));
        // The last index that can still grow; those after it follow it as closely as they may.
        let largest = |i: usize| n - 1 - (length - 1 - i) * step;
        let Some(at) = (0..length).rev().find(|&i| row[i] < largest(i)) else { return all };
        row[at] += 1;
        for i in at + 1..length {
            row[i] = row[i - 1] + step;
        }
    }
}

/// Sizes as the signed numbers that `reshape` and `expand` take.
pub(in crate::ops) fn signed(shape: &[usize]) -> Vec<isize> {
    shape.iter().map(|&n| n as isize).collect()
}

fn each(tensors: &[&DTensor], f: impl Fn(&DTensor) -> Result<DTensor>) -> Result<Vec<DTensor>> {
    tensors.iter().map(|t| f(t)).collect()
}

#[track_caller]
fn joined(tensors: &[DTensor], dim: isize) -> Result<DTensor> {
    DTensor::cat(&tensors.iter().collect::<Vec<_>>(), dim)
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "atleast_1d", samples: any, apply: |x| Ok(vec![x[0].atleast_1d()?]) },
    OpEntry { name: "atleast_2d", samples: any, apply: |x| Ok(vec![x[0].atleast_2d()?]) },
    OpEntry { name: "atleast_3d", samples: any, apply: |x| Ok(vec![x[0].atleast_3d()?]) },
    OpEntry { name: "hstack", samples: two, apply: |x| Ok(vec![DTensor::hstack(&[&x[0], &x[1]])?]) },
    OpEntry { name: "vstack", samples: two, apply: |x| Ok(vec![DTensor::vstack(&[&x[0], &x[1]])?]) },
    OpEntry { name: "dstack", samples: two, apply: |x| Ok(vec![DTensor::dstack(&[&x[0], &x[1]])?]) },
    OpEntry { name: "column_stack", samples: two, apply: |x| Ok(vec![DTensor::column_stack(&[&x[0], &x[1]])?]) },
    OpEntry { name: "tensor_split", samples: matrices, apply: |x| x[0].tensor_split(3, 0) },
    OpEntry { name: "tensor_split_at", samples: matrices, apply: |x| x[0].tensor_split_at(&[1, -1], 0) },
    OpEntry { name: "movedims", samples: matrices, apply: |x| Ok(vec![x[0].movedims(&[0, 1], &[1, 0])?]) },
    OpEntry { name: "squeeze_dims", samples: any, apply: |x| Ok(vec![x[0].squeeze_dims(&[])?]) },
    OpEntry { name: "tile", samples: matrices, apply: |x| Ok(vec![x[0].tile(&[2])?, x[0].tile(&[2, 1, 3])?]) },
    OpEntry {
        name: "rot90",
        samples: matrices,
        apply: |x| [1, 2, 3].into_iter().map(|times| x[0].rot90(times, [0, 1])).collect(),
    },
    OpEntry { name: "unfold", samples: matrices, apply: |x| Ok(vec![x[0].unfold(0, 2, 1)?, x[0].unfold(1, 3, 2)?]) },
    OpEntry {
        name: "sum_to_size",
        samples: matrices,
        apply: |x| Ok(vec![x[0].sum_to_size(&[1, x[0].shape()[1]])?, x[0].sum_to_size(&[1])?]),
    },
    OpEntry {
        name: "broadcast_tensors",
        samples: grids,
        apply: |x| DTensor::broadcast_tensors(&[&x[0].unsqueeze(1)?, &x[1]]),
    },
    OpEntry { name: "meshgrid", samples: grids, apply: |x| DTensor::meshgrid(&[&x[0], &x[1]], true) },
    OpEntry { name: "diag_embed", samples: matrices, apply: |x| Ok(vec![x[0].diag_embed(-1, [0, 2])?]) },
    OpEntry { name: "diagonal_of", samples: matrices, apply: |x| Ok(vec![x[0].diagonal_of(1, [1, 0])?]) },
    OpEntry { name: "diag", samples: matrices, apply: |x| Ok(vec![x[0].diag(-1)?]) },
    OpEntry { name: "diagflat", samples: matrices, apply: |x| Ok(vec![x[0].diagflat(1)?]) },
    OpEntry { name: "trace", samples: matrices, apply: |x| Ok(vec![x[0].trace()?]) },
    OpEntry {
        name: "diagonal_scatter",
        samples: scattered,
        apply: |x| Ok(vec![x[0].diagonal_scatter(&x[1], 0, [0, 1])?]),
    },
    OpEntry { name: "select_scatter", samples: scattered, apply: |x| Ok(vec![x[0].select_scatter(&x[2], 0, -1)?]) },
    OpEntry {
        name: "slice_scatter",
        samples: scattered,
        apply: |x| Ok(vec![x[0].slice_scatter(&x[2].unsqueeze(0)?, 0, 1, Some(2), 1)?]),
    },
    OpEntry { name: "kron", samples: two, apply: |x| Ok(vec![x[0].kron(&x[1])?]) },
    OpEntry { name: "block_diag", samples: two, apply: |x| Ok(vec![DTensor::block_diag(&[&x[0], &x[1]])?]) },
    OpEntry { name: "cartesian_prod", samples: grids, apply: |x| Ok(vec![DTensor::cartesian_prod(&[&x[0], &x[1]])?]) },
    OpEntry {
        name: "combinations",
        samples: grids,
        apply: |x| Ok(vec![x[0].combinations(2, false)?, x[1].combinations(2, true)?]),
    },
    OpEntry {
        name: "repeat_interleave_each",
        samples: repeats,
        apply: |x| Ok(vec![x[0].repeat_interleave_each(&x[1], 0)?]),
    },
];

fn any() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 4] = [&[5], &[4, 3], &[2, 3, 2], &[]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}

fn matrices() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64)], vec![SampleInput::new(&[4, 4], DType::I64)]]
}

fn two() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[3, 2], DType::F64), SampleInput::new(&[3, 2], DType::F64)]]
}

fn grids() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5], DType::F64), SampleInput::new(&[3], DType::F64)]]
}

fn scattered() -> Vec<Vec<SampleInput>> {
    vec![vec![
        SampleInput::new(&[5, 3], DType::F64),
        SampleInput::new(&[3], DType::F64),
        SampleInput::new(&[3], DType::F64),
    ]]
}

fn repeats() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::index(&[5], 3)]]
}
