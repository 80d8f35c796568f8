"""Records what PyTorch gives for random equations of einsum: `python record.py > vectors.json`.

Elements are small integers of f64 that `value` computes from their number, so that results are exact and inputs need not be
recorded. Gradients are those of the sum of the result times `weight`. Equations that PyTorch refuses have no result.
"""

import json
import random

import torch

SEED, CASES = 16, 240
LETTERS = "abAZkxQ"


def value(number, operand):
    return (5 * number + 3 * operand + number // 2) % 7 - 3


def weight(number):
    return 3 * number % 5 - 2


def filled(shape, of):
    count = torch.Size(shape).numel()
    return torch.tensor([of(i) for i in range(count)], dtype=torch.float64).reshape(shape)


def draw(rng):
    """An equation and the shapes of its operands."""
    sizes = {c: rng.choice([1, 2, 2, 3, 3, 4]) for c in LETTERS}
    if rng.random() < 0.05:
        sizes[rng.choice(LETTERS)] = 0
    batch = [rng.choice([1, 2, 3]) for _ in range(2)]
    dotted = rng.random() < 0.4
    terms, shapes = [], []
    for _ in range(rng.choice([1, 1, 2, 2, 2, 3, 3, 4])):
        letters = [rng.choice(LETTERS) for _ in range(rng.choice([0, 1, 2, 2, 2, 3, 3]))]
        if rng.random() < 0.6:
            letters = list(dict.fromkeys(letters))
        stretched = {c for c in letters if rng.random() < 0.1}
        shape = [1 if c in stretched else sizes[c] for c in letters]
        if dotted and rng.random() < 0.75:
            at, count = rng.randint(0, len(letters)), rng.choice([0, 1, 2])
            covered = [1 if rng.random() < 0.2 else n for n in batch[2 - count:]]
            letters[at:at], shape[at:at] = ["..."], covered
        if shape and rng.random() < 0.03:
            shape[rng.randrange(len(shape))] += 1
        terms.append(letters)
        shapes.append(shape)
    equation = ",".join("".join(t) for t in terms)
    if rng.random() < 0.7:
        used = sorted({c for t in terms for c in t if c != "..."})
        output = rng.sample(used, rng.randint(0, len(used)))
        if any("..." in t for t in terms) and rng.random() < 0.8:
            output.insert(rng.randint(0, len(output)), "...")
        equation += "->" + "".join(output)
    if rng.random() < 0.05:
        equation += rng.choice(["a", ",", "->", ".", "1"])
    if rng.random() < 0.1:
        equation = equation.replace(",", " , ").replace("->", " -> ")
    return equation, shapes


def record(equation, shapes):
    inputs = [filled(s, lambda n, i=i: value(n, i)).requires_grad_() for i, s in enumerate(shapes)]
    case = {"equation": equation, "shapes": shapes}
    try:
        output = torch.einsum(equation, *inputs)
    except RuntimeError:
        return case
    loss = (output * filled(output.shape, weight)).sum()
    gradients = torch.autograd.grad(loss, inputs)
    numbers = lambda t: [int(x) for x in t.flatten().tolist()]
    return case | {
        "output_shape": list(output.shape),
        "output": numbers(output),
        "gradients": [numbers(g) for g in gradients],
    }


def main():
    rng = random.Random(SEED)
    cases = []
    while len(cases) < CASES:
        equation, shapes = draw(rng)
        case = record(equation, shapes)
        refused = sum("output" not in c for c in cases)
        if len(case.get("output", [])) <= 60 and ("output" in case or refused < 25):
            cases.append(case)
    print("[" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "]")


main()
