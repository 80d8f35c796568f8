//! `torch.linalg` and the older names of its operators.

use super::calls::calls;

calls! {
    "linalg.multi_dot(tensors)" => |a| {
        let tensors = a.tensors("tensors")?;
        tensors[1..].iter().try_fold(tensors[0].clone(), |product, next| product.matmul(next))
    };
}
