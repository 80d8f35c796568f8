//! The signatures of PyTorch that an operator serves, with their tiers.

/// A line per signature: its tier (0: drawn at random, or not in the vectors) and its text. Written and checked by the test
/// `pytorch_operators` of the library.
const SIGNATURES: &str = include_str!("../../data/pytorch_signatures.txt");

/// Operators that have another name in PyTorch, where one function takes numbers, tensors or options.
const RENAMED: &[(&str, &str)] = &[
    ("gelu_tanh", "nn.functional.gelu"),
    ("frexp_exponent", "frexp"),
    ("pow_scalar", "pow"),
    ("add_scalar", "add"),
    ("sub_scalar", "sub"),
    ("rsub_scalar", "rsub"),
    ("mul_scalar", "mul"),
    ("div_scalar", "div"),
    ("div_floor", "div"),
    ("div_trunc", "div"),
    ("where_cond", "where"),
    ("clamp_tensor", "clamp"),
    ("bce_with_logits", "nn.functional.binary_cross_entropy_with_logits"),
    ("bce_with_logits_weighted", "nn.functional.binary_cross_entropy_with_logits"),
    ("split_sizes", "split"),
    ("index", "index_put"),
    ("max_dim", "max"),
    ("min_dim", "min"),
    ("round_decimals", "round"),
    ("tensor_split_at", "tensor_split"),
    ("movedims", "movedim"),
    ("squeeze_dims", "squeeze"),
    ("diagonal_of", "diagonal"),
    ("repeat_interleave_each", "repeat_interleave"),
    ("embedding_with", "nn.functional.embedding"),
    ("embedding_bag_with", "nn.functional.embedding_bag"),
    ("feature_dropout", "nn.functional.dropout2d"),
    ("avg_pool", "nn.functional.avg_pool2d"),
    ("max_pool", "nn.functional.max_pool2d"),
    ("adaptive_avg_pool", "nn.functional.adaptive_avg_pool2d"),
    ("adaptive_max_pool", "nn.functional.adaptive_max_pool2d"),
    ("fractional_max_pool", "nn.functional.fractional_max_pool2d"),
    ("max_unpool", "nn.functional.max_unpool2d"),
    ("lp_pool", "nn.functional.lp_pool2d"),
    ("im2col", "nn.functional.unfold"),
    ("col2im", "nn.functional.fold"),
    ("pad_same", "nn.functional.conv2d"),
    ("interpolate_by", "nn.functional.interpolate"),
    ("pad_with", "nn.functional.pad"),
    ("cross_entropy_weighted", "nn.functional.cross_entropy"),
    ("cross_entropy_probabilities", "nn.functional.cross_entropy"),
    ("cross_entropy_with", "nn.functional.cross_entropy"),
    ("nll_loss_weighted", "nn.functional.nll_loss"),
    ("kl_div_log_target", "nn.functional.kl_div"),
    ("histogram_edges", "histogram"),
    ("safe_softmax", "torch.ops.aten._safe_softmax.default"),
];

/// Namespaces that names of operators here do not all repeat.
const NAMESPACES: &[&str] = &["nn.functional.", "special.", "fft."];

/// A signature of PyTorch with its tier; 0 if it is not in the vectors.
pub(super) struct TorchSignature {
    pub(super) tier: u8,
    pub(super) text: &'static str,
}

/// The signatures that an operator serves.
pub(super) fn signatures(operator: &str) -> Vec<TorchSignature> {
    let renamed = RENAMED.iter().find(|(ours, _)| *ours == operator).map(|(_, theirs)| *theirs);
    let is_served = |text: &str| {
        let name = text.split('(').next().unwrap_or(text);
        let short = NAMESPACES.iter().find_map(|space| name.strip_prefix(space)).unwrap_or(name);
        let is_named = |text: &str| text.replace('.', "_") == operator;
        renamed.map_or_else(|| is_named(name) || is_named(short), |theirs| theirs == name)
    };
    let lines = SIGNATURES.lines().filter_map(|line| line.split_once(' '));
    let served = lines.filter(|(_, text)| is_served(text));
    served.map(|(tier, text)| TorchSignature { tier: tier.parse().unwrap_or(0), text }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_renamed_operator_has_a_signature_and_most_operators_are_found_by_name() {
        for (ours, theirs) in RENAMED {
            assert!(!signatures(ours).is_empty(), "{ours} is named {theirs}, which is not in the table");
        }
        let found = super::super::all().filter(|op| !signatures(op.name).is_empty()).count();
        // What is left has no counterpart: rotary embeddings, fused layers, statistics of batches, draws.
        let without: Vec<&str> = super::super::all().map(|op| op.name).filter(|op| signatures(op).is_empty()).collect();
        assert!(without.len() <= 10, "{found} found, not {without:?}");
        let relu = signatures("relu");
        assert_eq!((relu[0].tier, relu[0].text), (1, "nn.functional.relu(input, inplace=False)"));
    }
}
