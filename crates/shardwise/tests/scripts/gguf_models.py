"""Writes tests/data/gguf/models/*.gguf: tiny models of every family, converted by llama.cpp's own `convert_hf_to_gguf.py`,
and expected.json: names, shapes and configuration of what transformers saved before the conversion.

Every element is a function of the name of its tensor and its position (see `element`), so that a test can compute what it
has to find. Run with a Python that has torch, transformers and numpy, and a checkout of llama.cpp:

    python gguf_models.py /path/to/llama.cpp tests/data/gguf/models
"""

import json
import os
import sys
import tempfile
import zlib
from pathlib import Path

llama_cpp, target = Path(sys.argv[1]), Path(sys.argv[2])
os.environ["NO_LOCAL_GGUF"] = "1"
sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]

import conversion  # noqa: E402
import gguf  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers as hf  # noqa: E402
from conversion.base import ModelBase  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

COMMON = dict(vocab_size=24, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40,
              max_position_embeddings=64)
GROUPED = dict(COMMON, num_key_value_heads=2)
EXPERTS = dict(GROUPED, num_experts_per_tok=2)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.0, 1.5, 2.0, 4.0],
           "short_factor": [1.0, 1.0, 1.25, 1.5], "original_max_position_embeddings": 32}

MODELS = {
    "llama": hf.LlamaConfig(**GROUPED),
    "llama_bias": hf.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama_rope3": hf.LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "mixtral": hf.MixtralConfig(**EXPERTS, num_local_experts=3, sliding_window=None),
    "qwen2": hf.Qwen2Config(**GROUPED, rope_parameters=YARN),
    "qwen3": hf.Qwen3Config(**GROUPED, head_dim=16),
    "qwen2moe": hf.Qwen2MoeConfig(**EXPERTS, num_experts=3, moe_intermediate_size=16, shared_expert_intermediate_size=24),
    "qwen3moe": hf.Qwen3MoeConfig(**EXPERTS, num_experts=3, moe_intermediate_size=16, head_dim=16, norm_topk_prob=True),
    "olmoe": hf.OlmoeConfig(**EXPERTS, num_experts=3),
    "gemma2": hf.Gemma2Config(**GROUPED, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": hf.Gemma3TextConfig(**dict(GROUPED, num_hidden_layers=2), head_dim=16, sliding_window=8,
                                  query_pre_attn_scalar=16),
    "phi3": hf.Phi3Config(**GROUPED, pad_token_id=0, sliding_window=9),
    "phi3_long": hf.Phi3Config(**GROUPED, pad_token_id=0, rope_parameters=FACTORS, original_max_position_embeddings=32),
    "gpt2": hf.GPT2Config(vocab_size=24, n_embd=32, n_layer=1, n_head=4, n_positions=64, n_ctx=64),
    "gptneox": hf.GPTNeoXConfig(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                                                           "partial_rotary_factor": 0.5}),
}


def element(name, shape):
    """Multiples of 1/256 below 2, exact in every float type and with 1 added."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint64)
    number = (index * 31 + zlib.crc32(name.encode())) % 1009
    return torch.tensor((number.astype(np.float32) - 504) / 256).reshape(shape)


def convert(directory, out):
    """Runs llama.cpp's converter, without a tokenizer."""
    params = ModelBase.load_hparams(directory, False)
    kind = conversion.get_model_class(params["architectures"][0])
    kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
    with torch.inference_mode():
        model = kind(directory, gguf.LlamaFileType.MOSTLY_F16, out, eager=True)
        # Where the converter expects the name of earlier configurations.
        model.hparams.setdefault("rotary_pct", 0.5)
        model.write()


def main():
    target.mkdir(parents=True, exist_ok=True)
    expected = {}
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            directory = Path(directory) / name
            hf.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
            file = directory / "model.safetensors"
            weights = {key: element(key, tuple(old.shape)) for key, old in load_file(file).items()}
            save_file(weights, file, metadata={"format": "pt"})
            # Gemma's converter counts the tokens of a tokenizer.
            tokens = {str(i): i for i in range(COMMON["vocab_size"])}
            (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
            convert(directory, target / f"{name}.gguf")
            saved = json.loads((directory / "config.json").read_text())
            expected[name] = {"config": saved, "tensors": {key: list(value.shape) for key, value in weights.items()}}
    (target / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


main()
