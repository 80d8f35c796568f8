"""Records adapters of the PEFT library for two model directories, with the logits that it computes with them.

Usage: record_adapters.py MODELS OUT, where MODELS has the directories llama_gqa and gpt2. Needs torch, transformers and peft.
"""

import json
import pathlib
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

models, out = map(pathlib.Path, sys.argv[1:])
SETTINGS = {
    "llama_gqa": dict(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]),
    "gpt2": dict(r=2, lora_alpha=3, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True),
}
for name, settings in SETTINGS.items():
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter, std=0.2)
    cases = json.loads((models / name / "cases.json").read_text())
    ids = next(c["input_ids"] for c in cases["cases"] if len(c["input_ids"]) == 2)
    with torch.no_grad():
        logits = model(torch.tensor(ids)).logits[:, -1]
    model.save_pretrained(out / name)
    (out / name / "README.md").unlink()
    config = out / name / "adapter_config.json"
    fields = json.loads(config.read_text())
    fields["base_model_name_or_path"] = name
    config.write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")
    expected = dict(input_ids=ids, logits=logits.double().tolist())
    (out / name / "cases.json").write_text(json.dumps(expected) + "\n")
