"""Writes tests/data/gguf/encoders/*.gguf: encoders with their tokenizers, converted by llama.cpp's own `convert_hf_to_gguf.py`.

`bert` is the model directory of that name; what transformers computes for it is in its cases.json. Its pooling is that of the
first token, so that one that is not read shows. `distilbert` has no token types, and no tokenizer in the file.

Run with a Python that has torch, transformers and numpy, and a checkout of llama.cpp:

    python gguf_encoders.py /path/to/llama.cpp tests/conformance/data/models tests/data/gguf/encoders
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

llama_cpp, models, target = (Path(argument) for argument in sys.argv[1:4])
os.environ["NO_LOCAL_GGUF"] = "1"
sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]

import conversion  # noqa: E402
import gguf  # noqa: E402
import torch  # noqa: E402
from conversion.base import ModelBase  # noqa: E402


def main():
    target.mkdir(parents=True, exist_ok=True)
    for name in ("bert", "distilbert"):
        with tempfile.TemporaryDirectory() as directory:
            directory = Path(directory) / name
            shutil.copytree(models / name, directory)
            modules = [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
            (directory / "modules.json").write_text(json.dumps(modules))
            (directory / "1_Pooling").mkdir()
            pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
            (directory / "1_Pooling/config.json").write_text(json.dumps(pooling))
            params = ModelBase.load_hparams(directory, False)
            kind = conversion.get_model_class(params["architectures"][0])
            if not (directory / "tokenizer.json").exists():
                kind.set_vocab = lambda self: (self.gguf_writer.add_tokenizer_model("none"),
                                               self.gguf_writer.add_token_type_count(1))
            # The converter knows tokenizers by a hash; this is the name for BERT.
            kind.get_vocab_base_pre = lambda self, tokenizer: "jina-v2-en"
            with torch.inference_mode():
                kind(directory, gguf.LlamaFileType.ALL_F32, target / f"{name}.gguf", eager=True).write()


main()
