"""The private parts of torch: only `ampatch.torch_private` names them, and each does what its comment says.

Run these tests first under another torch: the failures name what it has moved or changed.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import functools
import gc
import importlib
import importlib.util
import operator
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from seen_calls import Functions, Operators
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import checkpoint
from torch.utils.flop_counter import flop_registry

from ampatch.torch_private import autograd as private_autograd
from ampatch.torch_private import (
    compilers,
    conventions,
    devices,
    distributed,
    foreach,
    modes,
    modules,
    operators,
    optimizers,
    tensors,
)

pytestmark = pytest.mark.once  # the compiled libraries have no part in it

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ampatch"
ROOM = PACKAGE / "torch_private"

# Names with an underscore that are not torch's, and that no file of ampatch defines.
NOT_TORCHS = {
    "_getframe": "sys, in the standard library",
    "_asdict": "named tuples, in the standard library",
    "_initializing": "the specs of modules, in the standard library",
    "_reconstruct": "copy, in the standard library",
    "_self_wrapper": "wrapt",
    "_base_optimizer": "wrappers of optimizers in other libraries",
    "_is_overflow": "accelerate's optimizers",
    "_lightning_optimizers": "lightning's strategies",
    "_logger_connector": "lightning's Trainer",
    "_after_closure": "lightning's plugins",
    "_MockOptimizer": "lightning's name for no optimizer",
    "_criteria": "skorch's nets",
    "_params_to_validate": "skorch's nets",
    "_amp_stash": "Apex's optimizers",
    "_amp_lazy_init": "Apex's optimizers",
    "_lazy_init_maybe_master_weights": "Apex's optimizers",
    "_is_of_ampatch": "marks of ampatch",
    "_is_guarded_by_ampatch": "marks of ampatch",
}
# The rule that no other file names them


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and len(name) > 1


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if ROOM not in path.parents]


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines: functions, classes, variables, and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def names_of_objects() -> frozenset[str]:
    """The private attributes of torch's objects that ampatch handles, and of the modules that it patches."""
    weight = nn.Parameter(torch.ones(1))
    objects = (
        *(weight, weight.untyped_storage(), (weight * weight).grad_fn, torch.Generator()),
        *(nn.Linear(1, 1), nn.LSTM(1, 1), nn.SyncBatchNorm(1), nn.MultiheadAttention(1, 1)),
        *(torch.optim.SGD([weight]), torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler("cpu")),
        *(DistributedDataParallel, FullyShardedDataParallel, torch.ops.aten.mm, torch.ops.aten.mm.default),
        *(torch, torch.cuda, torch.autograd, nn.modules.module, checkpoint, torch.backends.mha),
        sys.modules["torch.optim.optimizer"],
    )
    return frozenset(name for each in objects for name in dir(each) if is_private(name))


OWN = frozenset(name for path in files() for name in defined_in(parsed(path)))
OF_TORCHS_OBJECTS = names_of_objects()
ALLOWED = frozenset(value for name, value in vars(conventions).items() if name.isupper()) | frozenset(NOT_TORCHS)


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines of a file that name a private part of torch, with its name."""
    of_file = frozenset(defined_in(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_torchs(node, of_file):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, path) for path in paths if any(map(is_private, path.split("."))))
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
            yield from ((node.lineno, path) for path in paths if any(map(is_private, path.split("."))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private_string(node.value):
            yield node.lineno, repr(node.value)


def is_torchs(node: ast.Attribute, of_file: frozenset[str]) -> bool:
    """Whether an attribute is private and torch's: unknown to ampatch, below ``torch``, or not the file's own."""
    if not is_private(node.attr) or node.attr in ALLOWED:
        return False
    is_of_other_object = node.attr in OF_TORCHS_OBJECTS and node.attr not in of_file and not is_self(node.value)
    return node.attr not in OWN or is_of_other_object or ast.unparse(node).startswith("torch.")


def is_private_string(text: str) -> bool:
    if re.fullmatch(r"torch(\.\w+)*", text):
        return any(map(is_private, text.split(".")))
    return is_private(text) and text in OF_TORCHS_OBJECTS and text not in ALLOWED and text not in OWN


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_names_private_parts_of_torch(path: Path) -> None:
    assert list(private_names(parsed(path))) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._nn.linear",
        "import torch._dynamo",
        "import torch.utils._pytree as tree",
        "from torch._ops import OpOverload",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch.utils import _pytree",
        "sys.modules.get('torch._dynamo')",
        "getattr(module, '_forward_hooks')",
        "wrapper._has_rebuilt_buckets",
        "torch.ops.aten._to_copy.default",
        "self._optimizer_state_dict_pre_hooks",
    ],
)
def test_a_private_name_of_torch_is_recognised(line: str) -> None:
    assert list(private_names(ast.parse(line))) != []


@pytest.mark.parametrize(
    "line", ["tensor._version", "module._buffers", "sys._getframe(1)", "self._session", "a.__all__"]
)
def test_other_names_with_an_underscore_are_allowed(line: str) -> None:
    assert list(private_names(ast.parse(line))) == []


def test_every_allowed_name_is_used() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in files())
    assert [name for name in sorted(ALLOWED) if not re.search(rf"\b{name}\b", text)] == []


# What stands beside each name


@dataclass(frozen=True)
class Entry:
    """A name of the room.

    Attributes:
        path: module and name, as in "autograd.engine_run_backward".
        text: the comment above it, or its docstring.
    """

    path: str
    text: str

    def field(self, label: str) -> str:
        found = re.search(rf"^{label}: (.+)", self.text, re.MULTILINE)
        return "" if found is None else found[1]


def entries() -> Iterator[Entry]:
    for path in sorted(ROOM.glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef):
                yield Entry(f"{path.stem}.{node.name}", ast.get_docstring(node) or "")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                yield Entry(f"{path.stem}.{ast.unparse(target)}", comment_above(lines, node.lineno - 1))


def comment_above(lines: list[str], place: int) -> str:
    """The ``#:`` lines of the paragraph that a line is in."""
    begin = next(each for each in range(place, -1, -1) if not lines[each].strip())
    return "\n".join(line.removeprefix("#: ") for line in lines[begin:place] if line.startswith("#: "))


