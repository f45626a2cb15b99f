"""`apex.amp`: all of `ampatch.amp`, and those of Apex's submodules that scripts use.

The modules here own the differences from `ampatch.amp`: the default half dtype, and the effect of a second
`initialize`. They also own the cast lists that scripts edit in place, and the state that scripts read and write.
"""

from __future__ import annotations

from ampatch import amp
from ampatch.amp import *  # noqa: F403 - every public name, including future ones
from ampatch.apex.amp import lists
from ampatch.apex.amp._amp_state import _amp_state
from ampatch.apex.amp.frontend import *  # noqa: F403 - in place of those of `ampatch.amp`
from ampatch.apex.amp.handle import AmpHandle
from ampatch.apex.amp.opt import OptimWrapper

__all__ = ["AmpHandle", "OptimWrapper", "_amp_state", "lists"]
__all__ += [name for name in amp.__all__ if name not in __all__]
