"""Compares a Hugging Face directory of SmolLM2 with recorded values, by transformers: python hf_logits.py DIRECTORY CASES

Prints one line per case, or `skipped` if transformers is not installed; ends with an error at the first difference.
"""

import json
import sys

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

directory, cases = sys.argv[1], json.load(open(sys.argv[2], encoding="utf-8"))
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
for case in cases["cases"]:
    ids = torch.tensor(case["input_ids"])
    assert tokenizer(case["text"], add_special_tokens=False)["input_ids"] == case["input_ids"][0], case["id"]
    if case["messages"]:
        text = tokenizer.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
        assert text == case["text"], text
    with torch.no_grad():
        # The greedy tokens are those that the best logits choose one position earlier.
        logits = model(torch.cat([ids, torch.tensor([case["greedy"]])], 1)).logits[0, ids.shape[1] - 1 : -1]
    best = logits[0].topk(10)
    error = (best.values - torch.tensor(case["top10_logits"]["data"])).abs().max().item()
    assert best.indices.tolist() == case["top10_ids"] and error < 3e-4, (case["id"], error)
    assert logits.argmax(-1).tolist() == case["greedy"], case["id"]
    print(f"{case['id']}: logits within {error:.1e}, {len(case['greedy'])} greedy tokens equal")
