//! Shapes: views, slices, joins, permutations.

use shardwise::prelude::*;

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
        let size = x.shape()[(dim + if dim < 0 { x.ndim() as isize } else { 0 }) as usize] as isize;
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
}

/// Sizes as the signed numbers that `reshape` and `expand` take.
pub(super) fn signed(shape: &[usize]) -> Vec<isize> {
    shape.iter().map(|&n| n as isize).collect()
}
