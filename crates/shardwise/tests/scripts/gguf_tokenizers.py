"""Writes tests/data/gguf/tokenizers/*.gguf: files with the tokenizers of small model directories and one small tensor, and
cases.json: texts with the tokens that the `tokenizers` library gives for the original `tokenizer.json`.

Run with a Python that has `gguf`, `tokenizers` and numpy, and a directory of model directories (llama_gqa, llama_rope3, gpt2,
qwen2, mistral): python gguf_tokenizers.py MODELS tests/data/gguf/tokenizers
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer

# The name of the pre-tokenizer in llama.cpp; none for SentencePiece.
PRE = {"llama_gqa": "smollm", "llama_rope3": "llama-bpe", "gpt2": "gpt-2", "qwen2": "qwen2", "mistral": None}
TEXTS = ["Hello world", " a  b\n\nc\t1234567 and 12,345.6", "It's they'LL; naïve café – 東京 🙂", "", "x" * 40, "<|im_start|>user\nhi<|im_end|>",
         "def f(x):\n    return x**2  # 10%"]


def main(models, target):
    target.mkdir(parents=True, exist_ok=True)
    cases = {}
    for name, pre in PRE.items():
        text = (models / name / "tokenizer.json").read_text(encoding="utf-8")
        saved, original = json.loads(text), Tokenizer.from_str(text)
        settings = json.loads((models / name / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokens = [original.id_to_token(i) for i in range(original.get_vocab_size())]
        special = {token["id"] for token in saved["added_tokens"]}
        unknown = saved["model"]["unk_token"]

        def kind(i):
            token = tokens[i]
            if token == unknown:
                return gguf.TokenType.UNKNOWN
            if i in special:
                return gguf.TokenType.CONTROL
            is_byte = pre is None and len(token) == 6 and token.startswith("<0x")
            return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL

        writer = gguf.GGUFWriter(target / f"{name}.gguf", "llama")
        writer.add_block_count(0)
        writer.add_context_length(512)
        writer.add_embedding_length(2)
        writer.add_feed_forward_length(2)
        writer.add_head_count(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("llama" if pre is None else "gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([kind(i) for i in range(len(tokens))])
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["model"]["merges"]]
        if pre is None:
            # As SentencePiece trains: earlier merges have higher scores, and other pieces none.
            rank = {merge.replace(" ", ""): i for i, merge in reversed(list(enumerate(merges)))}
            writer.add_token_scores([-float(rank.get(token, 0)) for token in tokens])
        else:
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges(merges)
        ids = {token: i for i, token in enumerate(tokens)}
        for key, add in [("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id),
                         ("unk_token", writer.add_unk_token_id), ("pad_token", writer.add_pad_token_id)]:
            if settings.get(key) in ids:
                add(ids[settings[key]])
        if "chat_template" in settings:
            writer.add_chat_template(settings["chat_template"])
        writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 2), dtype=np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        recorded = json.loads((models / name / "cases.json").read_text(encoding="utf-8"))["text_cases"]
        texts = [case["text"] for case in recorded] + TEXTS
        cases[name] = []
        for text in texts:
            encoded = original.encode(text).ids
            cases[name].append({"text": text, "ids": encoded, "decoded": original.decode(encoded)})
    (target / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")


main(Path(sys.argv[1]), Path(sys.argv[2]))
