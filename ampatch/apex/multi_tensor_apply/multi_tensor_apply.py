"""The object through which scripts call the kernels of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor


class MultiTensorApply:
    """Calls kernels on lists of tensors.

    Args:
        chunk_size: handed on; ampatch's kernels cut tensors up as they see fit.

    Attributes:
        available: whether there are kernels to call. Always.
        warned: whether it was said that there are none.
    """

    available: ClassVar[bool] = True
    warned: ClassVar[bool] = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing, as there are always kernels to call; Apex raises here where it was built without."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        """Returns what ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)`` returns.

        Args:
            op: a function of `ampatch.apex.amp_C`, or one like these.
            noop_flag_buffer: int32, of one element.
            tensor_lists: what the function takes.
            args: what it takes beside.
        """
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
