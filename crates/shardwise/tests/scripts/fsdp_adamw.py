"""Trains a small network with FSDP2 and AdamW on two processes (gloo), with checkpoints of PyTorch's distributed checkpoint.

    fsdp_adamw.py write DIR    trains three steps, saves to DIR/checkpoint, takes a fourth step, and saves to DIR/next.pt
                               inputs, targets, and the parameters and buffers after it
    fsdp_adamw.py read DIR     loads DIR/checkpoint, which may be from elsewhere, takes a step, and saves to DIR/read.pt

Exits with 77 if there is no PyTorch that can do it."""

import os
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing as mp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError as error:
    print(error)
    sys.exit(77)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # No bias: a batch norm takes it away, and its gradient would be rounding errors, which AdamW makes as large as others.
        self.inp = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.inp(x))))


def whole(state):
    def full(tensor):
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    return {name: full(tensor) for name, tensor in state.items()}


def run(rank, mode, directory, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(7)
    model = Net()
    x, y = torch.randn(16, 6), torch.randn(16, 3)
    for layer in (model.inp, model.out, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)

    def step():
        # Both processes have the same batch: the mean of their gradients is the gradient.
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    checkpoint = os.path.join(directory, "checkpoint")
    if mode == "write":
        for _ in range(3):
            step()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=checkpoint)
        step()
    else:
        for group in optimizer.param_groups:
            group["lr"] = 5.0  # what is loaded counts
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optim": of_optimizer}
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step()
    after = whole(get_state_dict(model, optimizer)[0])
    if rank == 0:
        name = "next.pt" if mode == "write" else "read.pt"
        torch.save({"x": x, "y": y, "model": after}, os.path.join(directory, name))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(run, args=(sys.argv[1], sys.argv[2], os.path.join(scratch, "rendezvous")), nprocs=2)
