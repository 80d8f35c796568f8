"""The cases of the claims in PyTorch, on processes with gloo; `compare-claims` runs them.

Each function of `CASES` is one rank of a case and has the name of our claim. It returns "right", perhaps with what was seen, or "wrong: ..."; an
exception is PyTorch's answer as well, and a case that does not end is a hang.
"""

import contextlib
import inspect
import io
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

RANKS = 4
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def line():
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))


def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def same(found, expected, what=""):
    found = found.full_tensor() if isinstance(found, DTensor) else found
    if found.shape != expected.shape:
        return f"wrong: {what}shape {list(found.shape)} instead of {list(expected.shape)}"
    differing = (found != expected).sum().item()
    return f"wrong: {what}{differing} of {expected.numel()} elements differ" if differing else "right"


def close(found, expected, tolerance, what=""):
    found = found.full_tensor() if isinstance(found, DTensor) else found
    distance = (found - expected).abs().max().item()
    return "right" if distance <= tolerance else f"wrong: {what}off by {distance:.2g}"


def first_wrong(verdicts):
    return next((verdict for verdict in verdicts if not verdict.startswith("right")), "right")


def all_reduced(number):
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    return total.item()


@case
def nested_shards():
    verdicts = []
    for rows in range(1, 10):
        mesh = square()
        mesh._flatten("all")
        whole = torch.arange(rows * 3.0).reshape(rows, 3)
        x = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
        verdicts.append(same(x.redistribute(placements=[Replicate(), Replicate()]).to_local(), whole, f"{rows} rows: "))
    return first_wrong(verdicts)


@case
def view_of_columns():
    whole = torch.arange(96.0).reshape(12, 8)
    return same(distribute_tensor(whole, line(), [Shard(1)]).view(-1, 6), whole.view(-1, 6))


@case
def view_over_two_axes():
    whole, weight = torch.arange(64.0).reshape(2, 8, 4), torch.arange(64.0).reshape(2, 8, 4) % 7
    x = distribute_tensor(whole, square(), [Shard(1), Shard(1)]).requires_grad_()
    flat = x.view(16, 4)
    y = flat.view(2, 8, 4)
    verdicts = [same(flat, whole.view(16, 4), "flat: "), same(y, whole)]
    (y * distribute_tensor(weight, square(), [Shard(1), Shard(1)])).sum().backward()
    return first_wrong([*verdicts, same(x.grad, weight, "gradient: ")])


@case
def random_numbers():
    torch.manual_seed(7)
    plain, verdicts = torch.randn(6, 8), []
    for placement in (Replicate(), Shard(0), Shard(1)):
        torch.manual_seed(7)
        x = nn.init.normal_(distribute_tensor(torch.empty(6, 8), line(), [placement]))
        verdicts.append(same(x, plain, f"on CPUs, where a warning says that support is not complete, {placement}: "))
    return first_wrong(verdicts)


@case
def training_loss():
    def loss_after_steps(placement):
        mesh = line()
        torch.manual_seed(3)
        w = distribute_tensor(torch.empty(8, 8), mesh, [placement])
        nn.init.normal_(w)
        x = distribute_tensor(torch.arange(128.0).reshape(16, 8) / 64 - 1, mesh, [Replicate()])
        for _ in range(3):
            w = w.detach().requires_grad_()
            loss = F.dropout(torch.tanh(x @ w), 0.3, True).square().mean()
            loss.backward()
            w = w - 0.1 * w.grad
        return loss.full_tensor().detach()

    one = loss_after_steps(Replicate())
    return first_wrong([close(loss_after_steps(p), one, 1e-5, f"on CPUs, as above, the loss with weights {p}: ") for p in (Shard(0), Shard(1))])


@case
def partial_gradients():
    mesh = line()

    def gradient(through_local):
        x = distribute_tensor(torch.arange(1.0, 9.0), mesh, [Shard(0)]).requires_grad_()
        y = (x * x).sum()
        if through_local:
            y = DTensor.from_local(y.to_local(), mesh, y.placements)
        (y * y).backward()
        return x.grad.full_tensor()

    return same(gradient(True), gradient(False), "gradient: ")


