"""Compilers of torch while functions are patched: torch.compile casts as eager code, TorchScript code does not cast.

Backends that need no compiler suffice: "eager" runs the graph that was traced, "aot_eager" also traces it through
autograd and torch's decompositions.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._functorch.aot_autograd as aot_autograd
import torch.nn.functional as F
from helpers import HALF_DTYPES, casts_on, check_rows, dtype_name, in_thread
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import ampatch
from ampatch import amp, compilers

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def compiled(function: Callable[..., object], backend: str = "aot_eager") -> Callable[..., object]:
    return torch.compile(function, backend=backend, fullgraph=True)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.square = nn.Parameter(torch.randn(8, 8) / 3)
        self.linear = nn.Linear(8, 8)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)


CALLS = {
    "linear": lambda w, x: w.linear(x),
    "convolution": lambda w, x: w.convolution(x[:, None]),
    "function": lambda w, x: torch.mm(x, w.square),
    "method": lambda w, x: x.matmul(w.square),
    "operator": lambda w, x: x @ w.square,
    "reflected-operator": lambda w, x: w.square @ x.t(),
    "unbound-method": lambda w, x: torch.Tensor.matmul(x, w.square),
    "method-of-half": lambda w, x: (x @ w.square).softmax(-1),
    "layer-norm": lambda w, x: w.norm(w.linear(x)),
    "softmax": lambda w, x: F.softmax(w.linear(x), dim=-1),
    "sum": lambda w, x: w.linear(x).sum(),
    "power": lambda w, x: w.linear(x).abs() ** 2.5,
    "einsum": lambda w, x: torch.einsum("ij,jk->ik", x, w.square),
    "promotion": lambda w, x: torch.cross(w.linear(x)[:, :3], x[:, :3], dim=-1),
    "norm-in-python": lambda w, x: F.normalize(w.linear(x)),
    "cosine": lambda w, x: F.cosine_similarity(x + w.square[:3], w.linear(x)),
    "distance": lambda w, x: torch.cdist(w.linear(x), w.square),
    "attention": lambda w, x: F.scaled_dot_product_attention(*[(x + w.square[:3])[None, None]] * 3),
    "attention-module": lambda w, x: w.attention(x[None], x[None], x[None])[0],
    "loss": lambda w, x: F.cross_entropy(w.linear(x), torch.arange(3)),
    "list": lambda w, x: torch.linalg.multi_dot([x, w.square, w.square]),
    "condition": lambda w, x: F.interpolate(w.linear(x)[None], 4, mode="linear"),
    "in-place": lambda w, x: x.clone().lerp_(w.linear(x), 0.5),
    "checkpoint": lambda w, x: torch.utils.checkpoint.checkpoint(w.linear, x, use_reentrant=False),
}


class TestCompiledCode:
    @pytest.mark.parametrize(
        "half", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=dtype_name
    )
    @pytest.mark.parametrize(
        "names",
        [
            pytest.param([*CALLS], id="all"),
            *(pytest.param([name], id=name, marks=pytest.mark.slow) for name in CALLS),
        ],
    )
    def test_compiled_code_casts_as_eager_code_and_has_its_gradients(self, names, half, subtests):
        weights, x = [Weights() for _ in names], torch.linspace(-1, 1, 24).view(3, 8)
        calls = [CALLS[name] for name in names]

        def call_each(weights: list[Weights], x: Tensor) -> list[Tensor]:
            return [call(own, x) for call, own in zip(calls, weights, strict=True)]

        def run(function: Callable[..., list[Tensor]]) -> tuple[list[Tensor], list[list[Tensor | None]]]:
            for own in weights:
                own.zero_grad()
            results = function(weights, x)
            sum(result.float().pow(2).sum() for result in results).backward()
            return results, [[parameter.grad for parameter in own.parameters()] for own in weights]

        def check(result: Tensor, eager: Tensor, found: list[Tensor | None], gradients: list[Tensor | None]) -> None:
            assert result.dtype is eager.dtype
            torch.testing.assert_close(result, eager, rtol=2e-2, atol=2e-2)
            assert [gradient is None for gradient in found] == [gradient is None for gradient in gradients]
            for gradient, expected in zip(found, gradients, strict=True):
                if expected is not None:
                    torch.testing.assert_close(gradient, expected, rtol=4e-2, atol=4e-2)

        with casts_on(half):
            eager = run(call_each)
            found = run(compiled(call_each))
        check_rows(subtests, zip(names, found[0], eager[0], found[1], eager[1], strict=True), check)

    @pytest.mark.slow
    def test_compiled_code_casts_after_torch_distributed_cleared_tables(self):
        call, x = CALLS["convolution"], torch.linspace(-1, 1, 24).view(3, 8)
        torch._dynamo.trace_rules.clear_lru_cache()  # as init_process_group does
        for half in HALF_DTYPES:  # the second session would meet the wrappers of the first in them
            with casts_on(half):
                assert compiled(call)(Weights(), x).dtype is half

    def test_only_modules_that_models_call_are_traced(self):
        root = Path(ampatch.__file__).parent
        for folder in ("", *(each.name for each in root.iterdir() if (each / "__init__.py").exists())):
            traced = compilers._TRACED.get(folder, "").split()
            for module in (root / folder).glob("[!_]*.py"):
                skipped = torch._dynamo.trace_rules.check_file(str(module)).skipped
                whole = folder in compilers._TRACED[""].split()
                assert skipped != (whole or module.stem in traced), module

    def test_a_compiled_model_is_one_graph(self):
        counter = CompileCounterWithBackend("aot_eager")
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        with casts_on():
            fast = torch.compile(model, backend=counter)
            fast(torch.ones(2, 4))
            fast(torch.ones(2, 4))
        assert counter.frame_count == 1

    def test_compiled_code_does_not_count_casts(self):
        model = amp.initialize(nn.Linear(4, 4), half_dtype=torch.float16, verbosity=0)
        fast = compiled(model)
        before = amp.cast_counts()
        fast(torch.ones(2, 4))
        assert amp.cast_counts() == before


KINDS = {
    "function": lambda w, x: torch.mm(x, w.square),
    "method": lambda w, x: x.matmul(w.square),
    "operator": lambda w, x: x @ w.square,
    "function-that-calls-others": lambda w, x: F.normalize((x + w.square[:3]).bfloat16()),
}


def expected_dtype(kind: str, is_cast: bool) -> torch.dtype:
    """Blacklisted functions get half tensors, and others float32."""
    return torch.float32 if (kind == "function-that-calls-others") == is_cast else torch.bfloat16


@BACKENDS
@pytest.mark.parametrize("kind", KINDS)
class TestOnAndOff:
    """What was compiled in one state must not run in another."""

    def run(self, kind: str, backend: str) -> Callable[[], torch.dtype]:
        weights, x = Weights(), torch.ones(3, 8)
        fast = compiled(KINDS[kind], backend)
        return lambda: fast(weights, x).dtype

    @pytest.mark.slow
    @pytest.mark.covering(1)
    def test_compiled_code_casts_in_sessions_and_not_between_them(self, kind, backend):
        run = self.run(kind, backend)
        for _ in range(2):
            assert run() is expected_dtype(kind, False)
            with casts_on():
                assert run() is expected_dtype(kind, True)
        assert run() is expected_dtype(kind, False)

    @pytest.mark.slow
    @pytest.mark.covering(1)
    @pytest.mark.parametrize("states", [(True, False, True, False, True), (False, True)], ids=["on first", "off first"])
    def test_compiled_code_follows_disable_casts(self, kind, backend, states):
        run = self.run(kind, backend)
        with casts_on():
            for is_on in states:
                with contextlib.nullcontext() if is_on else amp.disable_casts():
                    assert run() is expected_dtype(kind, is_on)

    @pytest.mark.slow
    @pytest.mark.covering(1)
    def test_compiled_code_follows_disable_casts_of_its_thread(self, kind, backend):
        run = self.run(kind, backend)
        with casts_on():
            run()
            with amp.disable_casts():
                assert run() is expected_dtype(kind, False)
                assert in_thread(run) is expected_dtype(kind, True)
                assert run() is expected_dtype(kind, False)

    @pytest.mark.covering(1)
    def test_disable_casts_works_inside_of_compiled_code(self, kind, backend):
        weights, x = Weights(), torch.ones(3, 8)
        call = KINDS[kind]

        def both(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            before = call(weights, x)
            with amp.disable_casts():
                inside = call(weights, x)
            return before, inside, call(weights, x)

        with casts_on():
            results = compiled(both, backend)(weights, x)
        cast, uncast = expected_dtype(kind, True), expected_dtype(kind, False)
        assert [result.dtype for result in results] == [cast, uncast, cast]


class TestOtherSettings:
    def test_code_compiled_in_another_session_follows_the_new_settings(self):
        weights, x = Weights(), torch.ones(3, 8)
        fast = compiled(KINDS["method"])
        for half in (torch.float16, torch.bfloat16):
            with casts_on(half):
                assert fast(weights, x).dtype is half
        with casts_on(cast_lists={"unlisted": {"torch.Tensor": ["matmul"]}}):
            assert fast(weights, x).dtype is torch.float32

    def test_traced_graphs_are_not_cached_on_disk_during_the_session(self):
        assert aot_autograd.should_use_local_autograd_cache()
        with casts_on():
            assert not aot_autograd.should_use_local_autograd_cache()
            assert not aot_autograd.should_use_remote_autograd_cache()
        assert aot_autograd.should_use_local_autograd_cache()


class TestFreshProcess:
    @pytest.mark.slow
    @pytest.mark.either_way
    def test_the_compiler_may_be_imported_during_the_session(self, fresh):
        done = fresh.run(
            textwrap.dedent("""
            import sys
            import torch
            from torch import nn
            from ampatch import amp

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.linear, self.convolution = nn.Linear(4, 4), nn.Conv1d(1, 1, 3, padding=1)
                    self.norm = nn.LayerNorm(4)

                def forward(self, x):
                    x = self.norm(self.convolution(self.linear(x)[:, None])[:, 0])
                    return torch.softmax(torch.matmul(x, x.t()) @ x, -1), torch.Tensor.matmul(x, x.t())

            model, x = Net(), torch.randn(3, 4)
            assert "torch._dynamo" not in sys.modules
            amp.initialize(model, half_dtype=torch.float16, verbosity=0)
            eager = model(x)
            fast = torch.compile(model, fullgraph=True, backend="aot_eager")
            result = fast(x)
            assert [r.dtype for r in result] == [e.dtype for e in eager] == [torch.float32, torch.float16]
            torch.testing.assert_close(result, eager, rtol=1e-2, atol=1e-2)
            sum(r.float().sum() for r in result).backward()
            amp.deinitialize()
            assert [r.dtype for r in fast(x)] == [torch.float32, torch.float32]
            print("done")
        """)
        )
        assert done.stdout == "done\n", done.stderr

    @pytest.mark.slow
    @pytest.mark.either_way
    def test_torch_holds_no_wrapper_after_the_session(self, fresh):
        """Torch builds its tables of functions lazily, and keeps them for good."""
        done = fresh.run(
            textwrap.dedent("""
            import copy, gc, sys, types
            import torch
            from torch import nn
            import torch.nn.functional as F
            from ampatch import amp
            from ampatch.function_wrapper import is_wrapper
            from ampatch.runtime import runtime

            amp.initialize(nn.Linear(4, 4), half_dtype=torch.float16, verbosity=0)
            installed = [patch.installed() for patch in runtime.live.ledger.patches]
            wrappers = [f for f in installed if is_wrapper(f)]
            del installed
            assert len(wrappers) > 300

            def f(x):
                return (F.softmax(x @ x, -1) + torch.Tensor.matmul(x, x) + F.cosine_similarity(x, x)).sum()

            torch.compile(f, backend="aot_eager")(torch.randn(4, 4, requires_grad=True)).backward()
            torch.jit.script(nn.Linear(4, 4))(torch.randn(4, 4))
            torch.func.jvp(lambda x: F.linear(x, x), (torch.randn(4, 4),), (torch.randn(4, 4),))
            torch.overrides.get_overridable_functions()
            torch.overrides.get_testing_overrides()
            torch.overrides.is_tensor_method_or_property(torch.Tensor.exp)
            amp.deinitialize()
            torch._dynamo.reset()
            gc.collect()

            ids = {id(wrapper): wrapper for wrapper in wrappers}
            mine = (id(ids), id(wrappers))
            for holder in gc.get_objects():
                if isinstance(holder, (dict, set, frozenset, list, tuple)) and id(holder) not in mine:
                    items = holder.values() if isinstance(holder, dict) else holder
                    keys = list(holder) if isinstance(holder, dict) else []
                    held = {ids[id(item)].__qualname__ for item in [*items, *keys] if id(item) in ids}
                    if held:
                        print(type(holder).__name__, len(holder), sorted(held)[:3])
            print("done")
        """)
        )
        assert done.stdout == "done\n", done.stderr

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for the CPU")
    @pytest.mark.parametrize("order", [("patched", "plain", "patched"), ("plain", "patched", "plain")])
    def test_the_disk_cache_of_inductor_tells_sessions_apart(self, fresh, order, tmp_path):
        script = textwrap.dedent("""
            import sys
            import torch
            from torch import nn
            from ampatch import amp

            if sys.argv[1] == "patched":
                amp.init(half_dtype=torch.bfloat16)
            w, x = nn.Parameter(torch.ones(8, 8)), torch.ones(3, 8)
            with torch.no_grad():
                print(torch.compile(lambda x: (x @ w).sin(), fullgraph=True)(x).dtype)
        """)
        for kind in order:
            done = fresh.run(script, kind, environment={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
            expected = "torch.bfloat16" if kind == "patched" else "torch.float32"
            assert done.stdout.strip().endswith(expected), done.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
class TestTorchScript:
    """It is compiled as without amp, and runs without casts."""

    @pytest.mark.parametrize(
        ("make", "inputs"),
        [
            pytest.param(lambda: nn.Linear(4, 4), (torch.ones(2, 4),), id="builtin"),
            pytest.param(lambda: nn.LayerNorm(4), (torch.ones(2, 4),), id="python-function"),
            pytest.param(lambda: nn.Conv1d(1, 1, 2), (torch.ones(2, 1, 4),), id="overloaded-builtin"),
            pytest.param(nn.CrossEntropyLoss, (torch.ones(2, 4), torch.ones(2, 4)), id="loss"),
            pytest.param(lambda: nn.TransformerEncoderLayer(4, 2), (torch.ones(1, 2, 4),), id="transformer"),
        ],
    )
    def test_modules_compile_during_and_after_the_session(self, make, inputs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with casts_on():
                module = make().eval()
                during = torch.jit.script(module)(*inputs)
            after = torch.jit.script(make().eval())
        assert during.dtype is torch.float32
        torch.testing.assert_close(during, module(*inputs))
        assert after(*inputs).dtype is torch.float32

    @pytest.mark.parametrize("copied", [False, True])
    def test_adopted_models_compile_and_keep_their_hooks(self, copied):
        model = amp.initialize(nn.Sequential(nn.Linear(4, 4)), half_dtype=torch.bfloat16, verbosity=0)
        model = copy.deepcopy(model) if copied else model
        before = [list(hooks.items()) for hooks in (model._forward_pre_hooks, model._forward_hooks)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted = torch.jit.script(model)
        assert scripted(torch.ones(1, 4)).dtype is torch.float32
        assert model(torch.ones(1, 4)).dtype is torch.bfloat16
        assert [list(hooks.items()) for hooks in (model._forward_pre_hooks, model._forward_hooks)] == before
