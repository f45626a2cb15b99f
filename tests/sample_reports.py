"""Reports as plain data, made up: an empty one, one of each entry, and ones of transformers of any size.

Their numbers fit one another as those of a real report do: functions and lines sum up to the totals.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from ampatch.diagnostics.report.exponents import Histogram, as_dict

#: Source lines that a page must escape.
SOURCES = (
    "x = self.attention(self.norm(x))",
    'if x < y & "z": x = x @ w  # </script><script>alert(1)</script>',
    "y = torch.nn.functional.softmax(scores, dim=-1)",
    "h = self.fc2(self.act(self.fc1(h)))",
    "loss = F.cross_entropy(logits, labels) * 0.5 if use_loss else other_loss(logits, labels, reduction='mean')",
)
_FUNCTIONS = (
    ("torch.nn.functional.linear", "whitelist", ("float32", "float32", "float32"), "float16"),
    ("torch.nn.functional.scaled_dot_product_attention", "whitelist", ("float16",) * 3, "float16"),
    ("torch.Tensor.__matmul__", "whitelist", ("float16", "float32"), "float16"),
    ("torch.nn.functional.layer_norm", "blacklist", ("float16", "float32", "float32"), "float32"),
    ("torch.nn.functional.softmax", "blacklist", ("float16",), "float32"),
    ("torch.nn.functional.cross_entropy", "blacklist", ("float16", "int64"), "float32"),
    ("torch.Tensor.__add__", "promote", ("float16", "float32"), "float32"),
    ("torch.nn.functional.gelu", None, ("float16",), "float16"),
    ("torch.nn.functional.dropout", None, ("float32",), "float32"),
)


def empty(**changes: Any) -> dict[str, Any]:
    """Returns the report of a block in which nothing ran, amp never set up."""
    return {
        "format": "ampatch report",
        "version": 1,
        "about": {"ampatch": "0.1.0", "torch": "2.13.0", "devices": [], "command": "", "began": "2026-11-25T10:00:00"},
        "settings": None,
        "cost": {"seconds": 0.0, "recording_seconds": 0.0, "operators": 0},
        "totals": numbers(0),
        "functions": [],
        "lines": [],
        "misaligned": [],
        "modules": [],
        "steps": [],
        "underflow": None,
        "comparison": None,
        "advice": [],
        **changes,
    }


#: The numbers of the one function and line in `small`.
NUMBERS = {"calls": 4, "casts": 8, "cast_bytes": 4096, "cast_seconds": 0.1, "cache_hits": 2, "cache_hit_bytes": 64}


def small(**changes: Any) -> dict[str, Any]:
    """Returns a report with one function, line and module, and three steps."""
    linear = {
        "name": "torch.nn.functional.linear",
        "rule": "whitelist",
        "types": [{"in": ["float32", "float32"], "out": ["float16"], "calls": 4}],
        **NUMBERS,
        "undone": 0,
    }
    line = {"file": "m.py", "line": 3, "source": "x = fc(x)", "function": "forward", "functions": {}, **NUMBERS}
    module = {
        "name": "fc",
        "class": "Linear",
        "parent": None,
        "in": {"float32": 1},
        "out": {"float16": 1},
        "operators": {"float16": 1},
        "activation_bytes": {"float16": 512},
        "weight_bytes": {"float32": 256},
        "saved_bytes": 512,
    }
    found = {
        "settings": {"opt_level": "O1"},
        "cost": {"seconds": 1.0, "recording_seconds": 0.1, "operators": 9},
        "totals": dict(NUMBERS),
        "functions": [linear],
        "lines": [line],
        "modules": [module],
        "steps": [step(number) for number in (1, 2, 3)],
    }
    return empty(**found | changes)


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Returns a step that was not skipped."""
    usual = {"loss_id": 0, "scale": 65536.0, "overflow": False, "skipped": False, "gradient_norm": 1.5}
    return {"step": number, **usual, **changes}


def numbers(calls: int, casts: int = 0, size: int = 0, hits: int = 0) -> dict[str, Any]:
    """Returns the numbers of a function or a line, of which each cast writes `size` bytes."""
    seconds = casts * size * 1.1e-9
    return {
        "calls": calls,
        "casts": casts,
        "cast_bytes": casts * size,
        "cast_seconds": seconds,
        "cache_hits": hits,
        "cache_hit_bytes": hits * size // 2,
    }


