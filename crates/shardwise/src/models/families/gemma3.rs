//! Gemma 3, text: Gemma 2 with norms of queries and keys instead of soft caps, and rotary positions of their own in local
//! layers.

use super::gemma2::{NAMES, gemma_defaults, read_gemma, window};
use super::llama::{LlamaDefaults, read_llama_like, set_window};
use super::{Architecture, Family, local_layers};
use crate::models::decoder::QueryKeyNorm;
use crate::models::fields::{RopeDefaults, RopeSizes, read_rope_object};

pub(super) static FAMILY: Family = Family {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    prefix: "model.",
    names: NAMES,
    other_names: &[],
    ignored_tensors: &["*.rotary_emb.inv_freq"],
    read: |fields| {
        let defaults = LlamaDefaults { own_ropes: true, ..gemma_defaults(262_208, 131_072) };
        let mut spec = read_llama_like(fields, &defaults)?;
        read_gemma(fields, &mut spec)?;
        spec.attention.query_key_norm = QueryKeyNorm::PerHead;
        // Without effect: transformers reads this field, which comes from Gemma 2, and caps no scores with it.
        fields.number("attn_logit_softcapping")?;
        spec.logit_soft_cap = fields.number("final_logit_softcapping")?;
        let layers = spec.layers.len();
        // Written under both names, also together with `layer_types`, which decides where it is there.
        let hidden_pattern = fields.size_or("_sliding_window_pattern", 6)?;
        let pattern = fields.size_or("sliding_window_pattern", hidden_pattern)?;
        if pattern == 0 {
            return Err(fields.bad("sliding_window_pattern", "at least 1"));
        }
        let is_local = local_layers(fields, layers, |i| !(i + 1).is_multiple_of(pattern))?;
        set_window(&mut spec, window(fields)?, &is_local);
        let sizes = RopeSizes { head_dim: spec.attention.head_dim, max_positions: spec.max_positions };
        let global = RopeDefaults { theta: 1e6, ..RopeDefaults::default() };
        let local = RopeDefaults { theta_field: "rope_local_base_freq", ..RopeDefaults::default() };
        let nested = fields.object("rope_parameters")?;
        let of_kind = |kind: &str| nested.as_ref().map_or(Ok(None), |nested| nested.object(kind));
        let scaling = fields.object("rope_scaling")?;
        let full = of_kind("full_attention")?;
        // Older files scale only global layers.
        let full = read_rope_object(fields, full.as_ref().or(scaling.as_ref()), &global, sizes)?;
        let sliding = read_rope_object(fields, of_kind("sliding_attention")?.as_ref(), &local, sizes)?;
        if let Some(nested) = &nested {
            nested.refuse_unread(&[])?;
        }
        spec.ropes = vec![full, sliding];
        for (layer, local) in spec.layers.iter_mut().zip(&is_local) {
            layer.rope = Some(usize::from(*local));
        }
        Ok(Architecture::Decoder(spec))
    },
};
