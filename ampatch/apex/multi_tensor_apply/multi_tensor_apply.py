"""The object through which scripts call the kernels of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor


class MultiTensorApply:
    """Calls kernels on lists of tensors.

    Args:
        chunk_size: number passed to the kernels; ampatch's kernels ignore it.

    Attributes:
        available: True if there are kernels to call; always True.
        warned: True if a warning about missing kernels was given; always False.
    """

    available: ClassVar[bool] = True
    warned: ClassVar[bool] = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Does nothing: ampatch always has kernels. Apex raises here if it was built without them."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        """Returns what ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)`` returns.

        Args:
            op: function of `ampatch.apex.amp_C`, or one with the same signature.
            noop_flag_buffer: int32 tensor of one element.
            tensor_lists: lists of tensors that the function takes.
            args: further arguments of the function.
        """
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