@case
def partial_sums():
    mesh, x, w, b = line(), torch.arange(32.0).reshape(4, 8), torch.ones(8, 2), torch.arange(2.0)
    y = distribute_tensor(x, mesh, [Shard(1)]) @ distribute_tensor(w, mesh, [Shard(0)])
    db = distribute_tensor(b, mesh, [Replicate()]).requires_grad_()
    z = y + db
    z.sum().backward()
    term = DTensor.from_local(torch.full((2,), float(dist.get_rank())), mesh, [Partial()])
    return first_wrong([
        same(z, x @ w + b, "sum with a replicated tensor: "),
        same(db.grad, torch.full((2,), 4.0), "gradient: "),
        same(y + torch.tensor(10.0), x @ w + 10, "sum with a scalar: "),
        same(y + 10, x @ w + 10, "sum with a number: "),
        "right" if not torch.equal((-5 * term).full_tensor(), (2 * term).full_tensor()) else "wrong: -5 x == 2 x",
        "right" if not bool((-5 * term == 2 * term).all()) else "wrong: (-5 x == 2 x).all() is true",
    ])


@case
def uneven_from_local():
    part = lambda rank: (torch.arange(2 * (2 + rank)) + 0.125 * rank).reshape(2, -1)
    x = DTensor.from_local(part(dist.get_rank()), line(), [Shard(1)], run_check=True, shape=(2, 14), stride=(14, 1))
    return same(x, torch.cat([part(rank) for rank in range(RANKS)], 1))


@case
def offsets():
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for size in range(1, 10):
        whole = torch.arange(float(size))
        x = distribute_tensor(whole, square(), [Shard(0), Shard(0)])
        shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
        local = x.to_local()
        wrong = shape[0] != local.numel() or not torch.equal(whole[offset[0] : offset[0] + shape[0]], local)
        empty = local.numel() == 0 and offset[0] < size
        if total := all_reduced(wrong or empty):
            return f"wrong: {size} elements: the offsets of {int(total)} ranks are not those of their parts"
    return "right"


def strided(layouts):
    from torch.distributed.tensor.placement_types import _StridedShard

    verdicts, mesh, r = [], square(), Replicate()
    for size in range(1, 13):
        for split in range(1, 5):
            for placements in layouts(_StridedShard(0, split_factor=split)):
                try:
                    x = distribute_tensor(torch.arange(float(size)), mesh, [r, r]).redistribute(placements=placements)
                    verdicts.append(same(x, torch.arange(float(size)), f"{size} elements, {tuple(placements)}: "))
                except RuntimeError as error:
                    raise RuntimeError(f"{size} elements, {tuple(placements)}: {error}") from error
                if verdicts[-1] != "right":
                    return verdicts[-1]
    return "right"


@case
def strided_shards():
    return strided(lambda s: ([Replicate(), s], [s, Replicate()]))


@case
def nested_strided_shards():
    return strided(lambda s: ([s, Shard(0)], [s, s]))


@case
def redistribution_costs():
    from torch.distributed.tensor._collective_utils import redistribute_cost
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    dist.destroy_process_group()
    fake_world(16)
    mesh = init_device_mesh("cpu", (2, 2, 2, 2))
    meta = TensorMeta(torch.Size([64, 64]), (64, 1), torch.float32)
    s, r = Shard, Replicate()
    source, between, target = (
        DTensorSpec(mesh, tuple(p), tensor_meta=meta)
        for p in ([r, s(0), r, r], [s(1), s(0), s(1), s(1)], [s(1), r, s(1), s(1)])
    )
    direct, first, second = (
        redistribute_cost(a, b) for a, b in ((source, target), (source, between), (between, target))
    )
    verdict = "right" if direct <= first + second else "wrong"
    return f"{verdict}: {direct:.2f} directly, {first:.2f} + {second:.2f} over a layout between"


def fake_world(ranks):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


