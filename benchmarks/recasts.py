"""Counts the casts of a training step at O1 that repeat an earlier cast of the same forward.

Run as `python benchmarks/recasts.py [--half float16|bfloat16] [--only NAME,...] [--json FILE]`. Needs transformers.
Runs one step of each model, and prints as Markdown how many casts a store of activations' casts, kept for one forward,
would save. It counts and does not time, so that it runs beside anything. Asserts only that it saw the casts that
`amp.report` counts; must not change a cast.

A cast repeats an earlier one if both are made in the same forward, the loss included, and to the same type. Nothing may
have been written to the tensor in between: its version counter must be the same. The benchmark counts by two
definitions of "the same":

- *object*: the same `torch.Tensor`;
- *memory*: any tensor all of whose elements lie in the memory that one earlier cast has read, such as a view or what
  `detach` returns. A store would have to find the view of the kept cast. This is the upper bound.

Weights (`torch.nn.Parameter`) are counted apart: amp keeps their casts already. Bytes are those that a cast reads and
writes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ampatch import amp
from ampatch.casting import cast_observers
from ampatch.diagnostics.recorder.functions import name_of

# The proportions are those of usual models: the inner layers of a transformer have four times the features, and a
# text has more tokens than a head has features.
_TEXT: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
}
_VISION: dict[str, Any] = {
    **{name: _TEXT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    "image_size": 64,
    "patch_size": 8,
}
_SOUND: dict[str, Any] = {
    **{name: _TEXT[name] for name in _TEXT if name not in ("vocab_size", "max_position_embeddings")},
    "vocab_size": 32,
    "layerdrop": 0.0,  # it leaves out layers at random
    "conv_dim": [64, 64, 64],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

#: Architectures, each with the head that trains it, and its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("ForMaskedLM", _TEXT),
    "DebertaV2": ("ForMaskedLM", {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "GPT2": (
        "LMHeadModel",
        {"vocab_size": 2048, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128, "use_cache": False},
    ),
    "Llama": ("ForCausalLM", {**_TEXT, "num_key_value_heads": 2, "use_cache": False}),
    "Mixtral": (
        "ForCausalLM",
        {**_TEXT, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False},
    ),
    "T5": (
        "ForConditionalGeneration",
        {
            "vocab_size": 2048,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 512,
            "num_layers": 4,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    "ViT": ("ForImageClassification", _VISION),
    "ConvNext": ("ForImageClassification", {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 3, 1]}),
    "ResNet": ("ForImageClassification", {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128]}),
    "Wav2Vec2": ("ForCTC", _SOUND),
}


def model_and_inputs(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model with random weights, in training, with a batch and its labels."""
    torch.manual_seed(0)
    head, sizes = MODELS[name]
    model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**sizes)).train()
    if head == "ForImageClassification":
        return model, {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(2, (4,))}
    if head == "ForCTC":
        return model, {"input_values": torch.randn(2, 4000), "labels": torch.randint(1, 32, (2, 9))}
    words = torch.randint(3, 2048, (4, 64))
    return model, {"input_ids": words, "labels": words}


@dataclass
class Count:
    """Casts, and the bytes that they read and write."""

    casts: int = 0
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.casts += 1
        self.nbytes += nbytes


@dataclass
class Found:
    """What one step cast.

    Attributes:
        model: name of the architecture.
        weights: casts of parameters, which amp keeps.
        activations: all other casts.
        same_object: those of them that repeat a cast of the same tensor.
        same_memory: those that repeat a cast of the same memory, the former included.
        widened: casts of activations to float32, which the blacklist asks for.
        widened_again: those of them in `same_memory`.
        functions: numbers of casts in `same_memory`, by function.
    """

    model: str
    weights: Count = field(default_factory=Count)
    activations: Count = field(default_factory=Count)
    same_object: Count = field(default_factory=Count)
    same_memory: Count = field(default_factory=Count)
    widened: Count = field(default_factory=Count)
    widened_again: Count = field(default_factory=Count)
    functions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Read:
    """A tensor that was cast. It is held, so that neither its id nor its memory is used again in this forward."""

    tensor: Tensor
    version: int
    offsets: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Read:
        return cls(tensor, tensor._version, _offsets(tensor))

    def covers(self, other: _Read) -> bool:
        """Returns True if all elements of the other tensor are among those of this one, at the same version."""
        if self.version != other.version or self.tensor.dtype is not other.tensor.dtype:
            return False
        if self.tensor is other.tensor or torch.equal(self.offsets, other.offsets):
            return True
        # The ends first: whether each element is among the others takes a hundred times longer.
        low, high = torch.aminmax(self.offsets)
        inside = (other.offsets.min() >= low) & (other.offsets.max() <= high)
        return bool(inside) and bool(torch.isin(other.offsets, self.offsets).all())


