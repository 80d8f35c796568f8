"""Answers the calls of the attack suite (`tests/operators/attack`) with PyTorch's values: reads one call per line as JSON, writes one
answer per line. Exits with 77 if there is no PyTorch.

Inputs are computed from their seeds, bit by bit as `tests/operators/attack/numbers.rs` does.

An answer holds, per output and per gradient, PyTorch's type and shape, and at sampled positions the expected value and how far
a result may be from it. The expected value is that of the same call in f64 on the exactly converted inputs, and the distance
follows from the arithmetic:

* `exact`: data movement, comparisons, rounding to integers, integers. The value of PyTorch itself, no distance.
* `function`: functions element by element. One rounding of the result type, and two units in the last place of the type that is
  computed in (f32 for half types): 3 units of relative roundoff, in f64 twice that.
* `sum`: reductions and statistics, which accumulate in at least f32 and are rounded once: one rounding of the result type, and
  8 roundings of f32 (of f64 for f64) of every input, whose effect is measured by moving the inputs.
* `product`: the same, and the roundings of n partial sums in f32, which grow with the root of n.
* `steps`: operators that are made of others, and gradients: as for products, and two roundings of the result type on the way,
  or twice the largest error of PyTorch's own result in the same type. Neither library defines where these round.

What PyTorch itself gives in the type of the call is never wrong. f64 has no wider type to compare with: its distances are those
of f64 arithmetic, 32 times as wide because PyTorch's own cancellation is in the expected value.

Roundings on the way count by their effect too: the call is made with the result of every operation moved (`Rounded`), which shows
digits that cancel in between although the result hardly depends on the inputs: a softmax of one element has the gradient 0, the
difference of two equal numbers. This holds for gradients of all but functions element by element, and for f64. Kernels of PyTorch
that are one operation are written out in `ACCURATE` for that.

Partial operands are terms 2x and -x of an element x (`numbers.rs`). An operator that sums its partial results rounds three times the
magnitude in the type of the result: `partial` has the distance of such settings.
"""

import json
import math
import sys

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map
except ImportError as error:
    print(error)
    sys.exit(77)

torch.set_num_threads(1)
U64 = np.uint64
DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.bool: "u8"}
# Bits of the significand, the exponent of the smallest normal number, and the largest number.
FORMATS = {
    torch.float64: (53, -1022, float(np.finfo(np.float64).max)),
    torch.float32: (24, -126, float(np.finfo(np.float32).max)),
    torch.float16: (11, -14, 65504.0),
    torch.bfloat16: (8, -126, 3.3895313892515355e38),
}


def mix(seed, i):
    z = U64(seed) + (i.astype(U64) + U64(1)) * U64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def bell(h):
    low = U64(0xFFFF)
    total = (h & low) + ((h >> U64(16)) & low) + ((h >> U64(32)) & low) + (h >> U64(48))
    return (total.astype(np.int64) - 131070).astype(np.float64) / 37837.0


def real(spec, n):
    i = np.arange(n, dtype=U64)
    h, kind, seed = mix(spec["seed"], i), spec["values"], spec["seed"]
    tiny, huge, largest, least = {
        "f16": (-14, 13, 65504.0, 2.0**-24),
        "bf16": (-126, 62, 3.3895313892515355e38, 2.0**-133),
        "f32": (-126, 62, float(np.finfo(np.float32).max), 2.0**-149),
        "f64": (-1000, 500, float(np.finfo(np.float64).max), 5e-324),
    }[spec["dtype"]]
    if kind == "unit":
        return bell(h)
    if kind == "six":
        return 6.0 * bell(h)
    if kind == "tiny":
        return bell(h) * 2.0**tiny
    if kind == "huge":
        return bell(h) * 2.0**huge
    if kind == "wide":
        return bell(h) * np.exp2((mix(seed ^ 1, i) % U64(21)).astype(np.float64) - 10.0)
    if kind == "whole":
        return ((h >> U64(40)) % U64(9)).astype(np.float64) - 4.0
    if kind == "positive":
        return np.abs(bell(h)) + 0.015625
    if kind == "probability":
        return ((h >> U64(44)).astype(np.float64) + 0.5) / 1048576.0
    if kind == "stairs":
        return i.astype(np.float64) * 0.75 - 4.0
    if kind == "special":
        other = mix(seed ^ 1, i)
        values = np.array(
            [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, -0.5, largest, -largest, least, -least], dtype=np.float64
        )
        chosen = values[((other >> U64(8)) % U64(13)).astype(np.int64)]
        return np.where(other % U64(4) == U64(0), chosen, 6.0 * bell(h))
    raise ValueError(kind)


