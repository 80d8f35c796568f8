"""Writes what transformers writes for a configuration without arguments, by kind of model. Needs transformers.

    python record_configs.py > crates/shardwise/tests/data/configs/transformers5.json
"""

import json
import os
import sys
import tempfile

from transformers import AutoConfig

KINDS = ["bert", "camembert", "distilbert", "electra", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral",
         "mixtral", "mpnet", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "roberta", "xlm-roberta"]

written = {}
for kind in KINDS:
    with tempfile.TemporaryDirectory() as directory:
        AutoConfig.for_model(kind).save_pretrained(directory)
        with open(os.path.join(directory, "config.json")) as file:
            written[kind] = json.load(file)
lines = [f"  {json.dumps(kind)}: {json.dumps(config)}" for kind, config in written.items()]
sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