ENTRIES = {entry.path: entry for entry in entries()}
ALL = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


def pinned() -> str:
    """The torch that the constraints pin, as in "2.13"."""
    found = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def oldest() -> str:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    found = re.search(r"torch>=(\d+\.\d+)", parser["options"]["install_requires"])
    assert found is not None
    return found[1]


@ALL
def test_every_name_has_a_comment_with_versions_and_a_link_to_torch(entry: Entry) -> None:
    assert len(entry.text.partition("Upstream:")[0].split()) >= 4
    assert entry.field("Seen in") == f"torch {oldest()} to {pinned()}"
    assert len(entry.field("Until").split()) >= 2
    root = f"https://github.com/pytorch/pytorch/blob/v{pinned()}.0/"
    link = entry.field("Upstream")
    assert link.startswith(root)
    path = link.removeprefix(root)
    if path.endswith((".py", ".pyi")) and torch.__version__.startswith(f"{pinned()}."):
        assert (Path(torch.__file__).parent.parent / path).is_file()
    else:
        assert re.fullmatch(r"(aten/src|torch|tools)(/\w+)+\.(cpp|h|py|pyi|yaml)", path)


# That each does what it says, with torch itself

CASES: dict[str, Callable[[], None]] = {}


def shows(module: str, *names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a function that exercises names of a module of the room."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES.update(dict.fromkeys((f"{module}.{name}" for name in names), function))
        return function

    return register


@ALL
def test_every_name_does_what_it_says(entry: Entry) -> None:
    CASES[entry.path]()


def test_every_name_has_a_case_that_is_registered_with_shows() -> None:
    assert set(CASES) == set(ENTRIES)


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


@shows("conventions", "VERSION")
def version() -> None:
    tensor = ones(2)
    before = getattr(tensor, conventions.VERSION)
    tensor.add_(1)
    assert getattr(tensor, conventions.VERSION) == before + 1


@shows("conventions", "BASE")
def base() -> None:
    tensor = ones(2)
    assert getattr(tensor, conventions.BASE) is None
    assert getattr(tensor[:1], conventions.BASE) is tensor


@shows("conventions", "SCHEMA")
def schema() -> None:
    found = getattr(torch.ops.aten.mul_.Tensor, conventions.SCHEMA)
    assert (found.name, [each.name for each in found.arguments]) == ("aten::mul_", ["self", "other"])
    assert found.arguments[0].alias_info.is_write
    assert found.arguments[1].alias_info is None
    assert len(found.returns) == 1


@shows("conventions", "PARAMETERS", "BUFFERS", "MODULES")
def tables_of_a_module() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False))
    assert getattr(model, conventions.MODULES) == {"0": model[0]}
    assert getattr(model[0], conventions.PARAMETERS) == {"weight": None, "bias": None}
    assert set(getattr(model[0], conventions.BUFFERS)) == {"running_mean", "running_var", "num_batches_tracked"}


