"""``torch.cuda`` as a table: the replacement of each of its names while the CPU stands in.

Owns the replacements of functions that query or control a GPU. Must never let a call reach torch's CUDA code, which
would fail with a message about torch's build. Callables that this module does not list raise an error with their name.
"""

from __future__ import annotations

import os
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.cuda.comm
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler
from torch import Tensor

from ampatch.cuda_on_cpu import streams
from ampatch.cuda_on_cpu.replacements import Replacements
from ampatch.errors import UsageError
from ampatch.torch_private import devices

NAME = "CPU (in place of a GPU: ampatch run --cpu)"

#: GPUs of this capability have Tensor Cores for halves. Newer ones make scripts choose kernels that the CPU lacks.
CAPABILITY = (7, 0)


def always(answer: object) -> Callable[..., Any]:
    """Returns a function that returns ``answer`` for any arguments."""
    return lambda *args, **kwargs: answer


def fresh(kind: Callable[[], object]) -> Callable[..., Any]:
    """Returns a function that returns a new, empty ``kind`` for any arguments."""
    return lambda *args, **kwargs: kind()


def _main_memory() -> tuple[int, int]:
    """Returns free and total main memory in bytes, in place of a GPU's memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _properties(device: Any = None) -> types.SimpleNamespace:
    major, minor = CAPABILITY
    return types.SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=_main_memory()[1],
        multi_processor_count=os.cpu_count() or 1,
        max_threads_per_multi_processor=1,
        warp_size=32,
        is_integrated=True,
        is_multi_gpu_board=False,
        gcnArchName="",
    )


def _set_rng_state(new_state: Tensor, device: Any = None) -> None:
    expected = torch.default_generator.get_state().numel()
    if new_state.numel() != expected:
        raise UsageError(
            f"found a GPU generator's state of {new_state.numel()} bytes; expected the CPU generator's of {expected} "
            "bytes. Leave out the generator's state when resuming with `ampatch run --cpu`."
        )
    torch.default_generator.set_state(new_state)


def _set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    for state in new_states:
        _set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _new_seed() -> None:
    torch.default_generator.seed()


_SILENT = (
    *("caching_allocator_enable", "check_error", "empty_cache", "init", "ipc_collect", "set_sync_debug_mode"),
    *("set_per_process_memory_fraction", "reset_accumulated_host_memory_stats", "reset_accumulated_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_host_memory_stats"),
    *("reset_peak_memory_stats", "synchronize"),
)
_ZERO = (
    *("max_memory_allocated", "max_memory_cached", "max_memory_reserved", "memory_allocated", "memory_cached"),
    *("memory_reserved", "device_memory_used", "get_sync_debug_mode"),
    *("clock_rate", "memory_usage", "power_draw", "temperature", "utilization"),
)

#: Replacement of each name of ``torch.cuda``.
STAND_INS: dict[str, object] = {
    **{name: always(None) for name in _SILENT},
    **{name: always(0) for name in _ZERO},
    **{name: always(True) for name in ("is_available", "is_bf16_supported")},
    **{name: always(False) for name in ("is_tf32_supported", "is_current_stream_capturing", "can_device_access_peer")},
    "device_count": streams.device_count,
    "current_device": streams.current_device,
    "set_device": streams.set_device,
    "device": streams.DeviceGuard,
    "device_of": streams.DeviceOf,
    "Stream": streams.Stream,
    "Event": streams.Event,
    "StreamContext": streams.StreamContext,
    "stream": streams.StreamContext,
    "set_stream": streams.set_stream,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "get_device_name": always(NAME),
    "get_device_capability": always(CAPABILITY),
    "get_device_properties": _properties,
    "get_per_process_memory_fraction": always(1.0),
    "get_allocator_backend": always("native"),
    # Unlike a dict, a Counter gives 0 for missing statistics.
    **{name: fresh(Counter) for name in ("memory_stats", "host_memory_stats")},
    **{name: fresh(dict) for name in ("memory_stats_as_nested_dict", "host_memory_stats_as_nested_dict")},
    **{name: fresh(list) for name in ("memory_snapshot", "get_arch_list")},
    "memory_summary": always(f"{NAME}: no figures of memory"),
    "mem_get_info": lambda device=None: _main_memory(),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), _seed),
    **dict.fromkeys(("seed", "seed_all"), _new_seed),
    "initial_seed": lambda: torch.initial_seed(),  # noqa: PLW0108 - Dynamo wants each builtin under one name only
    "get_rng_state": lambda device=None: torch.default_generator.get_state(),
    "get_rng_state_all": lambda: [torch.default_generator.get_state() for _ in range(streams.device_count())],
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": _set_rng_state_all,
    # Scripts that run under nsys start and stop its profiler.
    "cudart": always(types.SimpleNamespace(cudaProfilerStart=always(0), cudaProfilerStop=always(0))),
}

#: Names that are not replaced: they need no GPU, or report themselves that there is none.
_LEFT = {"CudaError", "DeferredCudaCallError", "cudaStatus", "get_gencode_flags", "is_initialized"}

_NVTX = {name: always(0) for name in ("range_push", "range_pop", "range_start")} | {
    name: always(None) for name in ("range_end", "mark")
}

#: Functions of submodules that raise if a script calls them.
_REFUSED: dict[types.ModuleType, tuple[str, ...]] = {
    torch.cuda.comm: ("broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced", "scatter"),
    torch.cuda.nccl: ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter", "unique_id"),
}


def install(replacements: Replacements) -> None:
    """Replaces the names of ``torch.cuda`` by those of the table, and unlisted callables by ones that raise."""
    for name, stand_in in STAND_INS.items():
        _put(replacements, torch.cuda, name, stand_in)
    for name, stand_in in _NVTX.items():
        _put(replacements, torch.cuda.nvtx, name, stand_in)
    _put(replacements, torch.cuda.nccl, "version", always((0, 0, 0)))
    _put(replacements, torch.cuda.memory, devices.RECORD_MEMORY_HISTORY, always(None))
    for name in ("start", "stop"):
        _put(replacements, torch.cuda.profiler, name, always(None))
    for name in _unknown():
        _put(replacements, torch.cuda, name, refusal(f"torch.cuda.{name}"))
    for module, names in _REFUSED.items():
        for name in names:
            _put(replacements, module, name, refusal(f"torch.cuda.{module.__name__.rpartition('.')[2]}.{name}"))
    generators = (torch.default_generator,) * streams.device_count()
    replacements.ledger.set(torch.cuda, "default_generators", generators)
    _put(replacements, torch.cuda, "_lazy_init", _refuse_to_start)
    # torch.accelerator calls is_available too. A CUDA build would then go on in C++, to a GPU that does not exist.
    for name, answer in ((devices.GET_ACCELERATOR_OR_NONE, None), (devices.GET_ACCELERATOR, torch.device("cpu"))):
        if hasattr(devices.EXTENSION, name):
            replacements.ledger.set(devices.EXTENSION, name, always(answer))


def _put(replacements: Replacements, owner: Any, name: str, stand_in: object) -> None:
    # Submodules of torch.cuda define its functions and use them too, so replace them everywhere.
    if hasattr(owner, name):
        replacements.everywhere(getattr(owner, name), stand_in)


def _unknown() -> list[str]:
    """Returns callable names of ``torch.cuda`` that the table lacks, such as those of newer versions of torch."""
    mine = STAND_INS.keys() | _LEFT
    return [
        name
        for name in torch.cuda.__all__
        if name not in mine and not name.endswith(("Tensor", "Storage")) and callable(getattr(torch.cuda, name, None))
    ]


def refusal(name: str) -> type:
    """Returns a replacement that raises when called, for a name that the CPU cannot stand in for.

    The replacement is a class, since scripts may use the name as a class.

    Raises:
        UsageError: the replacement was called.
    """

    class Refused:
        def __new__(cls, *_args: object, **_kwargs: object) -> Refused:
            raise UsageError(
                f"{name} was called, and the CPU cannot stand in for it (`ampatch run --cpu`). Leave the call out "
                "there, or run on a machine with a GPU."
            )

    return Refused


def _refuse_to_start() -> None:
    """Raises in place of the function that starts CUDA; C++ calls it to create a tensor on a GPU after all."""
    raise UsageError(
        "something asked torch for a GPU in a way that the CPU cannot stand in for (`ampatch run --cpu`); the line is "
        "in the traceback. Ask for device='cpu' there, or run on a machine with a GPU."
    )
