"""Records outputs and gradients of modules of torch.nn in f64, for tests/training/torch_modules.rs: writes data/modules.jsonl.

One line per module: its name and options, the state, the inputs, the outputs, and the gradients of inputs and parameters for the sum of
all outputs with the weights cos(i + 1) of their elements i.
"""

import json
import pathlib

import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
LINES = []


def encode(tensor):
    kind = "f64" if tensor.dtype.is_floating_point else "i64"
    data = [float(x) if kind == "f64" else int(x) for x in tensor.detach().flatten()]
    return {"dtype": kind, "shape": list(tensor.shape), "data": data}


def flat(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for part in output for tensor in flat(part)]


def record(name, module, inputs, options=None, call=None, evaluate=False):
    for parameter in module.parameters():
        # Away from ones and zeros, so that every parameter has an effect.
        if name.startswith(("InstanceNorm", "PReLU")):
            parameter.data.uniform_(0.2, 1.5)
    state = {key: encode(value) for key, value in module.state_dict().items() if value.dtype.is_floating_point}
    if evaluate:
        module(*inputs)
        module.eval()
    # Targets of losses have no gradient in some of them.
    targets = {"MarginRankingLoss": [2], "CosineEmbeddingLoss": [2], "TripletMarginLoss": []}.get(name, [1, 2] if name.endswith("Loss") else [])
    trained = lambda i, x: x.dtype.is_floating_point and i not in targets
    inputs = [x.clone().requires_grad_() if trained(i, x) else x for i, x in enumerate(inputs)]
    outputs = flat((call or module)(*inputs))
    loss = 0
    for output in outputs:
        if output.dtype.is_floating_point:
            weights = torch.cos(torch.arange(1.0, output.numel() + 1.0)).reshape(output.shape)
            loss = loss + (output * weights).sum()
    module.zero_grad()
    loss.backward()
    zero = lambda x: torch.zeros_like(x) if x.grad is None else x.grad
    gradients = {f"input{i}": encode(zero(x)) for i, x in enumerate(inputs) if x.requires_grad}
    gradients |= {key: encode(zero(value)) for key, value in module.named_parameters()}
    LINES.append({
        "module": name, "options": options or {}, "evaluate": evaluate, "state": state,
        "inputs": [encode(x) for x in inputs], "outputs": [encode(x) for x in outputs], "gradients": gradients,
    })


def with_options(cls, name, inputs, evaluate=False, call=None, sizes=(), **options):
    record(name, cls(*sizes, **options), inputs, options | ({"sizes": list(sizes)} if sizes else {}), call, evaluate)


# Recurrent layers, with and without an initial state.
x = torch.randn(4, 3, 2)
with_options(nn.RNN, "RNN", [x], sizes=(2, 4))
with_options(nn.RNN, "RNN", [x], sizes=(2, 4), nonlinearity="relu", num_layers=2, bidirectional=True, batch_first=True)
with_options(nn.LSTM, "LSTM", [x], sizes=(2, 4), num_layers=2, bidirectional=True)
with_options(nn.LSTM, "LSTM", [x], sizes=(2, 4), proj_size=3, bias=False)
with_options(nn.LSTM, "LSTM", [x[:, 0]], sizes=(2, 4), num_layers=2)
with_options(nn.GRU, "GRU", [x], sizes=(2, 4), num_layers=2, bidirectional=True, batch_first=True)
h, c = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
lstm = nn.LSTM(2, 4, num_layers=2)
record("LSTM", lstm, [x, h, c], {"sizes": [2, 4], "num_layers": 2}, lambda x, h, c: lstm(x, (h, c)))
with_options(nn.GRU, "GRU", [x, h], sizes=(2, 4), num_layers=2)
with_options(nn.RNN, "RNN", [x, h], sizes=(2, 4), num_layers=2)
x, h, c = torch.randn(3, 2), torch.randn(3, 4), torch.randn(3, 4)
with_options(nn.RNNCell, "RNNCell", [x, h], sizes=(2, 4))
with_options(nn.GRUCell, "GRUCell", [x, h], sizes=(2, 4))
with_options(nn.GRUCell, "GRUCell", [x], sizes=(2, 4), bias=False)
cell = nn.LSTMCell(2, 4)
record("LSTMCell", cell, [x, h, c], {"sizes": [2, 4]}, lambda x, h, c: cell(x, (h, c)))

