"""Records training runs of small Llamas with transformers on one device, in the form of tests/conformance/data/train.

Usage: record_training.py DIRECTORY

Writes one directory per entry of RUNS: settings, batches, initial and final weights, the gradients and logits of the first step, and
the loss and gradient norm of every step.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

# Fewer key heads than ranks, query heads that divide by nothing, odd widths of the MLP and of the vocabulary.
RUNS = {
    "llama_one_key_head": dict(n_layers=2, d_model=40, n_heads=5, n_kv_heads=1, d_ff=52, vocab_size=50, seq_len=12),
}
STEPS, BATCH = 10, 4
OPTIMIZER = dict(name="adamw", lr=0.001, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.01)
GRAD_CLIP = 1.0


def record(directory, sizes, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=sizes["d_ff"],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=sizes["n_kv_heads"],
        max_position_embeddings=sizes["seq_len"],
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        initializer_range=0.1,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float()
    weights = lambda: {name: p.detach().clone().contiguous() for name, p in model.named_parameters()}
    tokens = torch.randint(sizes["vocab_size"], (STEPS, BATCH, sizes["seq_len"] + 1))
    settings = {key: value for key, value in OPTIMIZER.items() if key != "name"}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights(), directory / "init.safetensors")
    losses, norms = [], []
    for step in range(STEPS):
        logits = model(tokens[step, :, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[step, :, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone().contiguous() for name, p in model.named_parameters()}
            save_file(gradients, directory / "grads_step0.safetensors")
            save_file({"tokens": tokens, "logits_step0": logits.detach().contiguous()}, directory / "batches.safetensors")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    save_file(weights(), directory / "final.safetensors")
    settings = dict(model="llama", dtype="f32", **sizes, rms_norm_eps=1e-5, rope_theta=10000.0, batch_size=BATCH)
    settings |= dict(steps=STEPS, optimizer=OPTIMIZER, grad_clip=GRAD_CLIP)
    (directory / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (directory / "trace.json").write_text(json.dumps(dict(losses=losses, grad_norms=norms), indent=1) + "\n")


for seed, (name, sizes) in enumerate(RUNS.items()):
    record(Path(sys.argv[1]) / name, sizes, seed)
