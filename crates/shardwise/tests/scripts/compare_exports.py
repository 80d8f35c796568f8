"""Compares the logits that transformers computes from exported model directories with those from the originals.

    python compare_exports.py ORIGINALS EXPORTS
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM


def logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.arange(40).reshape(2, 20) * 7 % 79
    with torch.no_grad():
        return model(ids).logits


def main():
    originals, exports = sys.argv[1:]
    names, far = sorted(os.listdir(exports)), 0.0
    assert names, f"no exports in {exports}"
    for name in names:
        difference = (logits(os.path.join(exports, name)) - logits(os.path.join(originals, name))).abs().max().item()
        print(f"{name}: largest difference {difference:.2e}")
        far = max(far, difference)
    if far > 1e-5:
        sys.exit("logits of exports differ")


main()
