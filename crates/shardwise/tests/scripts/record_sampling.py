"""Records what transformers' logits processors leave of random logits, for tests/models/sampling.rs.

    python record_sampling.py > ../data/sampling.jsonl
"""

import json

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.8},
    {"temperature": 0.3, "min_p": 0.02, "repetition_penalty": 1.1},
]

torch.manual_seed(5)
for number, settings in enumerate(SETTINGS):
    for vocabulary in (7, 64):
        logits = torch.randn(1, vocabulary) * 3
        seen = torch.randint(0, vocabulary, (1, 5))
        processors = LogitsProcessorList()
        if "repetition_penalty" in settings:
            processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
        if "temperature" in settings:
            processors.append(TemperatureLogitsWarper(settings["temperature"]))
        if "top_k" in settings:
            processors.append(TopKLogitsWarper(settings["top_k"]))
        if "top_p" in settings:
            processors.append(TopPLogitsWarper(settings["top_p"]))
        if "min_p" in settings:
            processors.append(MinPLogitsWarper(settings["min_p"]))
        left = processors(seen, logits.clone())
        print(
            json.dumps(
                {
                    "settings": settings,
                    "logits": logits[0].tolist(),
                    "seen": seen[0].tolist(),
                    "probabilities": left.softmax(-1)[0].tolist(),
                }
            )
        )
