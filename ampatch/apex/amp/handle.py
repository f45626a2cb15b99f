"""`apex.amp.handle`: the handle that `init` returns, and its methods from before 2019, which raise."""

from __future__ import annotations

from typing import NoReturn

from ampatch import amp
from ampatch.amp import disable_casts, scale_loss
from ampatch.errors import UsageError
from ampatch.runtime import runtime
from ampatch.session import Session

__all__ = ["AmpHandle", "disable_casts", "scale_loss"]

#: What to write instead of the API that Apex itself dropped in 2019.
NEW_FORM = (
    "Type: model, optimizer = amp.initialize(model, optimizer, opt_level='O1'), and in each iteration: with "
    "amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward(), then optimizer.step()."
)


class AmpHandle(amp.Handle):
    """Undoes `init`: by `deactivate`, or at the end of a ``with`` block."""

    def __init__(self, session: Session | None) -> None:  # the argument's promised name
        super().__init__(session)

    def is_active(self) -> bool:
        """Returns True if amp is on."""
        return self._session is not None and runtime.live is not None

    # Scripts use Apex's names.
    _deactivate = amp.Handle.deactivate
    _disable_casts = staticmethod(amp.disable_casts)
    _clear_cache = staticmethod(amp.clear_cache)

    def scale_loss(self, *_: object, **__: object) -> NoReturn:
        """Raises an error that says what to write instead.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"handle.scale_loss is the API of 2018, which handles no master weights. {NEW_FORM}")

    def wrap_optimizer(self, *_: object, **__: object) -> NoReturn:
        """Raises an error that says what to write instead.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"handle.wrap_optimizer is the API of 2018; optimizers need no wrapper now. {NEW_FORM}")