# Norms.
for dims, cls in [(1, nn.InstanceNorm1d), (2, nn.InstanceNorm2d), (3, nn.InstanceNorm3d)]:
    x = torch.randn(2, 4, *[3] * dims)
    with_options(cls, "InstanceNorm", [x], sizes=(4,))
    with_options(cls, "InstanceNorm", [x], sizes=(4,), affine=True, track_running_stats=True)
    with_options(cls, "InstanceNorm", [x], evaluate=True, sizes=(4,), affine=True, track_running_stats=True, momentum=0.3)
with_options(nn.LocalResponseNorm, "LocalResponseNorm", [torch.randn(2, 4, 3)], size=2, alpha=0.5, beta=0.75, k=1.5)

# Pools.
for dims in (1, 2, 3):
    x = torch.randn(2, 4, *[6, 5, 4][:dims])
    for kind in ("MaxPool", "AvgPool"):
        cls, name = getattr(nn, f"{kind}{dims}d"), f"{kind}{dims}d"
        with_options(cls, name, [x], kernel_size=2)
        with_options(cls, name, [x], kernel_size=3, stride=2, padding=1, ceil_mode=True)
        with_options(cls, name, [x], kernel_size=[2, 3, 2][:dims], stride=[1, 2, 1][:dims], padding=[1, 1, 0][:dims])
    with_options(getattr(nn, f"AvgPool{dims}d"), f"AvgPool{dims}d", [x], kernel_size=3, padding=1, count_include_pad=False)
    with_options(getattr(nn, f"MaxPool{dims}d"), f"MaxPool{dims}d", [x], kernel_size=2, dilation=2, stride=1)
    with_options(getattr(nn, f"AdaptiveAvgPool{dims}d"), f"AdaptiveAvgPool{dims}d", [x], output_size=[4, 3, 2][:dims])
    with_options(getattr(nn, f"AdaptiveMaxPool{dims}d"), f"AdaptiveMaxPool{dims}d", [x], output_size=[4, 3, 2][:dims])
    with_options(getattr(nn, f"LPPool{dims}d"), f"LPPool{dims}d", [x.abs()], norm_type=2.0, kernel_size=2)
    pool, unpool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True), getattr(nn, f"MaxUnpool{dims}d")(2)
    values, indices = pool(torch.randn(2, 4, *[6, 4, 4][:dims]))
    record(f"MaxUnpool{dims}d", unpool, [values, indices], {"kernel_size": 2})
with_options(nn.AvgPool2d, "AvgPool2d", [torch.randn(2, 4, 6, 5)], kernel_size=2, divisor_override=3)
with_options(nn.LPPool2d, "LPPool2d", [torch.rand(2, 4, 6, 5)], norm_type=3.0, kernel_size=3, stride=2, ceil_mode=True)

# Shapes.
x = torch.randn(2, 4, 6, 4)
with_options(nn.PixelShuffle, "PixelShuffle", [x], upscale_factor=2)
with_options(nn.PixelUnshuffle, "PixelUnshuffle", [x], downscale_factor=2)
with_options(nn.ChannelShuffle, "ChannelShuffle", [x], groups=2)
with_options(nn.Flatten, "Flatten", [x], start_dim=1, end_dim=2)
with_options(nn.Unflatten, "Unflatten", [x], dim=2, unflattened_size=(2, 3))
with_options(nn.Identity, "Identity", [x])
for kind in ("ReflectionPad", "ReplicationPad", "CircularPad", "ZeroPad"):
    with_options(getattr(nn, f"{kind}2d"), kind, [x], padding=[1, 2, 3, 0])
    with_options(getattr(nn, f"{kind}1d"), kind, [x[0]], padding=[2, 1])
