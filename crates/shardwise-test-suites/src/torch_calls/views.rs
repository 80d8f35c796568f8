//! Shapes: views, slices, joins, permutations.

use shardwise::ops::{PadMode, broadcast_shapes};
use shardwise::prelude::*;
use shardwise::tensor::Number;

use super::arguments::Arguments;
use super::calls::calls;

calls! {
    "reshape(input, *shape)" => |a| a.tensor("input")?.reshape(&a.spread_ints("shape"));
    "view(input, *shape)" => |a| a.tensor("input")?.view(&a.spread_ints("shape"));
    "reshape_as(input, other)" => |a| a.tensor("input")?.reshape(&signed(a.tensor("other")?.shape()));
    "view_as(input, other)" => |a| a.tensor("input")?.view(&signed(a.tensor("other")?.shape()));
    "ravel(input)" => |a| a.tensor("input")?.reshape(&[-1]);
    "flatten(input, start_dim=0, end_dim=-1)" => |a|
        a.tensor("input")?.flatten(a.int("start_dim")?, a.int("end_dim")?);
    "unflatten(input, dim, sizes)" => |a| a.tensor("input")?.unflatten(a.int("dim")?, &a.ints("sizes"));
    "permute(input, *dims)" => |a| a.tensor("input")?.permute(&a.spread_ints("dims"));
    "transpose(input, dim0, dim1)" => |a| a.tensor("input")?.transpose(a.int("dim0")?, a.int("dim1")?);
    "t(input)" => |a| a.tensor("input")?.t();
    "unsqueeze(input, dim)" => |a| a.tensor("input")?.unsqueeze(a.int("dim")?);
    "expand(input, *size)" => |a| a.tensor("input")?.expand(&a.spread_ints("size"));
    "expand_as(input, other)" => |a| a.tensor("input")?.expand(&signed(a.tensor("other")?.shape()));
    "broadcast_to(input, size)" => |a| a.tensor("input")?.expand(&a.ints("size"));
    "narrow(input, dim, start, length)" => |a| {
        let (x, dim) = (a.tensor("input")?, a.int("dim")?);
        // The start may be a tensor, and negative.
        let start = match a.optional_tensor("start") {
            Some(start) => start.item::<i64>()? as isize,
            None => a.int("start")?,
        };
        let at = if dim < 0 { dim.wrapping_add(x.ndim() as isize) } else { dim };
        let size = x.shape().get(at as usize).map_or(0, |&n| n as isize);
        x.narrow(dim, (start + if start < 0 { size } else { 0 }) as usize, a.size("length")?)
    };
    "select(input, dim, index)" => |a| a.tensor("input")?.select(a.int("dim")?, a.int("index")?);
    "slice(input, dim=0, start=None, end=None, step=1)" => |a|
        a.tensor("input")?.slice(a.int("dim")?, a.optional_int("start").unwrap_or(0), a.optional_int("end"), a.size("step")?);
    "split(input, split_size_or_sections, dim=0)" => |a| match a.value("split_size_or_sections").is_array() {
        true => a.tensor("input")?.split_sizes(&a.sizes("split_size_or_sections"), a.int("dim")?),
        false => a.tensor("input")?.split(a.size("split_size_or_sections")?, a.int("dim")?),
    };
    "unsafe_split(input, split_size, dim=0)" => |a| a.tensor("input")?.split(a.size("split_size")?, a.int("dim")?);
    "split_with_sizes(input, split_sizes, dim=0)" => |a|
        a.tensor("input")?.split_sizes(&a.sizes("split_sizes"), a.int("dim")?);
    "chunk(input, chunks, dim=0)" => |a| a.tensor("input")?.chunk(a.size("chunks")?, a.int("dim")?);
    "unsafe_chunk(input, chunks, dim=0)" => |a| a.tensor("input")?.chunk(a.size("chunks")?, a.int("dim")?);
    "unbind(input, dim=0)" => |a| a.tensor("input")?.unbind(a.int("dim")?);
    "cat(tensors, dim=0)" => |a| DTensor::cat(&a.tensors("tensors")?.iter().collect::<Vec<_>>(), a.int("dim")?);
    "stack(tensors, dim=0)" => |a| DTensor::stack(&a.tensors("tensors")?.iter().collect::<Vec<_>>(), a.int("dim")?);
    "flip(input, *dims)" => |a| a.tensor("input")?.flip(&a.spread_ints("dims"));
    "roll(input, shifts, dims=[])" => |a| a.tensor("input")?.roll(&a.ints("shifts"), &a.ints("dims"));
    "repeat(input, *repeats)" => |a|
        a.tensor("input")?.repeat(&a.spread_ints("repeats").iter().map(|&n| n as usize).collect::<Vec<_>>());
    "tril(input, diagonal=0)" => |a| a.tensor("input")?.tril(a.int("diagonal")?);
    "triu(input, diagonal=0)" => |a| a.tensor("input")?.triu(a.int("diagonal")?);

    // Properties of a matrix or a batch of them; a real matrix is its own conjugate.
    "T(input)" => |a| reversed(&a.tensor("input")?);
    "H(input)" => |a| reversed(&a.tensor("input")?);
    "mT(input)" => |a| a.tensor("input")?.transpose(-2, -1);
    "mH(input)" => |a| a.tensor("input")?.transpose(-2, -1);
    "movedim(input, source, destination)" => |a| a.tensor("input")?.movedims(&a.ints("source"), &a.ints("destination"));
    // No dimension means all, an empty list none.
    "squeeze(input, dim=None)" => |a| match (a.has("dim"), a.value("dim").is_array()) {
        (false, _) => a.tensor("input")?.squeeze(None),
        (true, false) => a.tensor("input")?.squeeze(a.optional_int("dim")),
        (true, true) => a.tensor("input")?.squeeze_dims(&a.ints("dim")),
    };
    "atleast_1d(*tensors)" => |a| all(a, DTensor::atleast_1d);
    "atleast_2d(*tensors)" => |a| all(a, DTensor::atleast_2d);
    "atleast_3d(*tensors)" => |a| all(a, DTensor::atleast_3d);
    "hstack(tensors)" => |a| DTensor::hstack(&a.tensors("tensors")?.iter().collect::<Vec<_>>());
    "vstack(tensors)" => |a| DTensor::vstack(&a.tensors("tensors")?.iter().collect::<Vec<_>>());
    "dstack(tensors)" => |a| DTensor::dstack(&a.tensors("tensors")?.iter().collect::<Vec<_>>());
    "column_stack(tensors)" => |a| DTensor::column_stack(&a.tensors("tensors")?.iter().collect::<Vec<_>>());
    "tensor_split(input, indices_or_sections, dim=0)" => |a| parts(a, a.int("dim")?);
    "hsplit(input, indices_or_sections)" => |a| parts(a, if a.tensor("input")?.ndim() == 1 { 0 } else { 1 });
    "vsplit(input, indices_or_sections)" => |a| parts(a, 0);
    "dsplit(input, indices_or_sections)" => |a| parts(a, 2);
    "fliplr(input)" => |a| a.tensor("input")?.flip(&[1]);
    "flipud(input)" => |a| a.tensor("input")?.flip(&[0]);
    "rot90(input, k=1, dims=[0,1])" => |a| {
        let dims = a.ints("dims");
        a.tensor("input")?.rot90(a.int("k")?, [dims[0], dims[1]])
    };
    "tile(input, *dims)" => |a|
        a.tensor("input")?.tile(&a.spread_ints("dims").iter().map(|&n| n as usize).collect::<Vec<_>>());
    "unfold(input, dimension, size, step)" => |a|
        a.tensor("input")?.unfold(a.int("dimension")?, a.size("size")?, a.size("step")?);
    "sum_to_size(input, *size)" => |a|
        a.tensor("input")?.sum_to_size(&a.spread_ints("size").iter().map(|&n| n as usize).collect::<Vec<_>>());
    "broadcast_tensors(*tensors)" => |a| DTensor::broadcast_tensors(&a.tensors("tensors")?.iter().collect::<Vec<_>>());
    "meshgrid(*tensors, *, indexing='ij')" => |a| DTensor::meshgrid(
        &a.tensors("tensors")?.iter().collect::<Vec<_>>(), a.text("indexing").as_deref() == Some("xy"));
    "diag(input, diagonal=0)" => |a| a.tensor("input")?.diag(a.int("diagonal")?);
    "diagflat(input, offset=0)" => |a| a.tensor("input")?.diagflat(a.int("offset")?);
    "diag_embed(input, offset=0, dim1=-2, dim2=-1)" => |a|
        a.tensor("input")?.diag_embed(a.int("offset")?, [a.int("dim1")?, a.int("dim2")?]);
    "diagonal(input, offset=0, dim1=0, dim2=1)" => |a|
        a.tensor("input")?.diagonal_of(a.int("offset")?, [a.int("dim1")?, a.int("dim2")?]);
    "diagonal_scatter(input, src, offset=0, dim1=0, dim2=1)" => |a| a.tensor("input")?.diagonal_scatter(
        &a.tensor("src")?, a.int("offset")?, [a.int("dim1")?, a.int("dim2")?]);
    "select_scatter(input, src, dim, index)" => |a|
        a.tensor("input")?.select_scatter(&a.tensor("src")?, a.int("dim")?, a.int("index")?);
    "slice_scatter(input, src, dim=0, start=None, end=None, step=1)" => |a| a.tensor("input")?.slice_scatter(
        &a.tensor("src")?, a.int("dim")?, a.optional_int("start").unwrap_or(0), a.optional_int("end"), a.size("step")?);
    "kron(input, other)" => |a| a.tensor("input")?.kron(&a.tensor("other")?);
    "block_diag(*tensors)" => |a| DTensor::block_diag(&a.tensors("tensors")?.iter().collect::<Vec<_>>());
    "cartesian_prod(*tensors)" => |a| DTensor::cartesian_prod(&a.tensors("tensors")?.iter().collect::<Vec<_>>());
    "combinations(input, r=2, with_replacement=False)" => |a|
        a.tensor("input")?.combinations(a.size("r")?, a.flag("with_replacement"));
    "repeat_interleave(input, repeats, dim=None, *, output_size=None)" => |a| {
        let x = a.tensor("input")?;
        let (x, dim) = match a.optional_int("dim") {
            Some(dim) => (x, dim),
            None => (x.reshape(&[-1])?, 0),
        };
        match a.optional_tensor("repeats") {
            Some(repeats) => x.repeat_interleave_each(&repeats, dim),
            None => x.repeat_interleave(a.size("repeats")?, dim),
        }
    };
    "constant_pad_nd(input, pad, value=0)" => |a| {
        let x = a.tensor("input")?;
        let value = if a.is_bool("input") { Number::Integer(i64::from(a.float("value")? != 0.0)) } else { a.number("value")? };
        x.pad_with(&borders(&a.ints("pad")), PadMode::Constant(value))
    };
    "nn.functional.pad(input, pad, mode='constant', value=None)" => |a| {
        let mode = match a.text("mode").as_deref() {
            Some("reflect") => PadMode::Reflect,
            Some("replicate") => PadMode::Replicate,
            Some("circular") => PadMode::Circular,
            _ if a.is_bool("input") => PadMode::Constant(Number::Integer(i64::from(a.float("value").unwrap_or(0.0) != 0.0))),
            _ => PadMode::Constant(a.number("value").unwrap_or(Number::Integer(0))),
        };
        a.tensor("input")?.pad_with(&borders(&a.ints("pad")), mode)
    };
    "nn.functional.pixel_shuffle(input, upscale_factor)" => |a| a.tensor("input")?.pixel_shuffle(a.size("upscale_factor")?);
    "nn.functional.pixel_unshuffle(input, downscale_factor)" => |a|
        a.tensor("input")?.pixel_unshuffle(a.size("downscale_factor")?);
    "nn.functional.channel_shuffle(input, groups)" => |a| a.tensor("input")?.channel_shuffle(a.size("groups")?);
    "broadcast_shapes(*shapes)" => |a| {
        let shapes = a.shapes();
        let shape = broadcast_shapes(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        Ok::<_, Error>(shape.iter().map(|&n| n as f64).collect::<Vec<f64>>())
    };
    "_chunk_cat(tensors, dim, num_chunks)" => |a|
        DTensor::chunk_cat(&a.tensors("tensors")?.iter().collect::<Vec<_>>(), a.int("dim")?, a.size("num_chunks")?);
}

/// Sizes as the signed numbers that `reshape` and `expand` take.
pub(super) fn signed(shape: &[usize]) -> Vec<isize> {
    shape.iter().map(|&n| n as isize).collect()
}

fn reversed(x: &DTensor) -> Result<DTensor> {
    x.permute(&(0..x.ndim() as isize).rev().collect::<Vec<_>>())
}

fn all(a: &Arguments<'_>, f: fn(&DTensor) -> Result<DTensor>) -> Result<Vec<DTensor>> {
    a.tensors("tensors")?.iter().map(f).collect()
}

/// Pieces of a dimension: a number of them, or the indices at which they begin, as a list or a tensor.
fn parts(a: &Arguments<'_>, dim: isize) -> Result<Vec<DTensor>> {
    let x = a.tensor("input")?;
    match a.optional_tensor("indices_or_sections") {
        Some(tensor) if tensor.ndim() == 0 => x.tensor_split(tensor.item::<i64>()? as usize, dim),
        Some(tensor) => {
            let indices = tensor.full_tensor()?.to_vec1::<i64>()?;
            x.tensor_split_at(&indices.iter().map(|&i| i as isize).collect::<Vec<_>>(), dim)
        }
        None if a.value("indices_or_sections").is_array() => x.tensor_split_at(&a.ints("indices_or_sections"), dim),
        None => x.tensor_split(a.size("indices_or_sections")?, dim),
    }
}

/// PyTorch's list of borders as pairs.
fn borders(pad: &[isize]) -> Vec<(isize, isize)> {
    pad.chunks(2).map(|pair| (pair[0], pair[1])).collect()
}
