"""Compilers of torch while functions are patched: what they keep of a session, and that TorchScript does not cast.

tests/integration/test_compiled_models.py has the casts in compiled code.
"""

from __future__ import annotations

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
from helpers import HALF_DTYPES, casts_on
from torch import nn

import ampatch
from ampatch import amp, compilers

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def compiled(function: Callable[..., object], backend: str = "aot_eager") -> Callable[..., object]:
    return torch.compile(function, backend=backend, fullgraph=True)


class TestCompiledCode:
    @pytest.mark.slow
    def test_compiled_code_casts_after_torch_distributed_cleared_tables(self):
        layer, x = nn.Conv1d(1, 1, 3, padding=1), torch.linspace(-1, 1, 24).view(3, 1, 8)
        torch._dynamo.trace_rules.clear_lru_cache()  # as init_process_group does
        for half in HALF_DTYPES:  # the second session would meet the wrappers of the first in them
            with casts_on(half):
                assert compiled(lambda x: layer(x))(x).dtype is half  # noqa: PLW0108 - a function to compile

    def test_only_modules_that_models_call_are_traced(self):
        root = Path(ampatch.__file__).parent
        for folder in ("", *(each.name for each in root.iterdir() if (each / "__init__.py").exists())):
            traced = compilers._TRACED.get(folder, "").split()
            for module in (root / folder).glob("[!_]*.py"):
                skipped = torch._dynamo.trace_rules.check_file(str(module)).skipped
                whole = folder in compilers._TRACED[""].split()
                assert skipped != (whole or module.stem in traced), module

    def test_compiled_code_does_not_count_casts(self):
        model = amp.initialize(nn.Linear(4, 4), half_dtype=torch.float16, verbosity=0)
        fast = compiled(model)
        before = amp.cast_counts()
        fast(torch.ones(2, 4))
        assert amp.cast_counts() == before


class TestOtherSettings:
    def test_code_compiled_in_another_session_follows_the_new_settings(self):
        weight, x = nn.Parameter(torch.ones(8, 8)), torch.ones(3, 8)
        fast = compiled(lambda x: x.matmul(weight))
        for half in (torch.float16, torch.bfloat16):
            with casts_on(half):
                assert fast(x).dtype is half
        with casts_on(cast_lists={"unlisted": {"torch.Tensor": ["matmul"]}}):
            assert fast(x).dtype is torch.float32

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
    @pytest.mark.parametrize("order", [("patched", "plain"), ("plain", "patched")])
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
    def test_adopted_models_compile_and_keep_their_hooks_and_forwards(self, copied):
        model = amp.initialize(nn.Sequential(nn.Linear(4, 4)), half_dtype=torch.bfloat16, verbosity=0)
        model = copy.deepcopy(model) if copied else model
        before = [list(hooks.items()) for hooks in (model._forward_pre_hooks, model._forward_hooks)]
        forward = vars(model)["forward"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted = torch.jit.script(model)
        assert scripted(torch.ones(1, 4)).dtype is torch.float32
        assert model(torch.ones(1, 4)).dtype is torch.bfloat16
        assert [list(hooks.items()) for hooks in (model._forward_pre_hooks, model._forward_hooks)] == before
        assert vars(model)["forward"] is forward
