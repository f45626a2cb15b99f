"""What a report holds, as plain data, for tests of what reads reports."""

from __future__ import annotations

from typing import Any

NUMBERS = {"calls": 4, "casts": 8, "cast_bytes": 4096, "cast_seconds": 0.1, "cache_hits": 2, "cache_hit_bytes": 64}


def report(**changes: Any) -> dict[str, Any]:
    linear = {
        "name": "torch.nn.functional.linear",
        "rule": "whitelist",
        "types": [{"in": ["float32", "float32"], "out": ["float16"], "calls": 4}],
        **NUMBERS,
        "undone": 0,
    }
    return {
        "format": "ampatch report",
        "version": 1,
        "about": {"ampatch": "0.1.0", "torch": "2.13.0", "devices": ["cpu"], "command": "", "began": "2026-01-01"},
        "settings": {"opt_level": "O1"},
        "cost": {"seconds": 1.0, "recording_seconds": 0.1, "operators": 9},
        "totals": dict(NUMBERS),
        "functions": [linear],
        "lines": [
            {"file": "m.py", "line": 3, "source": "x = fc(x)", "function": "forward", "functions": {}, **NUMBERS}
        ],
        "misaligned": [],
        "modules": [
            {
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
        ],
        "steps": [step(number) for number in (1, 2, 3)],
        "underflow": None,
        "comparison": None,
        "advice": [],
        **changes,
    }


def step(number: int, **changes: Any) -> dict[str, Any]:
    usual = {"loss_id": 0, "scale": 65536.0, "overflow": False, "skipped": False, "gradient_norm": 1.5}
    return {"step": number, **usual, **changes}