def full(blocks: int = 2, steps: int = 120, seed: int = 0) -> dict[str, Any]:
    """Returns the report of a transformer.

    Args:
        blocks: number of its blocks, of 9 modules each.
        steps: number of its training steps.
        seed: of the numbers.
    """
    draw = random.Random(seed)
    functions = [
        {
            "name": name,
            "rule": rule,
            "types": [
                {"in": list(taken), "out": [given], "calls": blocks * steps},
                *([{"in": ["float16", "float16"], "out": ["float16"], "calls": blocks}] if index % 3 == 0 else []),
            ],
            **numbers(
                blocks * steps * (9 - index),
                0 if rule is None else blocks * steps * (20 - 2 * index) + index,
                524_288 >> index,
                0 if index else blocks * steps * 5,
            ),
            "undone": 3 * blocks * steps if index in (3, 4) else 0,
        }
        for index, (name, rule, taken, given) in enumerate(_FUNCTIONS)
    ]
    lines = [
        {
            "file": "/home/ada/project/train.py" if index % 3 == 0 else "/home/ada/project/model/transformer_layers.py",
            "line": 17 + 23 * index,
            "source": SOURCES[index % len(SOURCES)],
            "function": "train_one_epoch" if index % 3 == 0 else "forward",
            "functions": {row["name"]: row["calls"], "torch.Tensor.view": 3 * index + 1},
            **{key: row[key] for key in numbers(0)},
        }
        for index, row in enumerate(functions)
    ]
    product = {"function": "torch.nn.functional.linear", "file": "/home/ada/project/train.py", "line": 86}
    found = empty(
        about={
            "ampatch": "0.1.0",
            "torch": "2.13.0",
            "devices": ["NVIDIA H100 80GB HBM3", "cpu"],
            "command": 'ampatch run --report r.html train.py --name "<b>bold & brave</b>" --lr 3e-4',
            "began": "2026-11-25T10:00:07",
        },
        settings={
            "set_up_by": "amp.initialize",
            "opt_level": "O1",
            "half_dtype": "float16",
            "patch_torch_functions": True,
            "cast_model_type": None,
            "keep_batchnorm_fp32": None,
            "keep_fp32": ["head", "blocks.0.norm1"],
            "master_weights": False,
            "cast_lists": ["casts.yaml"],
            "loss_scale": "dynamic",
            "init_scale": 65536.0,
            "scale_window": 2000,
        },
        cost={"seconds": 42.173, "recording_seconds": 2.0871, "operators": 4321 * blocks * steps},
        totals={key: sum(row[key] for row in functions) for key in numbers(0)},
        functions=functions,
        lines=lines,
        misaligned=[
            {
                **product,
                "source": SOURCES[1],
                "module": "head",
                "dtype": "float16",
                "size": [4096, 768, 50257],
                "calls": steps,
                "pads": [4096, 768, 50264],
            }
        ],
        modules=list(_modules(blocks, draw)),
        steps=list(_steps(steps, draw)),
        underflow=_underflow(blocks, draw),
        advice=[
            _advice(
                "underflow",
                "8.7 % of the gradients' elements underflow in float16. Start at a greater scale: "
                "amp.initialize(..., init_scale=1048576).",
            ),
            _advice(
                "misaligned",
                "Pad the output of this product from 50257 to 50264, a multiple of 8, so that tensor cores can "
                "compute it.",
                **product,
            ),
            _advice(
                "undone",
                "Half results are cast to float32 here and back to half at once: put softmax next to "
                "cross_entropy, or take it from the blacklist.",
                file=lines[1]["file"],
                line=lines[1]["line"],
                function="torch.nn.functional.softmax",
            ),
        ],
    )
    found["notes"] = ["Calls of rank 1 to 3 are not in this report.", "2 steps of a captured CUDA graph were not seen."]
    return found


def _advice(kind: str, text: str, **place: Any) -> dict[str, Any]:
    return {"kind": kind, "text": text, "file": None, "line": None, "function": None, **place}


