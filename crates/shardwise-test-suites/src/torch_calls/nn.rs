//! Activations, normalizations, windows and attention of `torch.nn.functional`.

use super::calls::calls;

calls! {
    "nn.functional.relu(input, inplace=False)" => |a| a.tensor("input")?.relu();
    "nn.functional.silu(input, inplace=False)" => |a| a.tensor("input")?.silu();
    "nn.functional.mish(input, inplace=False)" => |a| a.tensor("input")?.mish();
    "nn.functional.hardswish(input, inplace=False)" => |a| a.tensor("input")?.hardswish();
    "nn.functional.logsigmoid(input)" => |a| a.tensor("input")?.logsigmoid();
    "nn.functional.softsign(input)" => |a| a.tensor("input")?.softsign();
    "nn.functional.gelu(input, *, approximate='none')" => |a| match a.text("approximate").as_deref() {
        Some("tanh") => a.tensor("input")?.gelu_tanh(),
        _ => a.tensor("input")?.gelu(),
    };
    "nn.functional.leaky_relu(input, negative_slope=0.01, inplace=False)" => |a|
        a.tensor("input")?.leaky_relu(a.float("negative_slope")?);
    "nn.functional.elu(input, alpha=1.0, inplace=False)" => |a| a.tensor("input")?.elu(a.float("alpha")?);
    "nn.functional.softplus(input, beta=1, threshold=20)" => |a|
        a.tensor("input")?.softplus(a.float("beta")?, a.float("threshold")?);
    "nn.functional.layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05)" => |a|
        a.tensor("input")?.layer_norm(a.sizes("normalized_shape").len(), a.optional_tensor("weight").as_ref(),
            a.optional_tensor("bias").as_ref(), a.float("eps")?);
    "nn.functional.group_norm(input, num_groups, weight=None, bias=None, eps=1e-05)" => |a|
        a.tensor("input")?.group_norm(a.size("num_groups")?, a.optional_tensor("weight").as_ref(),
            a.optional_tensor("bias").as_ref(), a.float("eps")?);
    "nn.functional.dropout(input, p=0.5, training=True, inplace=False)" => |a|
        a.tensor("input")?.dropout(a.float("p")?, a.flag("training"));
}