with_options(nn.ConstantPad2d, "ConstantPad", [x], padding=[1, 2, 3, 0], value=0.5)
with_options(nn.Unfold, "Unfold", [x], kernel_size=[2, 3], padding=1, stride=[1, 2])
with_options(nn.Fold, "Fold", [torch.randn(2, 12, 14)], output_size=[6, 4], kernel_size=[2, 3], padding=[1, 1], stride=[1, 2])
with_options(nn.Fold, "Fold", [torch.randn(2, 8, 15)], output_size=[6, 4], kernel_size=2)
with_options(nn.Upsample, "Upsample", [x], size=[5, 7])
with_options(nn.Upsample, "Upsample", [x], scale_factor=1.5, mode="bilinear")
with_options(nn.Upsample, "Upsample", [x], scale_factor=(2.0, 1.25), mode="bilinear", align_corners=True)
with_options(nn.Upsample, "Upsample", [x], size=[5, 7], mode="bicubic")
with_options(nn.Upsample, "Upsample", [x[0]], scale_factor=2.0, mode="linear")

# Activations.
x = torch.randn(2, 4, 4, 2) * 3
for name in ("ReLU", "ReLU6", "GELU", "SiLU", "Tanh", "Sigmoid", "Hardsigmoid", "Hardswish", "SELU", "Mish", "Tanhshrink", "Softsign",
             "LogSigmoid", "Softmax2d"):
    with_options(getattr(nn, name), name, [x])
with_options(nn.GELU, "GELU", [x], approximate="tanh")
with_options(nn.Hardtanh, "Hardtanh", [x], min_val=-2.0, max_val=1.0)
with_options(nn.LeakyReLU, "LeakyReLU", [x], negative_slope=0.1)
with_options(nn.ELU, "ELU", [x], alpha=1.5)
with_options(nn.CELU, "CELU", [x], alpha=1.5)
with_options(nn.Hardshrink, "Hardshrink", [x], lambd=0.7)
with_options(nn.Softshrink, "Softshrink", [x], lambd=0.7)
with_options(nn.Threshold, "Threshold", [x], threshold=0.3, value=-1.0)
with_options(nn.Softplus, "Softplus", [x], beta=2.0, threshold=5.0)
for name in ("Softmax", "LogSoftmax", "Softmin", "GLU"):
    with_options(getattr(nn, name), name, [x], dim=1)
with_options(nn.RReLU, "RReLU", [x], evaluate=True, lower=0.1, upper=0.5)
with_options(nn.PReLU, "PReLU", [x], num_parameters=4)
with_options(nn.PReLU, "PReLU", [x], num_parameters=1)
with_options(nn.Dropout2d, "Dropout2d", [x], evaluate=True, p=0.5)
with_options(nn.AlphaDropout, "AlphaDropout", [x], evaluate=True, p=0.5)

# Two inputs, tables.
a, b = torch.randn(4, 6), torch.randn(4, 6)
with_options(nn.CosineSimilarity, "CosineSimilarity", [a, b], dim=1, eps=1e-8)
with_options(nn.PairwiseDistance, "PairwiseDistance", [a, b], p=3.0, eps=1e-6, keepdim=True)
with_options(nn.Bilinear, "Bilinear", [a, torch.randn(4, 3)], sizes=(6, 3, 4))
ids = torch.tensor([[1, 2, 0, 2], [5, 0, 1, 1]])
with_options(nn.Embedding, "Embedding", [ids], sizes=(6, 4), padding_idx=0)
with_options(nn.Embedding, "Embedding", [ids], sizes=(6, 4), scale_grad_by_freq=True)
for mode in ("sum", "mean", "max"):
    with_options(nn.EmbeddingBag, "EmbeddingBag", [ids], sizes=(6, 4), mode=mode)
    with_options(nn.EmbeddingBag, "EmbeddingBag", [ids], sizes=(6, 4), mode=mode, padding_idx=1)

