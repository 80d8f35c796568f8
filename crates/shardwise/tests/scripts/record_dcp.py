"""Records small checkpoints of PyTorch with entries and metadata that are out of the ordinary.

    record_dcp.py DIR    writes DIR/odd, DIR/odd.pt, DIR/old_metadata, DIR/bare_metadata, DIR/overlap, DIR/transformed, DIR/fp8

Run again only to change what they contain: tests compare against the values written here."""

import argparse
import io
import json
import os
import pickle
import shutil
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


def odd():
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "step": 7,
        "raw": b"\x00\x01\xfe\xff",
        "buffer": bytearray(b"abc\xff"),
        "file": io.BytesIO(b"in memory"),
        "names": {"a", "b"},
        "args": argparse.Namespace(lr=0.1),
        "big": 1 << 80,
        "number": complex(1, 2),
        "complex": torch.ones(2, dtype=torch.complex128),
        "sparse": torch.eye(2).to_sparse(),
        "by_pair": {(0, 1): 2},
        "optimizer": {"lr": 0.5, "state": [torch.ones(2), {"tag": object}]},
    }


def save(state, path):
    shutil.rmtree(path, ignore_errors=True)
    dcp.save(state, checkpoint_id=path, no_dist=True)


def edit(path, change):
    name = os.path.join(path, ".metadata")
    with open(name, "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(name, "wb") as file:
        pickle.dump(metadata, file)


def main(directory):
    os.makedirs(directory, exist_ok=True)
    # Checkpoints contain the path that they were saved to.
    os.chdir(directory)
    entries = odd()
    # PyTorch's planner cannot save sparse tensors; a file of torch.save has them.
    save({key: value for key, value in entries.items() if key != "sparse"}, "odd")
    torch.save(entries, "odd.pt")

    plain = {"weight": torch.arange(8.0).reshape(4, 2), "step": 3}

    def older(metadata):
        for item in metadata.state_dict_metadata.values():
            if hasattr(item, "properties"):
                new = item.properties
                item.properties = OldProperties(dtype=new.dtype, requires_grad=new.requires_grad)
                item.properties.__class__ = OldProperties

    save(plain, "old_metadata")
    edit("old_metadata", older)

    def bare(metadata):
        for name in ["planner_data", "storage_meta", "version"]:
            metadata.__dict__.pop(name, None)
        for info in metadata.storage_data.values():
            info.__dict__.pop("transform_descriptors", None)

    save(plain, "bare_metadata")
    edit("bare_metadata", bare)

    def overlapping(metadata):
        item = metadata.state_dict_metadata["weight"]
        item.size = torch.Size([6, 2])
        (index, info), = [(i, s) for i, s in metadata.storage_data.items() if i.fqn == "weight"]
        chunk = item.chunks[0]
        item.chunks.append(ChunkStorageMetadata(offsets=torch.Size([2, 0]), sizes=chunk.sizes))
        metadata.storage_data[type(index)("weight", torch.Size([2, 0]), 1)] = info

    save(plain, "overlap")
    edit("overlap", overlapping)

    def transformed(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "weight":
                info.transform_descriptors = ["stream.zstd.1"]

    save(plain, "transformed")
    edit("transformed", transformed)

    # A weight of 5 x 7 in blocks of 2 x 3, with what PyTorch's reader makes of all of it.
    os.makedirs("fp8", exist_ok=True)
    torch.manual_seed(3)
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3) + 0.5
    whole = weight.float() * scales.repeat_interleave(2, 0)[:5].repeat_interleave(3, 1)[:, :7]
    save_file({"proj.weight": weight, "proj.weight_scale_inv": scales}, "fp8/model.safetensors")
    with open("fp8/expected.json", "w") as file:
        json.dump(whole.tolist(), file)


if __name__ == "__main__":
    main(sys.argv[1])