@shows("conventions", "STEP_SUPPORTS_AMP_SCALING")
def step_that_skips() -> None:
    class Skips(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            seen.append((self.found_inf.item(), self.grad_scale.item()))

    seen: list[tuple[float, float]] = []
    weight = nn.Parameter(ones(1))
    optimizer = Skips([weight])
    setattr(optimizer, conventions.STEP_SUPPORTS_AMP_SCALING, True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert seen == [(1.0, 4.0)]


@shows("conventions", "LAZY_INIT")
def lazy_init() -> None:
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            getattr(torch.cuda, conventions.LAZY_INIT)()


@shows("foreach", "add", "add_", "addcmul_", "copy_", "div", "div_", "mul", "mul_", "norm", "sqrt", "sqrt_")
def lists_of_tensors() -> None:
    def pair() -> list[Tensor]:
        return [torch.tensor([4.0]), torch.tensor([9.0])]

    two = [torch.tensor([2.0])] * 2
    for found, expected in (
        (foreach.add(pair(), two), [6, 11]),
        (foreach.mul(pair(), 2), [8, 18]),
        (foreach.div(pair(), two), [2, 4.5]),
        (foreach.sqrt(pair()), [2, 3]),
        (foreach.norm(pair(), 2), [4, 9]),
    ):
        assert [each.item() for each in found] == expected
    for change, arguments, expected in (
        (foreach.add_, (two,), [6, 11]),
        (foreach.mul_, (torch.tensor(2.0),), [8, 18]),
        (foreach.div_, (2,), [2, 4.5]),
        (foreach.sqrt_, (), [2, 3]),
        (foreach.copy_, (two,), [2, 2]),
        (foreach.addcmul_, (two, two, 1), [8, 13]),
    ):
        changed = pair()
        change(changed, *arguments)
        assert [each.item() for each in changed] == expected


@shows("foreach", "non_finite_check_and_unscale_")
def unscale() -> None:
    grads, found_inf = [torch.tensor([4.0]), torch.tensor([8.0])], torch.zeros(1)
    foreach.non_finite_check_and_unscale_(grads, found_inf, torch.tensor(0.5))
    assert ([each.item() for each in grads], found_inf.item()) == ([2, 4], 0)
    foreach.non_finite_check_and_unscale_([torch.tensor([float("inf")])], found_inf, torch.tensor(0.5))
    assert found_inf.item() == 1


def noting(seen: list[Any], note: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that notes something of its arguments, and calls the original."""
    return lambda *args, **kwargs: seen.append(note(*args)) or original(*args, **kwargs)


@shows("modes", "TorchDispatchMode", "len_dispatch_stack", "dispatch_modes", "without_dispatch_modes")
def dispatch_modes() -> None:
    assert issubclass(Operators, modes.TorchDispatchMode)
    assert modes.len_dispatch_stack() == 0
    tensor = ones(1)
    with Operators() as outer, Operators() as inner:
        assert modes.len_dispatch_stack() == 2
        assert modes.dispatch_modes() == [outer, inner]
        with modes.without_dispatch_modes():
            assert modes.len_dispatch_stack() == 0
            torch.mul(tensor, 2)
        torch.add(tensor, 1)
    assert outer.seen == inner.seen == [torch.ops.aten.add.Tensor]


@shows("modes", "push_dispatch_mode", "pop_dispatch_mode", "push_function_mode", "pop_function_mode")
def pushed_modes() -> None:
    dispatch = modes.push_dispatch_mode, modes.dispatch_modes, modes.pop_dispatch_mode
    function = modes.push_function_mode, modes.function_modes, modes.pop_function_mode
    for mode, (push, stack, pop) in ((Operators(), dispatch), (Functions(), function)):
        push(mode)
        assert stack() == [mode]
        assert pop() is mode
        assert stack() == []


@shows("modes", "len_function_stack", "is_function_mode_enabled", "function_modes")
def function_modes() -> None:
    assert (modes.len_function_stack(), modes.is_function_mode_enabled()) == (0, False)
    tensor = ones(1)
    with Functions() as outer, Functions() as inner:
        assert (modes.len_function_stack(), modes.is_function_mode_enabled()) == (2, True)
        assert modes.function_modes() == [outer, inner]
        with torch.DisableTorchFunction():
            torch.mul(tensor, 2)
        torch.add(tensor, 1)
    assert outer.seen == inner.seen == [torch.add]


@shows("modes", "is_traceable_wrapper_subclass")
def wrapper_subclasses() -> None:
    assert modes.is_traceable_wrapper_subclass(TwoTensor(ones(1), ones(1)))
    assert not modes.is_traceable_wrapper_subclass(nn.Parameter(ones(1)))


@shows("modes", "SELECTIVE_CHECKPOINT_MODES")
def selective_checkpoints() -> None:
    def forward(tensor: Tensor) -> Tensor:
        seen.extend(map(type, modes.dispatch_modes()))
        return tensor.sin().sin()

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    seen: list[type] = []
    input = ones(1, requires_grad=True)
    checkpoint.checkpoint(forward, input, use_reentrant=False, context_fn=contexts).backward()
    assert tuple(seen) == modes.SELECTIVE_CHECKPOINT_MODES


@shows("modes", "get_tracing_state")
def tracing() -> None:
    def traced(tensor: Tensor) -> Tensor:
        seen.append(modes.get_tracing_state() is not None)
        return tensor + 1

    seen: list[bool] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.trace(traced, ones(1), check_trace=False)
    assert seen == [True]
    assert modes.get_tracing_state() is None


@shows("modes", "peek_interpreter_stack", "is_functorch_wrapped_tensor", "get_unwrapped")
def transforms() -> None:
    def mapped(tensor: Tensor) -> Tensor:
        assert modes.peek_interpreter_stack() is not None
        assert modes.is_functorch_wrapped_tensor(tensor)
        assert modes.get_unwrapped(tensor).shape == (2, 3)
        return tensor

    assert modes.peek_interpreter_stack() is None
    assert not modes.is_functorch_wrapped_tensor(ones(1))
    torch.func.vmap(mapped)(ones(2, 3))


@shows("modes", "is_legacy_batchedtensor")
def batched_backward_passes() -> None:
    leaf, seen = ones(2, requires_grad=True), []
    leaf.register_hook(lambda grad: seen.append(modes.is_legacy_batchedtensor(grad)))
    torch.autograd.grad(leaf * 2, leaf, torch.eye(2), is_grads_batched=True)
    torch.autograd.grad(leaf * 2, leaf, ones(2))
    assert seen == [True, False]


@shows("modes", "is_any_autocast_enabled", "DisableAutocast")
def autocast() -> None:
    assert not modes.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert modes.is_any_autocast_enabled()
        with modes.DisableAutocast():
            assert torch.mm(ones(1, 1), ones(1, 1)).dtype is torch.float32
        assert torch.mm(ones(1, 1), ones(1, 1)).dtype is torch.bfloat16


@shows("modes", "AUTOCAST_KEYS", "SetExcludeDispatchKeyGuard")
def autocast_keys() -> None:
    with torch.autocast("cpu"), modes.SetExcludeDispatchKeyGuard(modes.AUTOCAST_KEYS["cpu"], True):
        assert torch.mm(ones(1, 1), ones(1, 1)).dtype is torch.float32
        with modes.SetExcludeDispatchKeyGuard(modes.AUTOCAST_KEYS["cpu"], False):
            assert torch.mm(ones(1, 1), ones(1, 1)).dtype is torch.bfloat16
    assert set(modes.AUTOCAST_KEYS) == {"cpu", "cuda"}


@shows("modes", "BELOW_OPERATORS")
def packages_below_operators() -> None:
    assert all(importlib.util.find_spec(name) is not None for name in modes.BELOW_OPERATORS)


@shows("modes", "get_dispatch_mode", "FAKE", "PROXY")
def faked_or_proxied() -> None:
    def traced(tensor: Tensor) -> Tensor:
        seen.extend(modes.get_dispatch_mode(key) is not None for key in (modes.FAKE, modes.PROXY))
        return tensor + 1

    seen: list[bool] = []
    traced(ones(1))
    with torch._subclasses.FakeTensorMode():
        traced(ones(1))
    torch.fx.experimental.proxy_tensor.make_fx(traced)(ones(1))
    assert seen == [False, False, True, False, False, True]


@shows("autograd", "engine_run_backward", "ENGINE_RUN_BACKWARD")
def backward_passes() -> None:
    owner, name = private_autograd.ENGINE_RUN_BACKWARD
    original = private_autograd.engine_run_backward
    assert getattr(owner, name) is original
    seen: list[Any] = []
    weight = ones(1, requires_grad=True)
    setattr(owner, name, lambda *args, **options: seen.append(options["accumulate_grad"]) or original(*args, **options))
    try:
        weight.sum().backward()
        torch.autograd.backward(weight.sum())
        torch.autograd.grad(weight.sum(), weight)
    finally:
        setattr(owner, name, original)
    assert seen == [True, True, False]
    assert weight.grad.item() == 2


@shows("autograd", "current_graph_task_id", "current_node", "will_engine_execute_node")
def inside_of_a_backward_pass() -> None:
    def hook(_: Tensor) -> None:
        seen.append(private_autograd.current_graph_task_id() >= 0)
        seen.append(private_autograd.current_node().name())
        seen.extend(map(private_autograd.will_engine_execute_node, (leaf, other)))

    seen: list[Any] = []
    assert private_autograd.current_graph_task_id() == -1
    assert private_autograd.current_node() is None
    weight, unused = ones(1, requires_grad=True), ones(1, requires_grad=True)
    product = weight * 2
    (leaf, _), (other, _) = product.grad_fn.next_functions[0], (unused * 2).grad_fn.next_functions[0]
    product.register_hook(hook)
    product.sum().backward()
    assert seen == [True, "MulBackward0", True, False]


@shows("autograd", "next_sequence_number", "sequence_number")
def sequence_numbers() -> None:
    weight = ones(1, requires_grad=True)
    before = private_autograd.next_sequence_number()
    first, second = weight * 2, weight * 3
    assert [private_autograd.sequence_number(each.grad_fn) for each in (first, second)] == [before, before + 1]
    assert private_autograd.next_sequence_number() == before + 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@shows("autograd", "FORWARD_CLASS")
def users_functions() -> None:
    weight = ones(1, requires_grad=True)
    node = Doubled.apply(weight).grad_fn
    assert {getattr(each, private_autograd.FORWARD_CLASS) for each in (node, type(node))} == {Doubled}
    assert not hasattr((weight * 2).grad_fn, private_autograd.FORWARD_CLASS)


@shows("autograd", "SAVED_OTHER")
def freed_graphs() -> None:
    product = ones(1, requires_grad=True) * torch.tensor(2.0)
    assert getattr(product.grad_fn, private_autograd.SAVED_OTHER).item() == 2
    product.sum().backward()
    with pytest.raises(RuntimeError, match="freed"):
        getattr(product.grad_fn, private_autograd.SAVED_OTHER)


@shows("autograd", "hooks_of_leaf")
def hooks_of_leaves() -> None:
    leaf = ones(1, requires_grad=True)
    assert private_autograd.hooks_of_leaf(leaf) == (None, None)
    first, second = (lambda grad: grad), (lambda leaf: None)
    leaf.register_hook(first)
    leaf.register_post_accumulate_grad_hook(second)
    assert [list(table.values()) for table in private_autograd.hooks_of_leaf(leaf)] == [[first], [second]]


@shows("autograd", "unsafe_preserve_version_counter")
def preserved_versions() -> None:
    tensor = ones(1)
    with private_autograd.unsafe_preserve_version_counter((tensor,)):
        tensor.add_(1)
    assert (tensor._version, tensor.item()) == (0, 2)


@shows("autograd", "CheckpointFrame")
def checkpoint_frames() -> None:
    def forward(tensor: Tensor) -> Tensor:
        gc.collect()
        seen.append(sum(type(each) is private_autograd.CheckpointFrame for each in gc.get_objects()))
        return tensor.sin()

    seen: list[int] = []
    result = checkpoint.checkpoint(forward, ones(1, requires_grad=True), use_reentrant=False)
    assert seen == [1]
    result.backward()


@shows("autograd", "stash_for_backward", "get_stashed", "is_stashed", "unstash")
def stashed_objects() -> None:
    key = "tests of ampatch"
    assert not private_autograd.is_stashed(key)
    value = object()
    private_autograd.stash_for_backward(key, value)
    assert private_autograd.is_stashed(key)
    assert private_autograd.get_stashed(key) is value
    private_autograd.unstash(key)
    assert not private_autograd.is_stashed(key) or private_autograd.get_stashed(key) is None


@shows("tensors", "reciprocal", "DATA")
def base_class_of_tensors() -> None:
    tensor = torch.tensor([2.0])
    assert tensors.reciprocal(tensor).item() == 0.5
    assert tensors.reciprocal is torch.Tensor.__mro__[1].reciprocal
    assert tensors.DATA.__get__(tensor).data_ptr() == tensor.data_ptr()
    tensors.DATA.__set__(tensor, torch.tensor([3.0]))
    assert tensor.item() == 3


@shows("tensors", "HOMES_OF_METHODS")
def homes_of_methods() -> None:
    homes = (torch.Tensor.add.__objclass__.__module__, torch.Tensor.backward.__module__)
    assert homes == tensors.HOMES_OF_METHODS


@shows("tensors", "is_zerotensor", "is_view", "uncoalesced_values")
def kinds_of_tensors() -> None:
    tensor = ones(2)
    assert (tensors.is_zerotensor(tensor), tensors.is_zerotensor(torch._efficientzerotensor(2))) == (False, True)
    assert (tensors.is_view(tensor), tensors.is_view(tensor[:1])) == (False, True)
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=False)
    assert tensors.uncoalesced_values(sparse).tolist() == [1, 2]


@shows("tensors", "swap_tensor_impl")
def swapped_tensors() -> None:
    parameter, other = nn.Parameter(ones(1)), nn.Parameter(ones(2).half())
    reference = weakref.ref(parameter)
    tensors.swap_tensor_impl(parameter, other)
    assert (parameter.shape, parameter.dtype, other.dtype) == ((2,), torch.float16, torch.float32)
    assert reference() is parameter


@shows("tensors", "storage_id", "storage_use_count")
def storages() -> None:
    tensor = ones(2)
    count = tensors.storage_use_count(tensors.storage_id(tensor.untyped_storage()))
    view = tensor[:1]
    assert tensors.storage_id(view.untyped_storage()) == tensors.storage_id(tensor.untyped_storage())
    assert tensors.storage_id(ones(2).untyped_storage()) != tensors.storage_id(tensor.untyped_storage())
    assert tensors.storage_use_count(tensors.storage_id(tensor.untyped_storage())) == count + 1


@shows("tensors", "flatten_dense_tensors", "unflatten_dense_tensors")
def flat_tensors() -> None:
    given = (ones(2, 2), ones(3))
    flat = tensors.flatten_dense_tensors(given)
    assert flat.shape == (7,)
    assert [each.shape for each in tensors.unflatten_dense_tensors(flat, given)] == [(2, 2), (3,)]


@shows("tensors", "is_plain")
def plain_tensors() -> None:
    plain, forward_ad = ones(2), torch.autograd.forward_ad
    assert tensors.is_plain(plain)
    assert not tensors.is_plain(plain.to_sparse())
    assert not tensors.is_plain(torch._efficientzerotensor(2))
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")  # torch uses TorchScript, which is deprecated
        assert tensors.is_plain(plain)
        assert not tensors.is_plain(forward_ad.make_dual(plain, plain))


@shows("operators", "OpOverload", "OpOverloadPacket", "PACKET", "QUALIFIED_NAME")
def types_of_operators() -> None:
    packet = torch.ops.aten.mm
    assert isinstance(packet, operators.OpOverloadPacket)
    assert isinstance(packet.default, operators.OpOverload)
    assert getattr(packet.default, operators.PACKET) is packet
    assert getattr(packet, operators.QUALIFIED_NAME) == "aten::mm"


@shows("operators", "get_schemas_for_operator")
def schemas() -> None:
    (found,) = (each for each in operators.get_schemas_for_operator("aten::mm") if not each.overload_name)
    assert [(each.name, str(each.type), each.is_out) for each in found.arguments] == [
        ("self", "Tensor", False),
        ("mat2", "Tensor", False),
    ]


@shows("operators", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten")
def trees() -> None:
    given = {"a": [1, 2.0], "b": (3,)}
    leaves, spec = operators.tree_flatten(given)
    assert leaves == operators.tree_leaves(given) == [1, 2.0, 3]
    assert operators.tree_unflatten(leaves, spec) == given
    assert operators.tree_map(operator.neg, given) == {"a": [-1, -2.0], "b": (-3,)}
    assert operators.tree_map_only(float, operator.neg, given) == {"a": [1, -2.0], "b": (3,)}


@shows("operators", "NAMESPACES")
def namespaces() -> None:
    found = {each.name.partition("::")[0] for each in torch._C._jit_get_all_schemas()}
    assert {"aten", "prims", "quantized", "_quantized", "_c10d_functional"} <= found & operators.NAMESPACES


@shows("operators", "CAST", "TO_COPY")
def casts() -> None:
    with Operators() as noted:
        ones(1).half()
    assert noted.seen[-1] is operators.TO_COPY
    assert operators.TO_COPY._schema.name == f"aten::{operators.CAST}"


@shows("operators", "UNSAFE_VIEW")
def unsafe_views() -> None:
    tensor = ones(4)
    view = operators.UNSAFE_VIEW(tensor, (2, 2))
    assert view.data_ptr() == tensor.data_ptr()
    assert [each.alias_info for each in operators.UNSAFE_VIEW._schema.returns] == [None]


@shows("operators", "FUSED_LAYERS")
def fused_layers() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    layer = nn.TransformerEncoderLayer(4, 2, batch_first=True).eval()
    input = ones(1, 2, 4)
    with torch.no_grad(), Operators() as noted:
        layer(input)
        attention(input, input, input)
    assert set(noted.seen) >= operators.FUSED_LAYERS


@shows("operators", "FLASH_ATTENTION")
def flash_attention() -> None:
    query = ones(1, 1, 2, 8, requires_grad=True)
    with Operators() as noted:
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    seen = {each._schema.name.partition("::")[2] for each in noted.seen}
    assert set(operators.FLASH_ATTENTION) <= seen
    assert all(getattr(torch.ops.aten, name) in flop_registry for name in operators.FLASH_ATTENTION.values())


@shows("operators", "WEIGHT_NORM")
def weight_norm() -> None:
    with Functions() as noted:
        nn.utils.parametrizations.weight_norm(nn.Linear(1, 1))(ones(1, 1))
    assert getattr(torch, operators.WEIGHT_NORM) in noted.seen


@shows("operators", "VF")
def recurrent_functions() -> None:
    for layer, name in ((nn.LSTM(1, 1), "lstm"), (nn.GRU(1, 1), "gru"), (nn.RNN(1, 1), "rnn_tanh")):
        with Functions() as noted:
            layer(ones(1, 1))
        assert getattr(operators.VF, name) in noted.seen


@shows("operators", "NN", "LINEAR")
def functions_of_layers() -> None:
    assert operators.NN.linear is operators.LINEAR is F.linear
    with Functions() as noted:
        nn.Linear(1, 1)(ones(1))
    assert noted.seen[-1] is operators.LINEAR


@shows("operators", "use_cudnn_rnn_flatten_weight", "cudnn_rnn_flatten_weight")
def cudnn_layouts() -> None:
    assert isinstance(operators.use_cudnn_rnn_flatten_weight(), bool)
    schema = torch.ops.aten._cudnn_rnn_flatten_weight.default._schema
    names = ["weight_arr", "weight_stride0", "input_size", "mode", "hidden_size", "proj_size", "num_layers"]
    assert [each.name for each in schema.arguments] == [*names, "batch_first", "bidirectional"]
    assert callable(operators.cudnn_rnn_flatten_weight)


@shows("modules", "BatchNorm", "NormBase", "InstanceNorm")
def norms() -> None:
    assert {kind for kind in NORMS if issubclass(kind, modules.BatchNorm)} == {nn.BatchNorm1d, nn.SyncBatchNorm}
    assert {kind for kind in NORMS if issubclass(kind, modules.InstanceNorm)} == {nn.InstanceNorm1d}
    assert {kind for kind in NORMS if issubclass(kind, modules.NormBase)} == set(NORMS) - {nn.LayerNorm}


NORMS = (nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.LayerNorm)


@shows("modules", "SYNC_BATCH_NORM_CHECKS")
def checks_of_sync_batch_norm() -> None:
    dimensions, channels = modules.SYNC_BATCH_NORM_CHECKS
    norm = nn.SyncBatchNorm(1)
    for check in modules.SYNC_BATCH_NORM_CHECKS:
        check(norm, ones(2, 1))
    with pytest.raises(ValueError, match="at least 2D"):
        dimensions(norm, ones(2))
    with pytest.raises(ValueError, match="non-zero"):
        channels(norm, ones(2, 0))


@shows("modules", "CALL", "COMPILED_CALL")
def calls_of_modules() -> None:
    module = nn.Identity()
    assert getattr(module, modules.COMPILED_CALL) is None
    assert getattr(module, modules.CALL)(1) == 1
    setattr(module, modules.COMPILED_CALL, lambda input: input + 1)
    assert module(1) == 2


@shows("modules", "FORWARD_HOOKS", "HOOKS_AROUND_FORWARD", "HOOKS_AROUND_PASSES", "STATE_HOOKS")
def hooks_of_modules() -> None:
    module = nn.Linear(1, 1)
    register = [
        *(module.register_forward_pre_hook, module.register_forward_hook),
        *(module.register_full_backward_pre_hook, module.register_full_backward_hook),
        *(module.register_state_dict_post_hook, module.register_load_state_dict_pre_hook),
        module.register_load_state_dict_post_hook,
    ]
    tables = (*modules.HOOKS_AROUND_PASSES, *modules.STATE_HOOKS)
    assert tables[:2] == modules.HOOKS_AROUND_FORWARD
    assert tables[1] == modules.FORWARD_HOOKS
    for table, function in zip(tables, register, strict=True):
        assert not getattr(module, table)
        handle = function(lambda *_: None)
        assert list(getattr(module, table)) == [handle.id]


@shows("modules", "global_forward_hooks_with_kwargs")
def global_hooks() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None, with_kwargs=True)
    assert handle.id in modules.global_forward_hooks_with_kwargs
    handle.remove()
    assert handle.id in modules.global_forward_hooks_with_kwargs, "torch forgets it now: remove this entry and its use"
    del modules.global_forward_hooks_with_kwargs[handle.id]


@shows("modules", "APPLY_CODE")
def conversions_of_modules() -> None:
    class Seen(nn.Module):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            return super()._apply(fn, recurse)

    def convert(tensor: Tensor) -> Tensor:
        frame = sys._getframe(1)
        codes.append(frame.f_code)
        return tensor

    codes: list[types.CodeType] = []
    nn.Linear(1, 1, bias=False)._apply(convert)
    assert codes == [modules.APPLY_CODE]
    assert "_apply" in vars(Seen)


@shows("modules", "REPLICATE")
def replicas() -> None:
    owner, name = modules.REPLICATE
    module = nn.Linear(1, 1)
    replica = getattr(owner, name)(module)
    assert type(replica) is nn.Linear
    assert replica is not module
    assert "weight" not in replica._parameters


@shows("modules", "FLAT_WEIGHTS")
def flat_weights() -> None:
    layer = nn.LSTM(1, 1)
    assert [id(each) for each in getattr(layer, modules.FLAT_WEIGHTS)] == [id(each) for each in layer.parameters()]


@shows("modules", "FASTPATH")
def fast_path() -> None:
    before = getattr(torch.backends.mha, modules.FASTPATH)
    try:
        setattr(torch.backends.mha, modules.FASTPATH, False)
        assert torch.backends.mha.get_fastpath_enabled() is False
    finally:
        setattr(torch.backends.mha, modules.FASTPATH, before)
    assert torch.backends.mha.get_fastpath_enabled() is before is True


@shows("modules", "ALLOWED_METHODS")
def lazy_parameters() -> None:
    owner, name = modules.ALLOWED_METHODS
    assert torch.Tensor.half in getattr(owner, name)
    assert isinstance(nn.LazyLinear(1).weight, owner)


@shows("modules", "COMPILED_ORIGINAL")
@shows("tracers", "OptimizedModule")
def compiled_modules() -> None:
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert getattr(compiled, modules.COMPILED_ORIGINAL) is module
    assert type(compiled) is tracers().OptimizedModule


@shows("optimizers", "global_pre_hooks", "global_post_hooks")
def hooks_of_all_optimizers() -> None:
    optim = sys.modules["torch.optim.optimizer"]
    for table, register in (
        (optimizers.global_pre_hooks, optim.register_optimizer_step_pre_hook),
        (optimizers.global_post_hooks, optim.register_optimizer_step_post_hook),
    ):
        handle = register(lambda *_: None)
        assert handle.id in table
        handle.remove()
        assert handle.id not in table


HOOKS_OF_OPTIMIZERS = (
    *("STEP_PRE_HOOKS", "STEP_POST_HOOKS", "STATE_DICT_PRE_HOOKS", "STATE_DICT_POST_HOOKS"),
    *("LOAD_STATE_DICT_PRE_HOOKS", "LOAD_STATE_DICT_POST_HOOKS"),
)


@shows("optimizers", *HOOKS_OF_OPTIMIZERS)
def hooks_of_an_optimizer() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(ones(1))])
    for name in HOOKS_OF_OPTIMIZERS:
        table = getattr(optimizers, name)
        register = getattr(optimizer, f"register_{name.lower().removesuffix('s')}")
        assert not getattr(optimizer, table)
        handle = register(lambda *_: None)
        assert list(getattr(optimizer, table)) == [handle.id]


@shows("optimizers", "STEP_CALLED", "WRAPPED_BY_SCHEDULER")
def schedulers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(ones(1))])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert hasattr(optimizer.step, optimizers.WRAPPED_BY_SCHEDULER)
    assert not getattr(optimizer, optimizers.STEP_CALLED, False)
    setattr(optimizer, optimizers.STEP_CALLED, True)
    scheduler.step()  # without it torch warns, and warnings are errors here


@shows("optimizers", "UNSCALE_GRADS", "MAYBE_OPT_STEP", "SCALE")
def grad_scaler() -> None:
    seen: list[Any] = []
    weight = nn.Parameter(ones(1))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu", init_scale=4.0)
    assert getattr(scaler, optimizers.SCALE) is None
    scaler.scale(weight.sum()).backward()
    assert getattr(scaler, optimizers.SCALE).item() == 4
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (optimizers.UNSCALE_GRADS, optimizers.MAYBE_OPT_STEP):
            patch.setattr(
                owner, name, noting(seen, lambda _, given, *__, name=name: (name, given), getattr(owner, name))
            )
        scaler.step(optimizer)
    assert seen == [(optimizers.UNSCALE_GRADS[1], optimizer), (optimizers.MAYBE_OPT_STEP[1], optimizer)]


@shows("optimizers", "GROUP_TENSORS", "GET_TOTAL_NORM")
def clipping() -> None:
    weight = nn.Parameter(ones(1))
    weight.grad = ones(1)
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (optimizers.GROUP_TENSORS, optimizers.GET_TOTAL_NORM):
            patch.setattr(owner, name, noting(seen, lambda first, *_: first, getattr(owner, name)))
        nn.utils.clip_grad_norm_([weight], 1.0)
    norm, lists, *_ = seen
    assert list(norm) == [weight.grad]
    assert list(lists[0]) == [weight.grad]


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """One process as a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@shows("distributed", "ACTIVE_DDP_MODULE", "has_rebuilt_buckets", "reduces_elsewhere", "is_joining", "reductions_of")
def data_parallel() -> None:
    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            active.append(getattr(DistributedDataParallel, distributed.ACTIVE_DDP_MODULE, None))
            return super().forward(input)

    active: list[Any] = []
    with process_group():
        wrapper = DistributedDataParallel(Looks(1, 1))
        assert distributed.reduces_elsewhere(wrapper) == (False, False)
        assert not distributed.has_rebuilt_buckets(wrapper)
        seen = [distributed.reductions_of(wrapper)]
        with wrapper.no_sync():
            wrapper(ones(1, 1)).sum().backward()
        seen.append(distributed.reductions_of(wrapper))
        assert seen[0] == seen[1]
        wrapper(ones(1, 1)).sum().backward()
        assert distributed.reductions_of(wrapper) != seen[1]
        wrapper(ones(1, 1))
        assert distributed.has_rebuilt_buckets(wrapper)
        assert not distributed.is_joining(wrapper)
        with Join([wrapper]):
            assert distributed.is_joining(wrapper)
    assert active == [wrapper] * 3
    assert getattr(DistributedDataParallel, distributed.ACTIVE_DDP_MODULE) is None


@shows("distributed", "SYNC_BATCH_NORM_CHECK", "AVAILABLE_DEVICE_TYPE")
def without_gpus() -> None:
    owner, name = distributed.SYNC_BATCH_NORM_CHECK
    with process_group(), pytest.MonkeyPatch.context() as patch:
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with"):
            DistributedDataParallel(nn.SyncBatchNorm(1))
        patch.setattr(owner, name, lambda *_: None)
        DistributedDataParallel(nn.SyncBatchNorm(1))
        data_parallel = sys.modules["torch.nn.parallel.data_parallel"]
        patch.setattr(data_parallel, distributed.AVAILABLE_DEVICE_TYPE, lambda: None)
        assert nn.DataParallel(nn.Identity()).device_ids == []


@shows("distributed", "syncs_gradients", "FLATTENED", "flattened_by")
def fsdp1() -> None:
    with process_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single rank shards nothing
        wrapper = FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu"))
        assert distributed.syncs_gradients(wrapper)
        with wrapper.no_sync():
            assert not distributed.syncs_gradients(wrapper)
        assert [getattr(each, distributed.FLATTENED) for each in wrapper.parameters()] == [True]
        for keeps in (False, True):
            inner = FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu"), use_orig_params=keeps)
            outer = FullyShardedDataParallel(nn.Sequential(inner), device_id=torch.device("cpu"), use_orig_params=keeps)
            assert [*map(id, distributed.flattened_by(inner))] == [*map(id, inner.parameters())]
            assert not distributed.flattened_by(outer)
    assert not hasattr(nn.Linear(1, 1).weight, distributed.FLATTENED)


@shows("distributed", "parameter_groups", "is_postponed", "holds_back", "drop_held_back")
def fsdp2() -> None:
    with process_group():
        model = fully_shard(nn.Linear(1, 1), mesh=dist.init_device_mesh("cpu", (1,)))
        (group,) = distributed.parameter_groups(model)
        assert [each.sharded_param for each in group.fsdp_params] == list(model.parameters())
        assert not distributed.is_postponed(group)
        model.set_requires_gradient_sync(False)
        assert distributed.is_postponed(group)
        assert not distributed.holds_back(group)
        model(ones(1, 1)).sum().backward()
        assert distributed.holds_back(group)
        distributed.drop_held_back(group)
        assert not distributed.holds_back(group)


@shows("devices", "DeviceContext", "device_constructors")
def default_devices() -> None:
    with torch.device("meta"):
        assert [type(each) for each in modes.function_modes()] == [devices.DeviceContext]
    assert {torch.ones, torch.tensor} <= devices.device_constructors()


@shows("devices", "current_device")
def current_device() -> None:
    assert devices.current_device() is None
    torch.set_default_device("meta")
    try:
        assert devices.current_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)


@shows("devices", "RECORD_MEMORY_HISTORY")
def memory_history() -> None:
    assert callable(getattr(torch.cuda.memory, devices.RECORD_MEMORY_HISTORY))


@shows("devices", "EXTENSION", "GET_ACCELERATOR", "GET_ACCELERATOR_OR_NONE")
def accelerators() -> None:
    assert devices.EXTENSION.__name__ == "torch._C"
    found = torch.accelerator.current_accelerator()
    assert getattr(devices.EXTENSION, devices.GET_ACCELERATOR_OR_NONE)() == found
    # torch that was built for CUDA, on a machine without a GPU, finds cuda unless it is to look for devices.
    present = found if torch.accelerator.is_available() else None
    assert getattr(devices.EXTENSION, devices.GET_ACCELERATOR)() == (present or torch.device("cpu"))


@shows("devices", "is_current_stream_capturing")
def capturing() -> None:
    if torch.cuda.is_available():
        assert devices.is_current_stream_capturing() is False
    else:
        assert callable(devices.is_current_stream_capturing)


@shows("devices", "package_registry")
def saved_storages() -> None:
    before = list(devices.package_registry)
    torch.serialization.register_package(0, lambda _: None, lambda *_: None)
    (added,) = (each for each in devices.package_registry if each not in before)
    devices.package_registry.remove(added)
    assert devices.package_registry == before


def tracers() -> Any:
    """The module whose import loads torch.compile."""
    return importlib.import_module("ampatch.torch_private.tracers")


@shows("compilers", "DYNAMO", "EVAL_FRAME", "JIT_INTERNAL")
def modules_of_compilers() -> None:
    code = torch.compile(abs, backend="eager")
    assert code.__module__ != ""
    for name in (compilers.DYNAMO, compilers.EVAL_FRAME, compilers.JIT_INTERNAL):
        assert importlib.import_module(name).__name__ == name
    assert torch.compile(ones, backend="eager").__code__.co_filename == sys.modules[compilers.EVAL_FRAME].__file__
    assert (
        F.max_pool2d.__module__ == compilers.JIT_INTERNAL
        or F.max_pool2d.__code__.co_filename == sys.modules[compilers.JIT_INTERNAL].__file__
    )


@shows("compilers", "FIND_BUILTIN", "TRY_GET_DISPATCHED_FN", "CREATE_SCRIPT_MODULE")
def torchscript() -> None:
    class Scripted(nn.Module):  # here, as torch compiles a class once
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool1d(torch.relu(x), 1)

    seen: list[str] = []
    functions = (compilers.FIND_BUILTIN, compilers.TRY_GET_DISPATCHED_FN, compilers.CREATE_SCRIPT_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in functions:
            patch.setattr(owner, name, noting(seen, lambda *_, name=name: name, getattr(owner, name)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            torch.jit.script(Scripted())
    assert set(seen) == {name for _, name in functions}


# Of `traces`; a global, as what `comptime` calls must have no variables of functions around it.
FAKED: list[str] = []


@shows("compilers", "MARKED_CONSTANT", "has_compiled")
@shows("tracers", "graph_break", "comptime", "reset_code_caches")
def traces() -> None:
    def constant() -> int:
        calls.append(1)
        return len(calls)

    def compiled(tensor: Tensor) -> Tensor:
        comptime(lambda trace: FAKED.append(type(trace.get_local("tensor").as_fake()).__name__))
        product = tensor * constant()
        graph_break()
        return product + 1

    comptime, graph_break = tracers().comptime, tracers().graph_break
    setattr(constant, compilers.MARKED_CONSTANT, True)
    calls: list[int] = []
    graphs: list[Any] = []
    FAKED.clear()
    function = torch.compile(compiled, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert function(ones(1)).item() == function(ones(1)).item() == 1 + len(calls)
    assert (len(graphs), set(FAKED)) == (2, {"FakeTensor"})
    assert compilers.has_compiled()
    tracers().reset_code_caches()
    function(ones(1))
    assert len(graphs) == 4


@shows("compilers", "trace_only_within_others")
def code_that_is_not_compiled_alone() -> None:
    namespace: dict[str, Any] = {}
    exec("def inner(tensor): return tensor + 1\ndef outer(tensor): return inner(tensor)", namespace)
    graphs: list[Any] = []
    compilers.trace_only_within_others(namespace["inner"].__code__)
    for name, count in (("inner", 0), ("outer", 1)):
        torch.compile(namespace[name], backend=lambda graph, _: graphs.append(graph) or graph.forward)(ones(1))
        assert len(graphs) == count


@shows("tracers", "BuiltinVariable", "ConstantVariable", "TensorVariable", "UnspecializedNNModuleVariable")
@shows("tracers", "VariableTracker", "install_guard", "get_verbose_code_parts", "fake_memo", "GETATTR")
def variables() -> None:
    inside = tracers()
    weight, module = nn.Parameter(ones(1)), nn.Identity()
    seen: list[Any] = []

    def call_builtin(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is operator.add and all(isinstance(each, inside.TensorVariable) for each in args):
            fake = args[1].as_proxy().node.meta["example_value"]
            seen.append(inside.fake_memo(fake)(weight) is fake)
            return inside.ConstantVariable.create(5)
        return of_builtins(self, tx, args, kwargs)

    def call_module(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        seen.append(self.value is module)
        inside.install_guard(self.source.make_guard(guard))
        return inside.VariableTracker.build(tx, operator.neg).call_function(tx, args, kwargs)

    def guard(builder: Any, guard: Any) -> None:
        parts = inside.get_verbose_code_parts("a guard of the tests", guard)
        expected = allowed[0]
        builder.get_guard_manager(guard).add_lambda_guard(lambda _: allowed[0] is expected, parts, guard.user_stack)

    def compiled(tensor: Tensor) -> Any:
        return module(tensor) * (tensor + weight) * int(module.training)

    def read(self: Any, tx: Any, name: str) -> Any:
        names.add(name)
        return reading(self, tx, name)

    names: set[str] = set()
    reading = getattr(inside.UnspecializedNNModuleVariable, inside.GETATTR)
    of_builtins = inside.BuiltinVariable.call_function
    allowed = [True]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(inside.BuiltinVariable, "call_function", call_builtin)
        patch.setattr(inside.UnspecializedNNModuleVariable, "call_function", call_module)
        patch.setattr(inside.UnspecializedNNModuleVariable, inside.GETATTR, read)
        function = torch.compile(compiled, backend="eager")
        assert function(ones(1)).item() == function(ones(1)).item() == -5
        assert sorted(seen) == [True, True]
        assert "training" in names
        allowed[0] = False
        assert function(ones(1)).item() == -5
        assert len(seen) == 4  # traced again, as the guard has failed
    inside.reset_code_caches()


@shows("tracers", "GRAPH_CACHES")
def caches_of_graphs() -> None:
    assert all(isinstance(getattr(*place)(), bool) for place in tracers().GRAPH_CACHES)


@shows("tracers", "build_tables")
def tables_of_functions() -> None:
    tracers().build_tables()
    rules = sys.modules["torch._dynamo.trace_rules"]
    assert torch.add in rules.get_torch_obj_rule_map()
    assert torch.Tensor.add in rules.get_tensor_method()