def _offsets(tensor: Tensor) -> Tensor:
    """Returns the places of a tensor's elements in its storage, in elements."""
    places = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places


class Counting:
    """Counts the casts that `amp.report` hears of, and hands each on to it; a `cast_observers.CastObserver`."""

    def __init__(self, report: cast_observers.CastObserver, found: Found) -> None:
        self._report, self._found = report, found
        self._reads: dict[tuple[int, torch.dtype], list[_Read]] = {}
        self._functions: list[Any] = []

    def is_calling(self, function: object) -> bool:
        return self._report.is_calling(function)

    def call(self, function: Any, wrapper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._functions.append(function)
        try:
            return self._report.call(function, wrapper, args, kwargs)
        finally:
            self._functions.pop()

    def hit(self, kept: list[Tensor]) -> None:
        self._report.hit(kept)

    def cast(self, tensor: Tensor, make: Callable[[], Any]) -> Any:
        made = self._report.cast(tensor, make)
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            for each in [made] if isinstance(made, Tensor) else made:
                nbytes = each.nbytes + each.numel() * tensor.element_size()
                if isinstance(tensor, nn.Parameter):
                    self._found.weights.add(nbytes)
                else:
                    self._note(tensor, each.dtype, nbytes)
        return made

    def _note(self, tensor: Tensor, dtype: torch.dtype, nbytes: int) -> None:
        found, read = self._found, _Read.of(tensor)
        before = self._reads.setdefault((tensor.untyped_storage()._cdata, dtype), [])
        covering = [each for each in before if each.covers(read)]
        again = bool(covering)
        found.activations.add(nbytes)
        if any(each.tensor is tensor for each in covering):
            found.same_object.add(nbytes)
        if again:
            found.same_memory.add(nbytes)
            name = name_of(self._functions[-1]) if self._functions else "the model's inputs"
            found.functions[name] = found.functions.get(name, 0) + 1
        if dtype is torch.float32:
            found.widened.add(nbytes)
            if again:
                found.widened_again.add(nbytes)
        before.append(read)


def counted(name: str, model: nn.Module, inputs: dict[str, Tensor], half: torch.dtype) -> Found:
    """Returns what one training step of a model casts at O1; the model's output has the loss as an attribute."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", half_dtype=half, verbosity=0)
    found = Found(name)
    try:
        with amp.report() as report:
            watching = cast_observers.observer
            assert watching is not None
            cast_observers.observer = Counting(watching, found)
            try:
                loss = model(**inputs).loss
            finally:
                cast_observers.observer = watching
            seen = report.to_dict()["totals"]["casts"]  # before the backward pass, whose casts it counts as well
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        assert seen == found.weights.casts + found.activations.casts, (name, seen, found)
    finally:
        amp.deinitialize()
    return found


def _share(part: Count, whole: Count) -> str:
    if not whole.casts:
        return "none"
    return f"{part.casts} ({part.casts / whole.casts:.0%}; {part.nbytes / whole.nbytes:.0%})"


def table(rows: list[Found]) -> str:
    """Returns the counts as a table in Markdown; in brackets the shares in casts and in bytes."""
    lines = [
        "| model | weights | activations | again: same object | again: same memory | to float32 | of them again |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        sizes = [f"{each.casts}, {each.nbytes / 1e6:.1f} MB" for each in (found.weights, found.activations)]
        repeated = [_share(each, found.activations) for each in (found.same_object, found.same_memory)]
        widened = [_share(found.widened, found.activations), _share(found.widened_again, found.activations)]
        lines.append("| " + " | ".join([found.model, *sizes, *repeated, *widened]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    names = options.only.split(",") if options.only else list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"found {', '.join(unknown)} after --only; expected names of {', '.join(MODELS)}.")
    rows = [counted(name, *model_and_inputs(name), getattr(torch, options.half)) for name in names]
    print(table(rows))
    print()
    for found in rows:
        most = ", ".join(f"{name} {number}" for name, number in Counter(found.functions).most_common(4))
        print(f"{found.model}: {most or 'no cast is repeated'}")
    if options.json:
        options.json.write_text(json.dumps([asdict(found) for found in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
