"""`apex.amp`: all of `ampatch.amp`, and the submodules of Apex's that scripts use.

The modules here own the differences from `ampatch.amp`: the default half dtype, and the effect of a second
`initialize`. They also own the cast lists that scripts edit in place, and the state that scripts read and write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampatch import amp

if TYPE_CHECKING:
    from ampatch.amp import *  # noqa: F403 - every public name, including future ones
from ampatch.apex.amp import lists
from ampatch.apex.amp._amp_state import _amp_state
from ampatch.apex.amp.frontend import (
    init,
    initialize,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampatch.apex.amp.handle import AmpHandle
from ampatch.apex.amp.opt import OptimWrapper

if not TYPE_CHECKING:  # without the names that ampatch.amp imports on use
    globals().update({name: vars(amp)[name] for name in amp.__all__ if name in vars(amp) and name not in globals()})

__all__ = ["AmpHandle", "OptimWrapper", "_amp_state", "init", "initialize", "lists"]
__all__ += ["register_bfloat16_function", "register_float_function"]
__all__ += ["register_half_function", "register_promote_function"]
__all__ += [name for name in amp.__all__ if name not in __all__]


def __getattr__(name: str) -> Any:
    if name in amp.__all__:
        return getattr(amp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
