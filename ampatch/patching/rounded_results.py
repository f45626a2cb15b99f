"""Warns if a model returns a result that a part in float32 has computed, and that amp has rounded to half.

Owns which half tensors are such results. Must keep no tensor alive: a model may have such a part in each layer.
"""

from __future__ import annotations

import weakref
from dataclasses import fields, is_dataclass

from torch import Tensor, nn

from ampatch.casting.nested import tensors_in
from ampatch.errors import warn

# Half tensors by id, each with the part that computed it. An entry goes with its tensor.
_rounded: dict[int, tuple[weakref.ref[Tensor], weakref.ref[nn.Module]]] = {}
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note(part: nn.Module, result: object, rounded: object) -> None:
    """Notes the tensors in a part's result that have been cast to half.

    Args:
        part: a part in float32.
        result: what its forward returned.
        rounded: the result for the code around it.
    """
    if result is rounded or part in _told:
        return
    known = {id(tensor) for tensor in tensors_in(result)}
    of_part = weakref.ref(part)
    for tensor in tensors_in(rounded):
        if id(tensor) not in known:

            def forget(_: object, key: int = id(tensor)) -> None:
                _rounded.pop(key, None)

            _rounded[id(tensor)] = weakref.ref(tensor, forget), of_part


def tell(model: nn.Module, result: object) -> None:
    """Warns, once for each part, if a model's result has a tensor that `note` knows, or a view of one."""
    if not _rounded:
        return
    if is_dataclass(result) and not isinstance(result, dict):
        result = [getattr(result, field.name, None) for field in fields(result)]
    for tensor in tensors_in(result):
        for each in (tensor, tensor._base):
            found, of_part = _rounded.get(id(each), (None, None))
            if each is None or found is None or of_part is None or found() is not each:
                continue
            part = of_part()
            name = next((name for name, module in model.named_modules() if module is part), None)
            if part is not None and name and part not in _told:
                _told.add(part)
                warn(
                    f"{name!r} of this {type(model).__name__} computes in float32, but amp casts its result to "
                    f"{each.dtype}, and the model returns this rounded result. To keep its float32 digits, name it in "
                    f"amp.initialize(..., float32_outputs=[{name!r}]). To accept the rounding, filter this AmpWarning."
                )
