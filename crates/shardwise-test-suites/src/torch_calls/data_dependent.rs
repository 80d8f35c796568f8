//! Operators whose result size depends on the data.

use shardwise::prelude::*;

use super::calls::calls;

calls! {
    "masked_select(input, mask)" => |a| a.tensor("input")?.masked_select(&a.tensor("mask")?);
    "nonzero(input, *, as_tuple=False)" => |a| match a.flag("as_tuple") {
        false => Ok::<_, Error>(vec![a.tensor("input")?.nonzero()?]),
        true => a.tensor("input")?.nonzero()?.unbind(1),
    };
    "argwhere(input)" => |a| a.tensor("input")?.nonzero();
}
