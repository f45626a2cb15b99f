"""Counts the gradients of a real run by exponent, for the histogram in "Choosing a level".

``python docs/ampatch_docs/gradients.py`` trains the small transformer of examples/report.py for sixty steps. It takes a
quarter of a minute, and writes docs/drawings/gradients.json. ``make drawings`` draws it.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import torch

from ampatch import amp

DOCS = Path(__file__).parents[1]


def counted(steps: int = 60) -> dict[str, object]:
    """Returns the number of gradients' elements by exponent, summed over steps at O1 in float16."""
    torch.manual_seed(0)
    model = runpy.run_path(str(DOCS.parent / "examples" / "report.py"))["Cipher"](32, True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", half_dtype="float16", verbosity=0)
    try:
        with amp.report() as report:
            for _ in range(steps):
                text = torch.randint(30, (64, 16))
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(text).flatten(0, 1), (text.flatten() + 1) % 30)
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
        found = report.to_dict()["underflow"]
    finally:
        amp.deinitialize()
    return {
        "title": "Elements of the gradients of a small transformer, by size",
        "scale": int(found["scale"]),
        "elements": found["elements"],
        "zeros": found["zeros"],
        "exponents": [[row["exponent"], row["elements"]] for row in found["exponents"]],
    }


if __name__ == "__main__":
    (DOCS / "drawings" / "gradients.json").write_text(json.dumps(counted()) + "\n", encoding="utf-8")