def _modules(blocks: int, draw: random.Random) -> Any:
    size = 25_165_824
    ids, half = {"int64": 240}, {"float16": 240}

    def module(name: str, kind: str, parent: str | None, *, takes: Any = None, **changes: Any) -> dict[str, Any]:
        usual = {"in": takes or {"float32": 240}, "out": {"float32": 240}, "operators": {}, "activation_bytes": {}}
        usual |= {"weight_bytes": {}, "saved_bytes": 0}
        return {"name": name, "class": kind, "parent": parent, **usual, **changes}

    def in_half(name: str, kind: str, parent: str, size: int, calls: int = 240, **changes: Any) -> dict[str, Any]:
        numbers = {"operators": {"float16": calls}, "activation_bytes": {"float16": size}, "saved_bytes": size}
        return module(name, kind, parent, out=half, **numbers | changes)

    def linear(name: str, parent: str, size: int) -> dict[str, Any]:
        size += draw.randrange(0, size // 3)
        return in_half(name, "Linear", parent, size, 480, weight_bytes={"float32": size // 4 * 3})

    def norm(name: str, parent: str) -> dict[str, Any]:
        operators = {"float32": 240, "float16": 2}
        activations = {"float32": size + draw.randrange(1000), "float16": 640}
        numbers = {"operators": operators, "activation_bytes": activations, "saved_bytes": 640}
        return module(name, "LayerNorm", parent, weight_bytes={"float32": 6144}, **numbers)

    yield module("", "GPT", None, takes=ids, operators={"float32": 240})
    memory = {"activation_bytes": {"float32": size}, "weight_bytes": {"float32": 154_389_504}}
    yield module("wte", "Embedding", "", takes=ids, operators={"float32": 240}, **memory)
    yield module("blocks", "ModuleList", "", **{"in": {}}, out={})
    for index in range(blocks):
        own = f"blocks.{index}"
        attention, mlp = f"{own}.attention", f"{own}.mlp"
        yield module(own, "Block", "blocks", operators={"float32": 480}, activation_bytes={"float32": size * 2})
        yield norm(f"{own}.norm1", own)
        operators = {"float16": 960, "float32": 12}
        yield in_half(attention, "CausalSelfAttention", own, size // 2, operators=operators)
        yield linear(f"{attention}.qkv", attention, size // 2 * 3)
        yield linear(f"{attention}.out", attention, size // 2)
        yield norm(f"{own}.norm2", own)
        yield module(mlp, "Sequential", own, out=half)
        yield linear(f"{mlp}.0", mlp, size * 2)
        yield in_half(f"{mlp}.1", "GELU", mlp, size * 2, takes=half)
        yield linear(f"{mlp}.2", mlp, size // 2)
    yield norm("norm", "")
    yield linear("head", "", size * 12)


def _steps(count: int, draw: random.Random) -> Any:
    scale, since = 65536.0, 0
    for number in range(1, count + 1):
        overflow = number in (1, 2) or (scale >= 65536 and draw.random() < 0.02)
        norm = 8.0 / math.sqrt(number / 10 + 1) * math.exp(draw.gauss(0, 0.25))
        shown = None if overflow else norm
        yield step(number, scale=scale, overflow=overflow, skipped=overflow, gradient_norm=shown)
        since = 0 if overflow else since + 1
        if overflow:
            scale /= 2
        elif since == max(20, count // 25):
            scale, since = scale * 2, 0


def _underflow(blocks: int, draw: random.Random) -> dict[str, Any]:
    def histogram(middle: float, width: float, elements: int) -> Histogram:
        exponents = range(-48, 2)
        shares = [math.exp(-(((exponent - middle) / width) ** 2)) for exponent in exponents]
        counts = {
            exponent: int(share / sum(shares) * elements) + draw.randrange(2)
            for exponent, share in zip(exponents, shares, strict=True)
        }
        return Histogram(elements // 50, {exponent: count for exponent, count in counts.items() if count})

    found = {
        f"blocks.{index}.{name}.{kind}": histogram(
            (-23 if "attention" in name else -19) - 4 * draw.random(), 5, elements + draw.randrange(999)
        )
        for index in range(blocks)
        for name in ("attention.qkv", "attention.out", "mlp.0", "mlp.2")
        for kind, elements in (("weight", 2_359_296), ("bias", 2304))
    }
    return as_dict(found, 4096.0, torch.float16, 120)
