"""Writes tests/data/gguf/blocks.gguf, random blocks of every type, and blocks_f32.gguf, what the `gguf` package reads of them.

Run with a Python that has `gguf` (PyPI) and numpy: python gguf_blocks.py tests/data/gguf
"""

import sys
from pathlib import Path

import gguf
import numpy as np

# The package has the size of an early version, with scales of 32 bits.
gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_1] = (32, 36)
ROWS, COLUMNS = 2, 512
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"]
# Where the half floats of a block begin, in bytes: random bits there would be NaN or infinite.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q8_1": [0, 2],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q8_K": [],
}


def expected(name, blocks):
    """The elements of blocks: by the package, or by definition for two types that it only writes."""
    if name == "Q8_1":
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return scale * blocks[:, 4:].copy().view(np.int8).astype(np.float32)
    if name == "Q8_K":
        scale = blocks[:, :4].copy().view(np.float32)
        return scale * blocks[:, 4:260].copy().view(np.int8).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    return gguf.quants.dequantize(blocks, kind)


def main(directory):
    rng = np.random.default_rng(0)
    stored = gguf.GGUFWriter(directory / "blocks.gguf", "llama")
    plain = gguf.GGUFWriter(directory / "blocks_f32.gguf", "llama")
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        count = ROWS * COLUMNS // elements
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
        for at in HALVES[name]:
            halves = rng.normal(0, 0.05, (count, 1)).astype(np.float16)
            blocks[:, at : at + 2] = halves.view(np.uint8)
        if name == "Q8_K":
            blocks[:, :4] = rng.normal(0, 0.05, (count, 1)).astype(np.float32).view(np.uint8)
        stored.add_tensor(name, blocks.reshape(ROWS, -1), raw_dtype=kind)
        values = expected(name, blocks).reshape(ROWS, COLUMNS).astype(np.float32)
        assert np.isfinite(values).all(), name
        plain.add_tensor(name, values)
    numbers = rng.normal(0, 1, (3, 5)).astype(np.float32)
    stored.add_tensor("F32", numbers)
    stored.add_tensor("F16", numbers.astype(np.float16))
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    stored.add_tensor("BF16", bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    stored.add_tensor("I32", np.arange(6, dtype=np.int32).reshape(1, 2, 3))
    plain.add_tensor("F32", numbers)
    plain.add_tensor("F16", numbers.astype(np.float16).astype(np.float32))
    plain.add_tensor("BF16", (bits.astype(np.uint32) << 16).view(np.float32))
    stored.add_array("test.names", ["a", "ä", ""])
    stored.add_array("test.sizes", [3, 1, 2])
    stored.add_float32("test.epsilon", 1e-5)
    stored.add_bool("test.flag", True)
    for writer in (stored, plain):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
