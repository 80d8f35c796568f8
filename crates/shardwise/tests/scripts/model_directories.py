"""Writes small model directories with what transformers computes for them: the families and options that are not among the
directories that other tools made. Needs torch and transformers.

    python model_directories.py crates/shardwise/tests/conformance/data/models [name...]

A directory has a model with random weights and a cases.json with prompts, logits of the last two positions, norms of hidden
states, greedy tokens and, for some, a loss with norms of gradients. Norm weights are spread around their neutral value and
biases around 0, so that a forgotten one shows. Seeds are tried until greedy tokens lead by a margin that rounding cannot turn.
"""

import copy
import json
import os
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


BERT = dict(vocab_size=80, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
            max_position_embeddings=40)


MODELS = {
    "gemma2": ("gemma2", dict(SMALL, num_hidden_layers=3, head_dim=12, query_pre_attn_scalar=20, sliding_window=6,
                              final_logit_softcapping=8.0, attn_logit_softcapping=4.0)),
    "gemma3": ("gemma3_text", dict(SMALL, num_hidden_layers=3, head_dim=12, query_pre_attn_scalar=10, sliding_window=5,
                                   layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                   rope_parameters={
                                       "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                                       "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                                   })),
    "phi3": ("phi3", dict(SMALL, num_attention_heads=4, num_key_value_heads=2, sliding_window=7,
                          original_max_position_embeddings=128, **rope(rope_type="default", partial_rotary_factor=0.5))),
    "phi3_longrope": ("phi3", dict(SMALL, max_position_embeddings=128, original_max_position_embeddings=8,
                                   **rope(rope_type="longrope", short_factor=[1.0, 1.1, 1.3, 1.9],
                                          long_factor=[1.0, 2.0, 5.0, 9.0]))),
    # Tokens are generated past the length at which the factors change.
    "phi3_longrope_crossed": ("phi3", dict(SMALL, num_hidden_layers=2, original_max_position_embeddings=16,
                                           max_position_embeddings=64,
                                           **rope(rope_type="longrope", short_factor=[1.0, 1.2, 1.4, 2.0],
                                                  long_factor=[1.0, 2.0, 5.0, 9.0]))),
    "gpt_neox": ("gpt_neox", dict({k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
                                  **rope(rope_type="default", partial_rotary_factor=0.5))),
    "gpt_neox_serial": ("gpt_neox", dict({k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
                                         use_parallel_residual=False, hidden_act="gelu_new", num_attention_heads=3,
                                         hidden_size=36, attention_bias=False)),
    "qwen2_moe": ("qwen2_moe", dict(SMALL, num_hidden_layers=3, num_experts=5, num_experts_per_tok=2,
                                    moe_intermediate_size=20, shared_expert_intermediate_size=28,
                                    mlp_only_layers=[1], use_sliding_window=False)),
    "qwen3_moe": ("qwen3_moe", dict(SMALL, head_dim=12, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=16,
                                    norm_topk_prob=True, decoder_sparse_step=1)),
    "olmoe": ("olmoe", dict(SMALL, num_experts=4, num_experts_per_tok=2, clip_qkv=1.5, intermediate_size=24)),
    "llama_linear": ("llama", dict(SMALL, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh",
                                   **rope(rope_type="linear", factor=3.0))),
    "llama_dynamic": ("llama", dict(SMALL, max_position_embeddings=40, num_attention_heads=2, num_key_value_heads=1,
                                    **rope(rope_type="dynamic", factor=1.5))),
    "llama_yarn": ("llama", dict(SMALL, head_dim=24, max_position_embeddings=128,
                                 **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8,
                                        beta_slow=2))),
    "qwen2_window": ("qwen2", dict(SMALL, num_hidden_layers=3, use_sliding_window=True, sliding_window=6,
                                   max_window_layers=1)),
    "bert_older_names": ("bert", dict(BERT, num_hidden_layers=1, hidden_act="relu", pad_token_id=0)),
    "roberta": ("roberta", dict(vocab_size=80, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                                num_attention_heads=3, max_position_embeddings=40, type_vocab_size=1, pad_token_id=1,
                                bos_token_id=0, eos_token_id=2)),
    "distilbert": ("distilbert", dict(vocab_size=80, dim=24, hidden_dim=40, n_layers=2, n_heads=3,
                                      max_position_embeddings=40, pad_token_id=0)),
    "xlm_roberta": ("xlm-roberta", dict(BERT, type_vocab_size=1, pad_token_id=1)),
    "camembert": ("camembert", dict(BERT, type_vocab_size=1, pad_token_id=1)),
    "electra": ("electra", dict(BERT, embedding_size=16, pad_token_id=0)),
    "electra_one_width": ("electra", dict(BERT, embedding_size=24, pad_token_id=0, num_hidden_layers=1)),
    # Long enough for most ranges of distances.
    "mpnet": ("mpnet", dict(BERT, max_position_embeddings=80, pad_token_id=1)),
}
ENCODERS = {"bert_older_names", "roberta", "distilbert", "xlm_roberta", "camembert", "electra", "electra_one_width", "mpnet"}
# Their angles change with the length, and keys in a cache keep those of their time: tokens may differ without a cache.
BY_LENGTH = {"phi3_longrope", "phi3_longrope_crossed", "llama_dynamic"}
# `generate` drops the cache when the factors change, as it is meant to be used; a pass with the cache does not.
GENERATED = {"phi3_longrope_crossed"}
# A pickle with the names of files that come from TensorFlow.
OLDER_NAMES = {"bert_older_names"}
TRAINED = {"gemma2", "gpt_neox", "qwen2_moe", "qwen3_moe"}
NEW_TOKENS = 24


def tensor(t):
    t = t.detach()
    return {"dtype": "f32", "shape": list(t.shape), "data": [float(f"{x:.8g}") for x in t.float().flatten().tolist()]}


def randomize(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        draw = torch.randn(p.shape, generator=generator)
        if p.dim() == 1:
            around = 1.0 if "norm" in name.lower() and name.endswith("weight") and not gemma(model) else 0.0
            # With a tied head the last norm sets the size of the logits.
            p.data = around + 0.2 * draw + (3.0 if gemma(model) and name == "model.norm.weight" else 0.0)
        else:
            # A tied head prefers the token that it has just seen, the more so the larger embeddings are.
            embedding = 0.12 if gemma(model) else 0.7
            p.data = draw * (embedding if "embed" in name or "wte" in name else 1.6 / p.shape[-1] ** 0.5)
    return model


def gemma(model):
    return model.config.model_type.startswith("gemma")


def scale_logits(model, ids):
    """Scales the head so that logits have a standard deviation of about 3."""
    with torch.no_grad():
        head = model.get_output_embeddings()
        if head is not None and head.weight is not model.get_input_embeddings().weight:
            head.weight.data *= 3.0 / copy.deepcopy(model)(ids).logits.std()


def greedy(model, ids, cached):
    """Greedy tokens and the smallest lead of the best logit."""
    # Angles that grow with the length stay in the module that computed them.
    model = copy.deepcopy(model)
    out, margin, past, given = ids, float("inf"), None, ids
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            found = model(given, past_key_values=past, use_cache=cached)
            past = found.past_key_values if cached else None
            best = found.logits[:, -1].topk(2)
            margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
            out = torch.cat([out, best.indices[:, :1]], 1)
            given = best.indices[:, :1] if cached else out
    return out[:, ids.shape[1]:], margin


def causal(name, kind, options):
    config = AutoConfig.for_model(kind, **options)
    config.tie_word_embeddings = name in ("gemma2", "gemma3")
    config._attn_implementation = "eager"
    for seed in range(400):
        model = randomize(AutoModelForCausalLM.from_config(config).float().eval(), seed)
        torch.manual_seed(seed)
        long = {"llama_dynamic": 44, "phi3_longrope_crossed": 12}.get(name, 21)
        prompts = {"long": torch.randint(3, options["vocab_size"], (1, long)),
                   "batch2": torch.randint(3, options["vocab_size"], (2, 9)),
                   "one_token": torch.randint(3, options["vocab_size"], (1, 1))}
        if name in BY_LENGTH:
            del prompts["one_token"]
        scale_logits(model, prompts["long"])
        cases, good = [], True
        for id, ids in prompts.items():
            tokens, margin = greedy(model, ids, name not in GENERATED)
            other, margin2 = greedy(model, ids, False)
            if name in GENERATED:
                tokens = copy.deepcopy(model).generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
                tokens = tokens[:, ids.shape[1]:]
            good &= min(margin, margin2) > 0.004 and all(len(set(row)) >= 4 for row in tokens.tolist())
            good &= bool((tokens == other).all()) or name in BY_LENGTH
            if os.environ.get("VERBOSE"):
                print(name, seed, id, margin, margin2, [len(set(row)) for row in tokens.tolist()], (tokens == other).all())
            if not good:
                break
            with torch.no_grad():
                found = copy.deepcopy(model)(ids, output_hidden_states=True)
            norms = torch.stack([h.flatten(1).norm(dim=1) for h in found.hidden_states])
            cases.append({"id": id, "text": None, "input_ids": ids.tolist(), "attention_mask": None,
                          "logits": tensor(found.logits[:, -2:]), "hidden_norms": tensor(norms),
                          "greedy": tokens.tolist(), "greedy_uncached": other.tolist(), "greedy_min_margin": round(min(margin, margin2), 5)})
        if good:
            break
    else:
        raise SystemExit(f"{name}: no seed gives clear tokens")
    recorded = {"name": name, "kind": "causal_lm", "model_type": kind, "made_with": made_with(), "weights_dtype": "f32",
                "compute_dtype": "f32", "tolerance": {
                    "logits": {"atol": 1e-4, "rtol": 1e-4}, "hidden_norms": {"atol": 1e-4, "rtol": 1e-4},
                    "greedy": "exact", "loss": {"atol": 2e-5, "rtol": 2e-5}, "grad_norms": {"atol": 1e-5, "rtol": 1e-3},
                    "train_losses": {"atol": 1e-4, "rtol": 1e-4}},
                "cases": cases, "generate": [] if name in BY_LENGTH else [padded(model, options)], "router_min_gap": None, "train": None,
                "text_cases": [], "chat_cases": []}
    return model, recorded, prompts


def padded(model, options):
    long, short = torch.randint(3, options["vocab_size"], (1, 9)), torch.randint(3, options["vocab_size"], (1, 6))
    rows = [greedy(model, ids, True)[0][0].tolist() for ids in (short, long)]
    ids = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"id": "left_padded", "input_ids": ids.tolist(), "attention_mask": mask.tolist(),
            "max_new_tokens": NEW_TOKENS, "eos_token_id": [options["vocab_size"] + 1], "pad_token_id": 0, "output": rows}


def train(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}
    # Only names that files have too: experts are one tensor each there.
    names = [n for n in grads if ".experts." not in n and n != "lm_head.weight"]
    names = names[:3] + names[-2:]
    recorded = {"input_ids": ids.tolist(), "labels": ids.tolist(), "loss": loss.item(),
                "grad_norms": {n: grads[n] for n in names},
                "total_grad_norm": sum(g * g for g in grads.values()) ** 0.5}
    settings = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    recorded["fine_tune"] = {"optimizer": "adamw", **settings, "weight_decay_on": "all parameters", "losses": losses}
    return recorded


def encoder(name, kind, options):
    config = AutoConfig.for_model(kind, **options)
    config._attn_implementation = "eager"
    model = randomize(AutoModel.from_config(config).float().eval(), 1)
    torch.manual_seed(1)
    pad = options["pad_token_id"]
    longest = 70 if name == "mpnet" else 11
    ids = torch.randint(3, options["vocab_size"], (3, longest))
    mask = torch.ones_like(ids)
    for row, length in ((0, 7), (2, 9)):
        ids[row, length:], mask[row, length:] = pad, 0
    with torch.no_grad():
        found = model(ids, attention_mask=mask)
        hidden = found.last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        embedding = mean / mean.norm(dim=1, keepdim=True)
    pooled = getattr(found, "pooler_output", None)
    case = {"id": "padded", "text": None, "text_pair": None, "input_ids": ids.tolist(), "attention_mask": mask.tolist(),
            "token_type_ids": None, "last_hidden_state": tensor(hidden),
            "pooler_output": None if pooled is None else tensor(pooled), "embedding": tensor(embedding),
            "cosine": tensor(embedding @ embedding.T)}
    close = {"atol": 1e-4, "rtol": 1e-4}
    tolerance = {"last_hidden_state": close, "pooler_output": close, "embedding": {"atol": 1e-5, "rtol": 1e-4},
                 "cosine": {"atol": 1e-5, "rtol": 0.0}}
    return model, {"name": name, "kind": "encoder", "model_type": kind, "made_with": made_with(), "weights_dtype": "f32",
                   "compute_dtype": "f32", "tolerance": tolerance, "cases": [case], "train": None, "text_cases": [],
                   "chat_cases": []}


def made_with():
    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


def main():
    torch.set_num_threads(1)
    out, names = sys.argv[1], sys.argv[2:] or list(MODELS)
    for name in names:
        kind, options = MODELS[name]
        if name in ENCODERS:
            model, recorded = encoder(name, kind, options)
        else:
            model, recorded, prompts = causal(name, kind, options)
        directory = os.path.join(out, name)
        model.save_pretrained(directory)
        if name in OLDER_NAMES:
            older = {key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
                     for key, value in model.state_dict().items()}
            torch.save(older, os.path.join(directory, "pytorch_model.bin"))
            os.remove(os.path.join(directory, "model.safetensors"))
        if name in TRAINED:
            recorded["train"] = train(model, torch.randint(3, options["vocab_size"], (2, 8)))
        with open(os.path.join(directory, "cases.json"), "w") as file:
            json.dump(recorded, file)
        for extra in ("generation_config.json",):
            if os.path.exists(os.path.join(directory, extra)):
                os.remove(os.path.join(directory, extra))
        print(name, sum(os.path.getsize(os.path.join(directory, f)) for f in os.listdir(directory)) // 1024, "KB", flush=True)


main()
