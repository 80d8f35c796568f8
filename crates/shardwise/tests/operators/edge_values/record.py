"""Records what PyTorch gives for edge values of every elementwise operator: `python record.py > vectors.json`.

Floating-point numbers are recorded by their bits. A function of two is recorded for all pairs of values, row by row; a dash
stands for pairs that PyTorch refuses or leaves undefined: integer division by zero, and the least integer divided by -1.
"""

import json
import struct

import torch
import torch.nn.functional as F

inf, nan = float("inf"), float("nan")
REALS = [0.0, -0.0, 1.0, -2.5, 0.1, -7.0, 1e20, -1e17, inf, -inf, nan]
EDGES = {"f64": [5e-324, 1.7976931348623157e308], "f32": [1e-45, 3.4028234663852886e38]}
ORDINARY = [-1.0, 0.5, 3.0, 0.3, -0.7, 2.0, 10.0, -10.0, 20.5, 88.0, 100.0, -100.0, 1e-8, 1.5]
INTEGERS = {
    "i64": [0, 1, -1, 2, 3, -3, 7, -8, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1, 2**32, 2**53 + 1, 2**40 + 3],
    "i32": [0, 1, -1, 2, 3, -3, 7, -8, 2**31 - 1, -(2**31), 46341],
    "i16": [0, 1, -1, 2, 3, -3, 7, -8, 32767, -32768, 182],
    "u8": [0, 1, 2, 3, 5, 7, 100, 128, 200, 254, 255],
}
TYPES = {
    "f64": torch.float64, "f32": torch.float32,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "u8": torch.uint8,
}
NAMES = {v: k for k, v in TYPES.items()} | {torch.bool: "u8"}

BINARY = {name: getattr(torch, name) for name in (
    "add sub mul div pow maximum minimum fmod remainder atan2 hypot eq ne lt le gt ge "
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor").split()}
BINARY["div_floor"] = lambda a, b: torch.div(a, b, rounding_mode="floor")
BINARY["div_trunc"] = lambda a, b: torch.div(a, b, rounding_mode="trunc")
DIVISIONS = {"fmod", "remainder", "div_floor", "div_trunc"}

UNARY = {name: getattr(torch, name) for name in (
    "neg abs sign square relu floor ceil round trunc frac exp expm1 exp2 log log1p log2 log10 sqrt rsqrt reciprocal "
    "sin cos tan asin atan sinh cosh asinh tanh erf erfc sigmoid isnan isfinite isinf signbit logical_not").split()}
# With the arguments of the operator table.
UNARY |= {
    "logsigmoid": F.logsigmoid, "softsign": F.softsign, "silu": F.silu, "mish": F.mish, "hardswish": F.hardswish,
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1), "elu": lambda x: F.elu(x, 0.5),
    "softplus": lambda x: F.softplus(x, 2.0, 20.0), "pow_scalar": lambda x: x ** 3,
    "clamp": lambda x: x.clamp(-0.5, 0.5), "add_scalar": lambda x: x + 1.5, "sub_scalar": lambda x: x - 1.5,
    "rsub_scalar": lambda x: 1.5 - x, "mul_scalar": lambda x: x * -2, "div_scalar": lambda x: x / 4.0,
    "nan_to_num": lambda x: x.nan_to_num(0.0, 1e3, -1e3),
}


def values_of(tensor):
    values = tensor.flatten().tolist()
    form = {torch.float64: ("<d", "<Q", "016x"), torch.float32: ("<f", "<I", "08x")}.get(tensor.dtype)
    if form is None:
        return [str(int(v)) for v in values]
    # One NaN stands for all of them.
    hexadecimal = lambda v: format(struct.unpack(form[1], struct.pack(form[0], v))[0], form[2])
    return ["nan" if v != v else hexadecimal(v) for v in values]


def recorded(tensor):
    return {"dtype": NAMES[tensor.dtype], "values": " ".join(values_of(tensor))}


def run(table, inputs, refused):
    found = {}
    for op, f in table.items():
        kept = [not refused(op, *v) for v in zip(*(t.tolist() for t in inputs))]
        try:
            result = f(*(t[kept] for t in inputs))
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        if result.dtype in NAMES:
            values = iter(values_of(result))
            values = [next(values) if k else "-" for k in kept]
            found[op] = {"dtype": NAMES[result.dtype], "values": " ".join(values)}
    return found


families = []
for name, dtype in TYPES.items():
    tensor = lambda values: torch.tensor(values, dtype=dtype)
    values = INTEGERS.get(name) or REALS + EDGES[name]
    single = tensor(values + (ORDINARY if dtype.is_floating_point else []))
    pairs = [(a, b) for a in values for b in values]
    left, right = tensor([a for a, _ in pairs]), tensor([b for _, b in pairs])
    division = lambda op, a, b: op in DIVISIONS and not dtype.is_floating_point and (b == 0 or b == -1 and a == min(values))
    families.append({
        "single": recorded(single),
        "pairs": recorded(tensor(values)),
        "unary": run(UNARY, [single], lambda op, a: False),
        "binary": run(BINARY, [left, right], division),
    })
print(json.dumps(families, indent=0))
