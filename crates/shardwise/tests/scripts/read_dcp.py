"""Loads a distributed checkpoint with PyTorch and prints what it holds as JSON: tensors as hexadecimal bytes by flat key,
and values at the end of their paths. Exits with 77 if there is no PyTorch."""

import json
import math
import sys

try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
except ImportError as error:
    print(error)
    sys.exit(77)


def hexadecimal(tensor):
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()).hex() if flat.numel() else ""


def plain(value):
    if isinstance(value, tuple):
        return {"tuple": [plain(v) for v in value]}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {"map": {k: plain(v) for k, v in value.items()}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def at(state, path):
    for step in path:
        if not isinstance(state, list if isinstance(step, int) else dict):
            raise TypeError(f"{type(state)} at {step!r} of {path}")
        state = state[step]
    return state


directory = sys.argv[1]
metadata = FileSystemReader(directory).read_metadata()
items = metadata.state_dict_metadata.items()
sizes = {k: m for k, m in items if isinstance(m, TensorStorageMetadata)}

# Into tensors that exist, by flat key.
given = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in sizes.items()}
dcp.load(given, checkpoint_id=directory, no_dist=True)

# Into nothing: the state is put together from the paths.
nested = {}
_load_state_dict(nested, storage_reader=FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
for key, tensor in given.items():
    other = at(nested, metadata.planner_data[key])
    if hexadecimal(other) != hexadecimal(tensor) or other.shape != tensor.shape or other.dtype != tensor.dtype:
        raise ValueError(f"{key} differs between two ways to load it")

described = {
    k: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "bytes": hexadecimal(t)}
    for k, t in given.items()
}
values = {k: plain(at(nested, metadata.planner_data[k])) for k, m in items if k not in sizes}
print(json.dumps({"tensors": described, "values": values}))