# Losses: every reduction.
y, sign = torch.randn(6, 4), torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
x, third = torch.randn(6, 4), torch.randn(6, 4)
signs = torch.where(y > 0, 1.0, -1.0)
classes, weight = torch.tensor([0, 3, 2, 1, 3, 0]), torch.tensor([0.5, 1.5, 1.0, 2.0])
labels = torch.tensor([[3, 0, -1, 1], [1, -1, 0, 0], [2, 3, 0, 1], [-1, 0, 0, 0], [0, 1, -1, 2], [2, -1, 2, 2]])
probabilities = torch.softmax(y, 1)
LOSSES = [
    (nn.L1Loss, [x, y], {}), (nn.MSELoss, [x, y], {}), (nn.SmoothL1Loss, [x, y], {"beta": 0.7}), (nn.HuberLoss, [x, y], {"delta": 0.7}),
    (nn.CrossEntropyLoss, [x, classes], {"label_smoothing": 0.1, "ignore_index": 1}),
    (nn.CrossEntropyLoss, [x, classes], {"weight": weight, "label_smoothing": 0.1}),
    (nn.CrossEntropyLoss, [x, probabilities], {"weight": weight}),
    (nn.NLLLoss, [torch.log_softmax(x, 1), classes], {"ignore_index": 3}), (nn.NLLLoss, [torch.log_softmax(x, 1), classes], {"weight": weight}),
    (nn.PoissonNLLLoss, [x, y.abs()], {"full": True}), (nn.PoissonNLLLoss, [x.abs(), y.abs()], {"log_input": False}),
    (nn.GaussianNLLLoss, [x, y, third.abs()], {"full": True}),
    (nn.KLDivLoss, [torch.log_softmax(x, 1), probabilities], {}), (nn.KLDivLoss, [torch.log_softmax(x, 1), probabilities.log()], {"log_target": True}),
    (nn.BCELoss, [torch.sigmoid(x), torch.sigmoid(y)], {"weight": weight}),
    (nn.BCEWithLogitsLoss, [x, torch.sigmoid(y)], {"weight": weight, "pos_weight": weight * 2}),
    (nn.MarginRankingLoss, [x[:, 0], y[:, 0], sign], {"margin": 0.5}), (nn.HingeEmbeddingLoss, [x, signs], {"margin": 0.5}),
    (nn.SoftMarginLoss, [x, signs], {}), (nn.MultiLabelMarginLoss, [x, labels], {}),
    (nn.MultiLabelSoftMarginLoss, [x, (y > 0).double()], {"weight": weight}),
    (nn.MultiMarginLoss, [x, classes], {"p": 2, "margin": 0.5, "weight": weight}),
    (nn.CosineEmbeddingLoss, [x, y, sign], {"margin": 0.2}),
    (nn.TripletMarginLoss, [x, y, third], {"margin": 0.8, "p": 2, "swap": True}),
]
for cls, inputs, options in LOSSES:
    for reduction in ("mean", "sum", "none") + (("batchmean",) if cls is nn.KLDivLoss else ()):
        module = cls(reduction=reduction, **options)
        numbers = {key: value for key, value in options.items() if not isinstance(value, torch.Tensor)}
        record(cls.__name__, module, inputs, numbers | {"reduction": reduction})
log_probs, targets = torch.log_softmax(torch.randn(5, 2, 4), 2), torch.tensor([[1, 2, 2], [3, 1, 0]])
for reduction in ("mean", "sum", "none"):
    module = nn.CTCLoss(reduction=reduction)
    call = lambda a, b, module=module: module(a, b, torch.tensor([5, 4]), torch.tensor([3, 2]))
    record("CTCLoss", module, [log_probs, targets], {"reduction": reduction}, call)

path = pathlib.Path(__file__).parent.parent / "data" / "modules.jsonl"
path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
print(f"{len(LINES)} modules, {path.stat().st_size} bytes")