def whole(spec, n):
    i = np.arange(n, dtype=U64)
    h, kind, dtype = mix(spec["seed"], i), spec["values"], spec["dtype"]
    bound = U64(max(spec["n"], 1))
    least, most = {"u8": (0, 255), "i32": (-(2**31), 2**31 - 1)}.get(dtype, (-(2**63), 2**63 - 1))
    if kind == "small":
        x = ((h >> U64(40)) % U64(17)).astype(np.int64) - (0 if dtype == "u8" else 8)
    elif kind == "bits":
        x = h.astype(np.int64)
    elif kind == "extreme":
        values = [least, most, 0, 1, -1, most - 1, least + 1, 9007199254740993, 2, 3]
        x = np.array(values, dtype=np.int64)[((h >> U64(16)) % U64(10)).astype(np.int64)]
    elif kind == "mask":
        x = ((h >> U64(33)) & U64(1)).astype(np.int64)
    elif kind == "index":
        x = ((h >> U64(32)) % bound).astype(np.int64)
    elif kind == "signed index":
        x = ((h >> U64(32)) % (bound * U64(2))).astype(np.int64) - spec["n"]
    elif kind == "turn":
        x = ((i // U64(spec["inner"])) % U64(spec["len"])).astype(np.int64)
        x = (x + spec["seed"] % 1000) % spec["n"]
    elif kind == "target":
        x = np.where(h % U64(8) == U64(0), -100, ((h >> U64(32)) % bound).astype(np.int64))
    else:
        raise ValueError(kind)
    return x.astype({"u8": np.uint8, "i32": np.int32}.get(dtype, np.int64))


def tensor(spec):
    n = math.prod(spec["shape"])
    dtype = DTYPES[spec["dtype"]]
    if not dtype.is_floating_point:
        return torch.from_numpy(whole(spec, n)).reshape(spec["shape"])
    values = real(spec, n)
    if dtype != torch.float64:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    return torch.from_numpy(values).to(dtype).reshape(spec["shape"])


def cotangent(seed, output, like):
    h = mix(seed ^ 0xC0DE ^ (output << 32), np.arange(like.numel(), dtype=U64))
    values = ((h >> U64(20)) % U64(17)).astype(np.float64) / 4.0 - 2.0
    return torch.from_numpy(values).reshape(like.shape).to(like.dtype)


def positions(n, samples, seed):
    if n <= samples:
        return np.arange(n)
    return (mix(seed ^ 0x5A5A, np.arange(samples, dtype=U64)) % U64(n)).astype(np.int64)


# ---- the operators -----------------------------------------------------------------------------------------------------


def number(value):
    return float(value) if isinstance(value, str) else value


def scalar(a, key="number"):
    """An integer where the number is one: PyTorch's result type depends on it."""
    value = a[key]
    return int(value) if value is not None and float(value).is_integer() else value


def dims_of(x, dims):
    """No dimensions means all of them."""
    return tuple(dims) if dims else tuple(range(x.dim()))


def extreme_all(f):
    def run(x, a):
        return f(x[0], dim=dims_of(x[0], a["dims"]), keepdim=a["keepdim"])

    return run


def truth(f):
    def run(x, a):
        if x[0].dim() == 0 and a["dims"]:
            torch.sum(x[0], dim=a["dims"])  # refuses dimensions that there are not
        return f(x[0] != 0, dim=dims_of(x[0], a["dims"]), keepdim=a["keepdim"])

    return run


def product(x, a):
    x, dims, keepdim = x[0], a["dims"], a["keepdim"]
    torch.sum(x, dim=dims)
    for d in sorted((d % max(x.dim(), 1) for d in dims_of(x, dims)), reverse=True):
        x = torch.prod(x, dim=d, keepdim=keepdim) if x.dim() else torch.prod(x)
    return x if x.is_floating_point() else x.to(torch.int64)


def count_nonzero(x, a):
    found = (x[0] != 0).to(torch.int64)
    return torch.sum(found, dim=dims_of(x[0], a["dims"]), keepdim=a["keepdim"])


def ordered(x, dim, descending):
    return torch.sort(x, dim=dim, descending=descending, stable=True)


def topk(x, a):
    torch.topk(x[0], a["k"], dim=a["dim"], largest=a["largest"])  # for its refusals
    values, indices = ordered(x[0], a["dim"], a["largest"])
    return values.narrow(a["dim"], 0, a["k"]), indices.narrow(a["dim"], 0, a["k"])


def kthvalue(x, a):
    torch.kthvalue(x[0], a["k"], dim=a["dim"], keepdim=a["keepdim"])
    values, indices = ordered(x[0], a["dim"], False)
    pair = values.narrow(a["dim"], a["k"] - 1, 1), indices.narrow(a["dim"], a["k"] - 1, 1)
    return pair if a["keepdim"] else tuple(t.squeeze(a["dim"]) for t in pair)


def argext(f):
    def run(x, a):
        return f(x[0], dim=a["dim"], keepdim=a["keepdim"] and a["dim"] is not None) if a["dim"] is not None else keep(f(x[0]), x[0], a)

    return run


def keep(value, x, a):
    return value.reshape([1] * x.dim()) if a["keepdim"] else value


def aminmax(x, a):
    if a["dim"] is None:
        least, most = torch.aminmax(x[0])
        return keep(least, x[0], a), keep(most, x[0], a)
    return tuple(torch.aminmax(x[0], dim=a["dim"], keepdim=a["keepdim"]))


def norm(x, a):
    return torch.linalg.vector_norm(x[0], number(a["order"]), dim=a["dims"] or None, keepdim=a["keepdim"])


def layer_norm(x, a):
    n = a["ndim"]
    if not 0 < n <= x[0].dim():
        raise RuntimeError("no such dimensions")
    return F.layer_norm(x[0], x[0].shape[-n:], *x[1:], eps=a["eps"])


def rms_norm(x, a):
    n = a["ndim"]
    if not 0 < n <= x[0].dim():
        raise RuntimeError("no such dimensions")
    return F.rms_norm(x[0], x[0].shape[-n:], *x[1:], eps=a["eps"])


def batch_norm(x, a):
    if a["given"]:
        return F.batch_norm(x[0], x[1].detach(), x[2].detach(), *x[3:], training=False, eps=a["eps"])
    return F.batch_norm(x[0], None, None, *x[1:], training=True, eps=a["eps"])


def pad(x, a):
    if any(n < 0 for n in a["border"]):
        raise RuntimeError("negative borders")
    return F.pad(x[0], a["border"], value=scalar(a))


def slice_of(x, a):
    if a["step"] <= 0:
        raise RuntimeError("step")
    dim = a["dim"]
    if not -x[0].dim() <= dim < x[0].dim():
        raise IndexError("dim")
    index = [slice(None)] * x[0].dim()
    index[dim] = slice(a["start"], a["end"], a["step"])
    return x[0][tuple(index)]


def index_put(x, a):
    return x[0].index_put(tuple(x[2:]), x[1], accumulate=a["accumulate"])


def bucketize(x, a):
    if not bool((x[1].diff() >= 0).all()):
        raise NotImplementedError("boundaries that are not sorted")
    return torch.bucketize(x[0], x[1])


def one_hot(x, a):
    return F.one_hot(x[0] if x[0].is_floating_point() else x[0].to(torch.int64), a["classes"])


def whole_quotient(x, a):
    if not (x[0].is_floating_point() or x[1].is_floating_point()):
        if bool((x[1] == -1).any()) and bool((x[0] == torch.iinfo(x[0].dtype).min).any()):
            raise NotImplementedError("a quotient that the type does not hold: the processor ends PyTorch")
    return torch.div(x[0], x[1], rounding_mode="trunc")


def cast(x, a):
    dtype = DTYPES[a["dtype"]]
    if x[0].is_floating_point() and not dtype.is_floating_point:
        ends, whole = torch.iinfo(dtype), x[0].to(torch.float64).trunc()
        if not bool(((whole >= ends.min) & (whole <= ends.max)).all()):
            raise NotImplementedError("numbers that the type does not hold")
    return x[0].to(dtype)


def embedding_bag(x, a):
    offsets = None if a["offsets"] is None else torch.tensor(a["offsets"])
    return F.embedding_bag(x[1], x[0], offsets, mode=a["mode"])


def classes(f):
    def run(x, a):
        smoothing = {"label_smoothing": a["smoothing"]} if f is F.cross_entropy else {}
        return f(x[0], x[1], reduction=a["reduction"], **smoothing)

    return run


def attention(x, a):
    mask = x[3] if len(x) > 3 else None
    shared = x[0].shape[1] != x[1].shape[1] if x[0].dim() == 4 and x[1].dim() == 4 else False
    return F.scaled_dot_product_attention(
        x[0], x[1], x[2], attn_mask=mask, is_causal=a["causal"], scale=a["scale"], enable_gqa=shared
    )


def rotary(x, a):
    x = x[0]
    length, size = x.shape[-2:]
    if size % 2 or not x.is_floating_point():
        raise RuntimeError("an odd number of features, or integers")
    half = size // 2
    frequency = torch.tensor([a["base"] ** (-2.0 * i / size) for i in range(half)], dtype=torch.float64)
    angle = (torch.arange(length, dtype=torch.float64) + a["first"])[:, None] * frequency[None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def conv(f):
    def run(x, a):
        bias = x[2] if len(x) > 2 else None
        return f(x[0], x[1], bias, a["stride"], a["padding"], a["dilation"], a["groups"])

    return run


def pool(f, spatial):
    def run(x, a):
        if x[0].dim() != spatial + 2:
            raise RuntimeError("dimensions")
        return f(x[0], a["kernel"], a["stride"], a["padding"])

    return run


def stacked(f):
    return lambda x, a: f(list(x), a["dim"])


def loss(f):
    def run(x, a):
        if x[0].shape != x[1].shape:
            torch.broadcast_shapes(x[0].shape, x[1].shape)
        return f(x[0], x[1], a)

    return run


EXACT, FUNCTION, SUM, PRODUCT, STEPS = "exact", "function", "sum", "product", "steps"
OPS = {}


def define(kind, table):
    for name, f in table.items():
        OPS[name] = (kind, f)


define(EXACT, {name: (lambda f: lambda x, a: f(x[0]))(getattr(torch, name)) for name in
    "neg abs sign relu floor ceil round trunc isnan isfinite isinf signbit logical_not".split()})
define(FUNCTION, {name: (lambda f: lambda x, a: f(x[0]))(getattr(torch, name)) for name in
    "square frac exp expm1 exp2 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan asin atan sinh cosh asinh tanh erf erfc "
    "sigmoid".split()})
define(FUNCTION, {
    "logsigmoid": lambda x, a: F.logsigmoid(x[0]),
    "softsign": lambda x, a: F.softsign(x[0]),
    "silu": lambda x, a: F.silu(x[0]),
    "mish": lambda x, a: F.mish(x[0]),
    "hardswish": lambda x, a: F.hardswish(x[0]),
    "gelu": lambda x, a: F.gelu(x[0]),
    "gelu_tanh": lambda x, a: F.gelu(x[0], approximate="tanh"),
    "leaky_relu": lambda x, a: F.leaky_relu(x[0], a["number"]),
    "softplus": lambda x, a: F.softplus(x[0], a["beta"], a["threshold"]),
    "pow_scalar": lambda x, a: torch.pow(x[0], scalar(a)),
    "clamp": lambda x, a: torch.clamp(x[0], scalar(a, "min"), scalar(a, "max")),
    "add_scalar": lambda x, a: x[0] + scalar(a),
    "sub_scalar": lambda x, a: x[0] - scalar(a),
    "rsub_scalar": lambda x, a: scalar(a) - x[0],
    "mul_scalar": lambda x, a: x[0] * scalar(a),
    "div_scalar": lambda x, a: x[0] / scalar(a),
    "nan_to_num": lambda x, a: torch.nan_to_num(x[0], a["nan"], a["posinf"], a["neginf"]),
    "pow": lambda x, a: torch.pow(x[0], x[1]),
    # PyTorch rounds quotients of half types before their fraction is dropped
    "div_trunc": whole_quotient,
    # exact in any type; PyTorch in f32 gives NaN where the quotient is large
    "fmod": lambda x, a: torch.fmod(x[0], x[1]),
    "atan2": lambda x, a: torch.atan2(x[0], x[1]),
    "hypot": lambda x, a: torch.hypot(x[0], x[1]),
    "div": lambda x, a: x[0] / x[1],
    "add": lambda x, a: x[0] + x[1],
    "sub": lambda x, a: x[0] - x[1],
    "mul": lambda x, a: x[0] * x[1],
    "masked_fill": lambda x, a: x[0].masked_fill(x[1] != 0, scalar(a)),
})
define(EXACT, {
    "div_floor": lambda x, a: torch.div(x[0], x[1], rounding_mode="floor"),
    "maximum": lambda x, a: torch.maximum(x[0], x[1]),
    "minimum": lambda x, a: torch.minimum(x[0], x[1]),
    "remainder": lambda x, a: torch.remainder(x[0], x[1]),
    "eq": lambda x, a: x[0] == x[1],
    "ne": lambda x, a: x[0] != x[1],
    "lt": lambda x, a: x[0] < x[1],
    "le": lambda x, a: x[0] <= x[1],
    "gt": lambda x, a: x[0] > x[1],
    "ge": lambda x, a: x[0] >= x[1],
    "logical_and": lambda x, a: torch.logical_and(x[0], x[1]),
    "logical_or": lambda x, a: torch.logical_or(x[0], x[1]),
    "logical_xor": lambda x, a: torch.logical_xor(x[0], x[1]),
    "bitwise_and": lambda x, a: torch.bitwise_and(x[0], x[1]),
    "bitwise_or": lambda x, a: torch.bitwise_or(x[0], x[1]),
    "bitwise_xor": lambda x, a: torch.bitwise_xor(x[0], x[1]),
    "where_cond": lambda x, a: torch.where(x[0] != 0, x[1], x[2]),
    "clamp_tensor": lambda x, a: torch.clamp(x[0], x[1], x[2]),
    "to_dtype": cast,
})
define(STEPS, {
    "elu": lambda x, a: F.elu(x[0], a["number"]),
    "addcmul": lambda x, a: torch.addcmul(x[0], x[1], x[2], value=scalar(a)),
    "addcdiv": lambda x, a: torch.addcdiv(x[0], x[1], x[2], value=scalar(a)),
    "lerp": lambda x, a: torch.lerp(x[0].expand(torch.broadcast_shapes(x[0].shape, x[1].shape)), x[1], a["weight"]),
})
define(SUM, {
    "sum": lambda x, a: torch.sum(x[0], dim=a["dims"], keepdim=a["keepdim"]),
    "mean": lambda x, a: torch.mean(x[0] if x[0].is_floating_point() else x[0].float(), dim=a["dims"], keepdim=a["keepdim"]),
    "prod": product,
    "logsumexp": lambda x, a: torch.logsumexp(x[0], dim=dims_of(x[0], a["dims"]), keepdim=a["keepdim"]),
    "var": lambda x, a: torch.var(x[0], dim=a["dims"] or None, correction=a["correction"], keepdim=a["keepdim"]),
    "std": lambda x, a: torch.std(x[0], dim=a["dims"] or None, correction=a["correction"], keepdim=a["keepdim"]),
    "norm": norm,
    "softmax": lambda x, a: torch.softmax(x[0], a["dim"]),
    "log_softmax": lambda x, a: torch.log_softmax(x[0], a["dim"]),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": lambda x, a: F.group_norm(x[0], a["groups"], *x[1:], eps=a["eps"]),
    "batch_norm": batch_norm,
    "cumsum": lambda x, a: torch.cumsum(x[0], a["dim"]),
    "cumprod": lambda x, a: torch.cumprod(x[0], a["dim"]),
})
define(EXACT, {
    "amax": extreme_all(torch.amax),
    "amin": extreme_all(torch.amin),
    "any": truth(torch.any),
    "all": truth(torch.all),
    "count_nonzero": count_nonzero,
    "sort": lambda x, a: ordered(x[0], a["dim"], a["descending"]),
    "argsort": lambda x, a: ordered(x[0], a["dim"], a["descending"])[1],
    "topk": topk,
    "kthvalue": kthvalue,
    "max_dim": lambda x, a: torch.max(x[0], dim=a["dim"], keepdim=a["keepdim"]),
    "min_dim": lambda x, a: torch.min(x[0], dim=a["dim"], keepdim=a["keepdim"]),
    "argmax": argext(torch.argmax),
    "argmin": argext(torch.argmin),
    "aminmax": aminmax,
    "cummax": lambda x, a: torch.cummax(x[0], a["dim"]),
    "cummin": lambda x, a: torch.cummin(x[0], a["dim"]),
    "permute": lambda x, a: x[0].permute(a["dims"]),
    "transpose": lambda x, a: x[0].transpose(a["dim"], a["to"]),
    "t": lambda x, a: x[0].t(),
    "movedim": lambda x, a: x[0].movedim(a["dim"], a["to"]),
    "unsqueeze": lambda x, a: x[0].unsqueeze(a["dim"]),
    "squeeze": lambda x, a: x[0].squeeze() if a["dim"] is None else x[0].squeeze(a["dim"]),
    "expand": lambda x, a: x[0].expand(a["size"]),
    "reshape": lambda x, a: x[0].reshape(a["shape"]),
    "view": lambda x, a: x[0].view(a["shape"]),
    "flatten": lambda x, a: x[0].flatten(a["start"], a["end"]),
    "unflatten": lambda x, a: x[0].unflatten(a["dim"], a["sizes"]),
    "diagonal": lambda x, a: x[0].diagonal(a["offset"], -2, -1),
    "tril": lambda x, a: x[0].tril(a["offset"]),
    "triu": lambda x, a: x[0].triu(a["offset"]),
    "cat": stacked(torch.cat),
    "stack": stacked(torch.stack),
    "split": lambda x, a: x[0].split(a["n"], a["dim"]),
    "split_sizes": lambda x, a: x[0].split(a["sizes"], a["dim"]),
    "chunk": lambda x, a: x[0].chunk(a["n"], a["dim"]),
    "slice": slice_of,
    "select": lambda x, a: x[0].select(a["dim"], a["index"]),
    "narrow": lambda x, a: x[0].narrow(a["dim"], a["start"], a["length"]),
    "unbind": lambda x, a: x[0].unbind(a["dim"]),
    "pad": pad,
    "flip": lambda x, a: x[0].flip(a["dims"]),
    "roll": lambda x, a: x[0].roll(a["shifts"], a["dims"]),
    "repeat": lambda x, a: x[0].repeat(a["repeats"]),
    "repeat_interleave": lambda x, a: x[0].repeat_interleave(a["repeats"], a["dim"]),
    "index_select": lambda x, a: x[0].index_select(a["dim"], x[1]),
    "index": lambda x, a: x[0][x[1]],
    "embedding": lambda x, a: F.embedding(x[1], x[0]),
    "gather": lambda x, a: x[0].gather(a["dim"], x[1]),
    "one_hot": one_hot,
    "bucketize": bucketize,
    "scatter": lambda x, a: x[0].scatter(a["dim"], x[1], x[2]),
})
define(PRODUCT, {
    "matmul": lambda x, a: torch.matmul(x[0], x[1]),
    "mm": lambda x, a: torch.mm(x[0], x[1]),
    "bmm": lambda x, a: torch.bmm(x[0], x[1]),
    "mv": lambda x, a: torch.mv(x[0], x[1]),
    "dot": lambda x, a: torch.dot(x[0], x[1]),
    "outer": lambda x, a: torch.outer(x[0], x[1]),
    "einsum": lambda x, a: torch.einsum(a["equation"], *x),
})
define(SUM, {
    "avg_pool1d": pool(F.avg_pool1d, 1),
    "avg_pool2d": pool(F.avg_pool2d, 2),
    "mse_loss": loss(lambda x, y, a: F.mse_loss(x, y, reduction=a["reduction"])),
    "cross_entropy": classes(F.cross_entropy),
    "nll_loss": classes(F.nll_loss),
})
define(EXACT, {
    "max_pool1d": pool(F.max_pool1d, 1),
    "max_pool2d": pool(F.max_pool2d, 2),
})
define(STEPS, {
    "l1_loss": loss(lambda x, y, a: F.l1_loss(x, y, reduction=a["reduction"])),
    "smooth_l1_loss": loss(lambda x, y, a: F.smooth_l1_loss(x, y, reduction=a["reduction"], beta=a["beta"])),
    "bce_with_logits": loss(lambda x, y, a: F.binary_cross_entropy_with_logits(x, y, reduction=a["reduction"])),
    "kl_div": loss(lambda x, y, a: F.kl_div(x, y, reduction=a["reduction"])),
    "linear": lambda x, a: F.linear(*x),
    "conv1d": conv(F.conv1d),
    "conv2d": conv(F.conv2d),
    "embedding_bag": embedding_bag,
    "scatter_add": lambda x, a: x[0].scatter_add(a["dim"], x[1], x[2]),
    "index_add": lambda x, a: x[0].index_add(a["dim"], x[1], x[2]),
    "index_put": index_put,
})
define(STEPS, {
    "addmm": lambda x, a: torch.addmm(x[0], x[1], x[2], beta=a["beta"], alpha=a["alpha"]),
    "baddbmm": lambda x, a: torch.baddbmm(x[0], x[1], x[2], beta=a["beta"], alpha=a["alpha"]),
    "scaled_dot_product_attention": attention,
    "rotary_embedding": rotary,
})

def softmax_by_steps(x, dim):
    if not x.numel():
        return torch.softmax(x, dim)
    powers = torch.exp(x - x.amax(dim, keepdim=True).detach())
    return powers / powers.sum(dim, keepdim=True)


def log_softmax_by_steps(x, dim):
    if not x.numel():
        return torch.log_softmax(x, dim)
    below = x - x.amax(dim, keepdim=True).detach()
    return below - torch.exp(below).sum(dim, keepdim=True).log()


def attention_by_steps(x, a):
    q, k, v = x[:3]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = a["scale"] if a["scale"] is not None else 1 / math.sqrt(q.shape[-1])
    scores = q @ k.transpose(-2, -1) * scale
    if len(x) > 3:
        scores = scores + x[3]
    if a["causal"]:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return softmax_by_steps(scores, -1) @ v


def normalized(x, dims, eps, centre=True):
    centred = x - x.mean(dims, keepdim=True) if centre else x
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)


def scaled(normal, affine):
    """Times a weight and plus a bias, where there are."""
    for apply, parameter in zip((torch.mul, torch.add), affine):
        normal = apply(normal, parameter)
    return normal


def per_channel(x, vectors):
    return [v.reshape([-1] + [1] * (x.dim() - 2)) for v in vectors]


def group_norm_by_steps(x, a):
    apart = x[0].reshape(x[0].shape[0], a["groups"], math.prod(x[0].shape[1:]) // a["groups"])
    return scaled(normalized(apart, -1, a["eps"]).reshape(x[0].shape), per_channel(x[0], x[1:]))


def batch_norm_by_steps(x, a):
    if a["given"]:
        mean, variance = per_channel(x[0], (x[1].detach(), x[2].detach()))
        return scaled((x[0] - mean) * torch.rsqrt(variance + a["eps"]), per_channel(x[0], x[3:]))
    others = [d for d in range(x[0].dim()) if d != 1]
    return scaled(normalized(x[0], others, a["eps"]), per_channel(x[0], x[1:]))


def last(x, a):
    return list(range(-a["ndim"], 0))


def floor_of_quotient(x, a):
    """PyTorch rounds half types on the way."""
    own = torch.div(x[0], x[1], rounding_mode="floor")
    if own.dtype not in (torch.float16, torch.bfloat16):
        return own
    return torch.div(x[0].to(torch.float64), x[1].to(torch.float64), rounding_mode="floor").to(own.dtype)


def remainder(a, b):
    """Zero has the sign of the dividend, other than NumPy's."""
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def exact_rest(own, rest):
    """PyTorch's vectorized kernels give NaN where the quotient is large."""
    def run(x, a):
        found = own(x[0], x[1])
        if not found.is_floating_point():
            return found
        with np.errstate(all="ignore"):
            exact = rest(*(t.detach().to(torch.float64).numpy() for t in x))
        return torch.where(found.isnan(), torch.from_numpy(np.asarray(exact)).to(found.dtype), found)

    return run


class Sloped(torch.autograd.Function):
    """Elements with their slopes."""

    @staticmethod
    def forward(context, x, value, slope):
        context.save_for_backward(slope)
        return value

    @staticmethod
    def backward(context, gradient):
        return gradient * context.saved_tensors[0], None, None


def sloped(f, slope):
    return lambda x, a: Sloped.apply(x[0], f(x[0]).detach(), slope(x[0]).detach())


def gelu_tanh(x, a):
    return x[0] * torch.sigmoid(math.sqrt(8 / math.pi) * (x[0] + 0.044715 * x[0] ** 3))


# Forms of the call without the cancellation and the approximations of PyTorch's own, or as several operations. They are called in
# f64, those of `EXACT` operators in the type of the call.
ACCURATE = {
    "gelu": lambda x, a: 0.5 * x[0] * torch.erfc(-x[0] * math.sqrt(0.5)),
    "gelu_tanh": gelu_tanh,
    "expm1": sloped(torch.expm1, torch.exp),
    "sigmoid": sloped(torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x)),
    "fmod": exact_rest(torch.fmod, np.fmod),
    "remainder": exact_rest(torch.remainder, remainder),
    "div_floor": floor_of_quotient,
    "softmax": lambda x, a: softmax_by_steps(x[0], a["dim"]),
    "log_softmax": lambda x, a: log_softmax_by_steps(x[0], a["dim"]),
    # The logarithm of the softmax of one is the same.
    "cross_entropy": lambda x, a: classes(F.cross_entropy)([log_softmax_by_steps(x[0], min(x[0].dim() - 1, 1)), x[1]], a),
    "layer_norm": lambda x, a: scaled(normalized(x[0], last(x, a), a["eps"]), x[1:]),
    "rms_norm": lambda x, a: scaled(normalized(x[0], last(x, a), a["eps"], False), x[1:]),
    "group_norm": group_norm_by_steps,
    "batch_norm": batch_norm_by_steps,
    "scaled_dot_product_attention": attention_by_steps,
}
# Integers that stay so when the call is made in f64: they are no operands of arithmetic.
KINDS_OF_INDEX = {"index", "signed index", "turn", "target", "mask"}


# ---- values and distances ----------------------------------------------------------------------------------------------


def outputs_of(name, inputs, attrs, accurate):
    found = (ACCURATE.get(name) if accurate and name in ACCURATE else OPS[name][1])(inputs, attrs)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def run(call, inputs, with_gradients, accurate=False, pattern=None):
    """The outputs, and the gradients of the floating-point inputs (None where there is none)."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() and with_gradients else x for x in inputs]
    outputs = outputs_of(call["op"], leaves, call["attrs"], accurate)
    gradients = [None] * len(inputs)
    taken = [(i, o) for i, o in enumerate(outputs) if o.requires_grad]
    if with_gradients and taken:
        wanted = [i for i, x in enumerate(leaves) if x.requires_grad]
        weights = [cotangent(call["seed"], i, o) for i, o in taken]
        if pattern is not None:
            weights = [shaken(w, call["seed"], pattern, i) for i, w in enumerate(weights)]
        found = torch.autograd.grad([o for _, o in taken], [leaves[i] for i in wanted], weights, allow_unused=True)
        for i, gradient in zip(wanted, found):
            gradients[i] = gradient
    return [o.detach() for o in outputs], gradients


class Rounded(TorchDispatchMode):
    """Moves what every operation gives by a relative step of its own, as rounding would."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        # Not views and what is written in place.
        if any(result.alias_info is not None for result in operation._schema.returns):
            return found
        return tree_map(self.moved, found)

    def moved(self, x):
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float64:
            return x
        amount = torch.rand(x.shape, generator=self.generator, dtype=torch.float64) * 2.0 - 1.0
        return x * (1.0 + STEP * (amount + amount.sign() * 0.5))


def half_spacing(values, dtype):
    """Half the distance of neighbouring numbers of a type: the largest error of one rounding."""
    bits, least, _ = FORMATS[dtype]
    _, exponent = np.frexp(np.abs(np.where(np.isfinite(values), values, 0.0)))
    exponent = np.where(values == 0, least, np.maximum(exponent - 1, least)).astype(np.float64)
    return np.exp2(np.maximum(exponent - bits, -1074.0))


def numpy(t):
    return t.detach().to(torch.float64).reshape(-1).numpy()


def shaken(x, seed, pattern, k):
    """A tensor with every element moved by a relative step."""
    h = mix(seed ^ (77 + 1000 * pattern + k), np.arange(x.numel(), dtype=U64))
    amount = (0.5 + (h >> U64(12)).astype(np.float64) / 2.0**53) * np.where((h & U64(1)) == U64(0), 1.0, -1.0)
    return x * (1.0 + STEP * torch.from_numpy(amount).reshape(x.shape))


def moved(call, wide, pattern):
    specs = enumerate(zip(wide, call["inputs"]))
    return [shaken(x, spec["seed"], pattern, k) if x.is_floating_point() else x for k, (x, spec) in specs]


STEP = 2.0**-30
PATTERNS = 6


def answer(call):
    inputs = [tensor(spec) for spec in call["inputs"]]
    try:
        own, own_gradients = run(call, inputs, call["gradients"])
    except Exception as error:  # whatever PyTorch refuses with
        text = str(error)
        unsupported = isinstance(error, NotImplementedError) or "not implemented" in text or "not supported" in text
        return {"unsupported" if unsupported else "refused": text.split("\n")[0][:200]}
    kind = OPS[call["op"]][0]
    real_result = any(o.is_floating_point() for o in own)
    with_gradients = any(g is not None for g in own_gradients)
    wide = wide_gradients = tamed = None
    spread, spread_gradients = [], []
    if real_result:
        keeps = lambda spec, x: x.to(torch.float64) if x.is_floating_point() or (
            kind != EXACT and spec["values"] not in KINDS_OF_INDEX) else x
        doubles = [keeps(spec, x) for spec, x in zip(call["inputs"], inputs)]
        wide, wide_gradients = run(call, doubles, with_gradients, True)
        if kind == EXACT and call["op"] in ACCURATE:
            wide = outputs_of(call["op"], inputs, call["attrs"], True)
        f64 = any(o.dtype == torch.float64 for o in own)
        # Gradients of exact operators are sums of cotangents: moving the inputs would only break ties.
        for pattern in range(0 if kind == EXACT else PATTERNS):
            given = moved(call, doubles, pattern)
            if f64 or kind == STEPS:
                with Rounded(call["seed"] + pattern):
                    o, g = run(call, given, with_gradients, True, pattern)
            else:
                o, g = run(call, given, with_gradients, True, pattern)
                if with_gradients and kind != FUNCTION:
                    with Rounded(call["seed"] + pattern):
                        g = run(call, given, True, True, pattern)[1]
            spread.append(o)
            spread_gradients.append(g)
        if f64 and kind not in (EXACT, FUNCTION):
            tamed = run(call, [tame(x) for x in doubles], False, True)[0]
    result = {"outputs": [], "gradients": None}
    for i, value in enumerate(own):
        # A value that is found in f64 counts only if it stands at the place that the call found.
        w = wide[i] if wide is not None and wide[i].is_floating_point() else None
        if kind == EXACT and call["op"] not in ACCURATE:
            w = None
        result["outputs"].append(
            judged(call, value, w, [s[i] for s in spread], kind, call["seed"] + i, None if tamed is None else tamed[i])
        )
    if with_gradients:
        result["gradients"] = [
            None if g is None or w is None else judged(call, g, w, [s[i] for s in spread_gradients], STEPS, call["seed"] + 100 + i)
            for i, (g, w) in enumerate(zip(own_gradients, wide_gradients))
        ]
    return result


def tame(x):
    """A tensor whose products do not overflow."""
    most = 2.0**300
    return torch.where(x.isinf(), x, x.clamp(-most, most)) if x.is_floating_point() else x


def judged(call, own, wide, spread, kind, seed, tamed=None):
    """Type, shape, expected values at sampled positions, distances, and sums of all of them."""
    entry = {"dtype": NAMES[own.dtype], "shape": list(own.shape)}
    at = positions(own.numel(), call["samples"], seed)
    if not own.is_floating_point():
        values = own.to(torch.int64).reshape(-1).numpy()
        entry["values"] = [int(v) for v in values[at]]
        total = int(values.astype(object).sum()) if values.size and values.size <= 4096 else None
        if values.size > len(at) and total is not None:
            entry["total"] = total % 2**64
        return entry
    mine = numpy(own)
    value = mine if wide is None else numpy(wide)
    distance = partial = np.zeros_like(mine)
    if kind != EXACT:
        with np.errstate(all="ignore"):
            terms = max((n for spec in call["inputs"] for n in spec["shape"]), default=1)
            value, distance, partial = distances(own.dtype, mine, value, [numpy(s) for s in spread], kind, terms)
            if tamed is not None:
                # Whether terms of huge elements are beyond the widest type on the way is decided by their order.
                tamed = numpy(tamed)
                depends = np.isnan(value) != np.isnan(tamed)
                depends |= np.abs(value - tamed) > 2.0**-20 * np.abs(value)
                depends |= np.isinf(value) & (value != tamed)
                distance, partial = (np.where(depends, np.inf, d) for d in (distance, partial))
    entry["values"] = [text(v) for v in value[at]]
    entry["distances"] = [text(up(d)) for d in distance[at]]
    if kind != EXACT:
        entry["partial"] = [text(up(d)) for d in partial[at]]
    alternatives = [k for k in range(len(at)) if not same(mine[at[k]], value[at[k]], distance[at[k]])]
    if alternatives:
        entry["own"] = {str(k): text(mine[at[k]]) for k in alternatives}
    if value.size > len(at) and not np.isinf(distance).any():
        finite = np.isfinite(value) & np.isfinite(mine)
        # Of exact values, either may be found.
        either = np.abs(mine - value)[finite].sum() if kind == EXACT else 0.0
        off = [text(up(d[finite].sum() + either)) for d in (distance, partial)]
        entry["total"] = [text(value[finite].sum()), off[0], int((~finite).sum()), off[1]]
    return entry


def same(a, b, distance):
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= distance


def distances(dtype, own, value, spread, kind, terms):
    bits, _, largest = FORMATS[dtype]
    computed = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    range_of_computation = FORMATS[torch.float64 if dtype == torch.float64 else torch.float32][2]
    rounding = half_spacing(value, dtype)
    magnitude = np.abs(value)
    sensitivity = np.zeros_like(value)
    for s in spread:
        sensitivity = np.fmax(sensitivity, np.abs(s - value) / STEP)
    if kind == FUNCTION:
        # In f64, where nothing is wider, the expected value is rounded as often.
        distance = rounding + (6 if dtype == torch.float64 else 3) * computed * magnitude
    else:
        roundings = 8 if kind == SUM else 16 + math.sqrt(terms)
        # No wider type to compare with: what PyTorch loses by cancellation is in the expected value too.
        roundings *= 32 if dtype == torch.float64 else 1
        distance = rounding + roundings * computed * (magnitude + sensitivity)
    if kind == STEPS:
        scale = rounding + 2.0**-bits * (magnitude + sensitivity)
        distance = distance + 2 * scale
        error = np.abs(own - value) / scale
        error = error[np.isfinite(error)]
        if error.size:
            distance = np.maximum(distance, 2 * float(error.max()) * scale)
    # A value that the type does not hold is infinite, or the largest where the last rounding decides.
    beyond = magnitude - distance > largest * (1 + 2.0 ** -(bits + 1))
    value = np.where(beyond & np.isfinite(value), np.copysign(np.inf, value), value)
    # What PyTorch gives itself is near enough.
    both = np.isfinite(own) & np.isfinite(value)
    distance = np.where(both, np.maximum(distance, np.abs(own - value)), distance)
    distance = np.where(np.isnan(distance), 0.0, distance)
    # Where terms are beyond the type that is computed in, the order of summation decides.
    if kind != FUNCTION:
        distance = np.where(magnitude + sensitivity > range_of_computation, np.inf, distance)
    partial = 3 * (distance + 2.0 ** (1 - bits) * (magnitude + sensitivity))
    partial = np.where(np.isnan(partial), distance, partial)
    partial = np.where(np.isfinite(magnitude) & (3 * magnitude + partial > largest), np.inf, partial)
    return value, distance, partial


def up(x):
    """Rounded up to a few digits."""
    if math.isinf(x):
        return x
    rounded = float(f"{x:.4g}")
    return rounded if rounded >= x else float(f"{x * 1.001:.4g}")


def text(x):
    x = float(x)
    if math.isnan(x):
        return "nan"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    if x == 0.0 and math.copysign(1.0, x) < 0:
        return "-0"
    return x


def main():
    with np.errstate(over="ignore"):
        for line in sys.stdin:
            call = json.loads(line)
            try:
                found = answer(call)
            except Exception as error:
                found = {"broken": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


main()