@case
def redistribution_memory():
    mesh, n = square(), 512
    x = distribute_tensor(torch.arange(float(n * n)).reshape(n, n), mesh, [Shard(0), Shard(1)])
    expected, largest = torch.arange(float(n * n)).reshape(n, n), 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not isinstance(result, DTensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with CommDebugMode() as calls, Largest():
        y = x.redistribute(placements=[Shard(1), Shard(0)])
    names = sorted(str(name).split(".")[-1] for name in calls.get_comm_counts())
    times = largest / (n * n)  # a shard is a quarter of 4 n n bytes
    verdict = first_wrong([same(y, expected), "right" if times <= 1 else "wrong"])
    return f"{verdict}: {' and '.join(names)}; the largest tensor between is {times:g} shards"


@case
def planning_time():
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

    rank = dist.get_rank()
    dist.destroy_process_group()
    fake_world(256)
    times = []
    for axes in range(2, 8):
        if rank == 0:
            mesh = init_device_mesh("cpu", (2,) * axes + (256 >> axes,))
            meta = TensorMeta(torch.Size([512, 512]), (512, 1), torch.float32)
            source = DTensorSpec(mesh, (Shard(0),) * (axes + 1), tensor_meta=meta)
            target = DTensorSpec(mesh, (Shard(1),) * axes + (Replicate(),), tensor_meta=meta)
            since = time.perf_counter()
            _gen_transform_infos_non_cached(source, target, use_graph_based_transform=True)
            times.append(time.perf_counter() - since)
            if times[-1] > 1:
                break
    if rank > 0:
        return None
    shown = ", ".join(f"{1e3 * t:.0f} ms" for t in times)
    return f"{'right' if times[-1] < 1 else 'wrong'}: the graph-based planner took {shown} for 3 to {2 + len(times)} axes"


class Scale(nn.Module):
    """One replicated weight, to which every tensor-parallel rank contributes another term of the gradient."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))

    def forward(self, terms):
        return (DTensor.from_local(terms, self.mesh, [Shard(0)]) * self.weight).sum(0).full_tensor()


@case
def reduction_type():
    mesh = square()
    model = Scale(mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    # 256 and 1 add up to 257, which bf16 does not have.
    terms = torch.full((1, 4), [256.0, 1.0][mesh["tp"].get_local_rank()], dtype=torch.bfloat16)
    model(terms).sum().backward()
    return same(model.weight.grad, torch.full((4,), 257.0), "the gradient 256 + 1 is reduced in bf16: ")


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, both):
        return self.first(x) + self.second(x) if both else self.first(x)


@case
def mixed_accumulation():
    torch.manual_seed(0)
    model = Two()
    with torch.no_grad():
        [weight.fill_(1.0) for weight in model.parameters()]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=line(), mp_policy=policy)
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(torch.full((1, 4), 3.0), last).sum().backward()
    return first_wrong([
        same(model.first.weight.grad, torch.full((4, 4), 6.0), "first: "),
        same(model.second.weight.grad, torch.full((4, 4), 3.0), "second: "),
    ])


@case
def other_dimensions():
    model = nn.Linear(5, 8, bias=False)
    fully_shard(model, mesh=line(), shard_placement_fn=lambda _: Shard(1))
    model(torch.ones(2, 5)).sum().backward()
    return same(model.weight.grad, torch.full((8, 5), 2.0))


@case
def clipping():
    a = nn.Parameter(distribute_tensor(torch.ones(8), line(), [Shard(0)]))
    b = nn.Parameter(distribute_tensor(torch.ones(8), square(), [Shard(0), Replicate()]))
    ((a * 3).sum().full_tensor() + (b * 4).sum().full_tensor()).backward()
    norm = nn.utils.clip_grad_norm_([a, b], 1.0)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return close(norm, torch.tensor(200.0).sqrt(), 1e-4)


@case
def readable_errors():
    mesh = square()
    x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Replicate()])
    w = distribute_tensor(torch.ones(5, 8), mesh, [Replicate(), Shard(1)])
    try:
        x @ w
    except Exception as error:
        text = str(error)
    named = all(part in text for part in ("[4, 6]", "[5, 8]", "S(0)", "S(1)", "dp", "tp"))
    return f"{'right' if named else 'wrong'}: {' '.join(text.split())}"


@case
def different_sizes():
    size = 12 if dist.get_rank() == 0 else 1
    dist.all_gather([torch.zeros(size) for _ in range(RANKS)], torch.full((size,), float(dist.get_rank())))
    return f"wrong: no error, and the next all-reduce of ones is {all_reduced(1):g}"


@case
def different_calls():
    if dist.get_rank() == 1:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(3))
    return "wrong: no error"


@case
def full_state():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=line())
    options = inspect.signature(StateDictOptions).parameters
    chosen = {"ranks_only": (2,)} if "ranks_only" in options else {}
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True, **chosen))
    has = [all_reduced(bool(state) and dist.get_rank() == rank) for rank in range(RANKS)]
    holders = [rank for rank in range(RANKS) if has[rank]]
    return "right" if holders == [2] else f"wrong: there is no option for a rank; with cpu_offload, ranks {holders} have it"


@case
def hidden_gathers():
    x, w = torch.arange(12.0).reshape(2, 2, 3), torch.ones(3, 1)
    dx, dw = distribute_tensor(x, square(), [Shard(0), Shard(1)]), distribute_tensor(w, square(), [Replicate()] * 2)
    with CommDebugMode() as calls:
        y = torch.matmul(dx, dw)
    count = calls.get_total_counts()
    return first_wrong([same(y, x @ w), f"wrong: {count} collectives for a product of rows that every rank has" if count else "right"])


@case
def nine_heads():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(36, 36, bias=False) for _ in range(4))

        def forward(self, x):
            split = lambda y: y.view(2, 5, -1, 4).transpose(1, 2)
            y = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)))
            return self.o(y.transpose(1, 2).reshape(2, 5, -1))

    torch.manual_seed(1)
    model, x = Attention(), torch.arange(360.0).reshape(2, 5, 36).sin()
    expected = model(x).detach()
    plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
    parallelize_module(model, line(), plan)
    return close(model(x).detach(), expected, 1e-5)


@case
def muon():
    torch.manual_seed(4)
    whole, gradient = torch.randn(8, 12), torch.randn(8, 12)

    def stepped(weight, gradient):
        weight = nn.Parameter(weight)
        weight.grad = gradient
        with CommDebugMode() as calls:
            torch.optim.Muon([weight], lr=0.1).step()
        return weight.detach(), calls.get_total_counts()

    one, _ = stepped(whole.clone(), gradient.clone())
    update, off, most = (one - whole).abs().max(), 0.0, 0
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        found, count = stepped(*(distribute_tensor(x.clone(), square(), placements) for x in (whole, gradient)))
        off, most = max(off, ((found.full_tensor() - one).abs().max() / update).item()), max(most, count)
    verdict = "right" if off == 0 and most <= 1 else "wrong"
    return f"{verdict}: off by up to {100 * off:.1f} % of the largest update (the iterations are in bf16), with up to {most} collectives per matrix"


@case
def head_gathers():
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 32, bias=False)

        def forward(self, x):
            x = self.body(x)
            chunk = lambda part: F.linear(part, self.head.weight).logsumexp(-1).sum()
            return sum(checkpoint(chunk, part, use_reentrant=False) for part in x.chunk(8))

    model = Model()
    fully_shard(model, mesh=line(), reshard_after_forward=True)
    x = torch.arange(512.0).reshape(64, 8).sin()
    with CommDebugMode() as calls:
        model(x).backward()
    gathers = sum(count for name, count in calls.get_comm_counts().items() if "gather" in str(name))
    return f"{'right' if gathers <= 2 else 'wrong'}: {gathers} all-gathers for 8 chunks"


@case
def experts():
    import accelerate  # noqa: F401, which transformers needs for this
    import transformers
    from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    text = dict(vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
                num_key_value_heads=4, head_dim=4, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=4, out_hidden_size=16, deepstack_visual_indexes=[0], num_position_embeddings=16)
    rank = dist.get_rank()
    directory = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(directory)
    if rank == 0:
        config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
        AutoModelForImageTextToText.from_config(config).save_pretrained(directory[0])
    dist.barrier()
    load = lambda **options: AutoModelForImageTextToText.from_pretrained(directory[0], **options)
    load()
    try:
        model = load(distributed_config=DistributedConfig(tp_size=RANKS))
    except RuntimeError as error:
        raise RuntimeError(f"transformers {transformers.__version__} loads the model, but not with tp_size=4: {error}") from error
    weights = [p for name, p in model.named_parameters() if ".experts." in name]
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in weights)
    total = 8 * 3 * 8 * 16
    verdict = "right" if local * RANKS <= total else "wrong"
    return f"{verdict}: with transformers {transformers.__version__} a rank holds {local} of {total} elements of experts"


@case
def gathered_types():
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(RANKS)])
    verdicts = []
    for dtype, value in ((torch.float64, 1 + 2.0**-40), (torch.int64, 2**40 + 1)):
        x = sharded_tensor.full(spec, (8, 2), value, dtype=dtype)
        out = torch.zeros(8, 2, dtype=dtype) if dist.get_rank() == 0 else None
        x.gather(0, out)
        if dist.get_rank() == 0:
            verdicts.append(same(out, torch.full((8, 2), value, dtype=dtype), f"{dtype}: "))
    return first_wrong(verdicts)


@case
def sharded_optimizer_state():
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharded_optim import ShardedOptimizer
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(RANKS)])
    optimizer = ShardedOptimizer({"w": sharded_tensor.ones(spec, (8, 2))}, torch.optim.SGD, lr=0.1)
    optimizer.state_dict()
    return "right"


def answer(name):
    """What one rank saw, as one line."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return CASES[name]()
    except ModuleNotFoundError as error:
        return f"not run: {error}"
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"error: {type(error).__name__}: {lines[0].strip() if lines else ''}"
