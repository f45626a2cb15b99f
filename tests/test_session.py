"""Tests the session: there is one, it is set up as a whole or not at all, and its end restores everything."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from conftest import OWN_ATTRIBUTES
from helpers import COPIES, assert_same_state
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.patching.function_patches import Wrappers
from ampatch.runtime import close_session, open_session, runtime


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.activation = torch.nn.functional.softmax

    def forward(self, value: Tensor) -> Tensor:
        return self.activation(self.linear(value), dim=-1)


def x() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


class Closed(torch.optim.SGD):
    """An optimizer that cannot be adopted: it refuses to have its step replaced."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "step":
            raise AttributeError("step is closed")
        super().__setattr__(name, value)


def traces(*objects: nn.Module | torch.optim.Optimizer) -> list[object]:
    """What a session leaves on models and optimizers: hooks, and functions in place of others."""
    found = []
    for each in objects:
        if isinstance(each, nn.Module):
            modules = list(each.modules())
            found += [[list(module._forward_hooks), list(module._forward_pre_hooks)] for module in modules]
            found.append(vars(each).get("activation"))
        else:
            found.append(dict(vars(each)))
    return found


def patched() -> bool:
    return hasattr(torch.mm, "__wrapped__")


class TestOneSession:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"half_dtype": torch.float16}, "half_dtype is torch.bfloat16 (this call: torch.float16)"),
            ({"cast_lists": {"blacklist": {"torch": ["mm"]}}}, "cast_lists"),
        ],
        ids=["option", "lists"],
    )
    def test_call_with_other_settings_raises_and_changes_nothing(self, options, named):
        live, model = amp.initialize(Net(), half_dtype=torch.bfloat16, verbosity=0), Net()
        before = traces(model)
        with pytest.raises(UsageError, match=r"amp\.deinitialize\(\)") as caught:
            amp.initialize(model, verbosity=0, **{"half_dtype": torch.bfloat16, **options})
        assert named in str(caught.value)
        assert traces(model) == before
        assert live.linear(x()).dtype is torch.bfloat16

    def test_second_session_cannot_be_opened_beside_a_live_one(self):
        amp.initialize(Net(), verbosity=0)
        live = runtime.live
        with pytest.raises(UsageError, match=r"amp\.deinitialize\(\)"):
            open_session(live.settings, ["cpu"])
        assert runtime.live is live


class TestDeinitialize:
    def test_deinitialize_restores_torch_models_and_optimizers(self):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def state() -> list[object]:
            return [*traces(model, optimizer), torch.mm, dict(vars(torch.backends.mha))]

        before = state()
        parameters = copy.deepcopy(model.state_dict())
        amp.initialize(model, optimizer, verbosity=0)
        assert traces(model)[0] != before[0]
        assert "step" in vars(optimizer)
        assert patched()
        amp.deinitialize()
        assert state() == before
        assert_same_state(model.state_dict(), parameters)

    def test_deinitialize_does_nothing_without_a_session(self):
        amp.deinitialize()
        amp.initialize(Net(), verbosity=0)
        first = runtime.live
        amp.deinitialize()
        amp.deinitialize()
        assert runtime.live is None
        amp.initialize(Net(), verbosity=0)
        close_session(first)
        assert runtime.live is not None
        assert patched()

    def test_deinitialize_goes_on_if_an_undo_raises(self):
        def fail() -> None:
            raise ValueError("cannot be taken out")

        model = Net()
        before = traces(model)
        amp.initialize(model, verbosity=0)
        runtime.live.ledger.on_undo(fail)
        with pytest.raises(ValueError, match="cannot be taken out"):
            amp.deinitialize()
        assert runtime.live is None
        assert traces(model) == before
        assert not patched()

    def test_deinitialize_leaves_and_reports_what_others_replaced(self):
        model = amp.initialize(Net(), verbosity=0)
        model.activation = torch.tanh
        with pytest.warns(AmpWarning, match=r"and its replacements stay: Net\.activation\.") as caught:
            amp.deinitialize()
        assert caught[0].filename == __file__
        assert model.activation is torch.tanh

    def test_session_is_freed_after_deinitialize(self):
        model = amp.initialize(Net(), verbosity=0)
        model(x())
        died = weakref.ref(runtime.live)
        amp.deinitialize()
        gc.collect()
        assert died() is None


def refuse(*_: object, **__: object) -> object:
    raise MemoryError


@pytest.fixture
def sealed() -> object:
    """A class whose functions can be found, and not replaced."""

    class Meta(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError("sealed")

    class Sealed(metaclass=Meta):
        @staticmethod
        def function(value: Tensor) -> Tensor:
            return value

    return Sealed


def name_of(owner: object) -> str:
    return owner.__module__ if isinstance(owner, type) else owner.__name__


def test_conftest_compares_every_place_in_torch_that_amp_patches():
    amp.initialize(Net(), half_dtype=torch.float16, verbosity=0)
    owners = {id(patch.owner()): patch.owner() for patch in runtime.live.ledger.patches}
    compared = {id(owner) for owner in OWN_ATTRIBUTES.values()}
    others = [owner for key, owner in owners.items() if key not in compared and not isinstance(owner, nn.Module)]
    assert not [name for name in map(name_of, others) if name.partition(".")[0] == "torch"]


def assert_initialize_fails(error: type[BaseException], models: object, *optimizers: object) -> None:
    """Asserts that it raises, and that models and optimizers are as before; and torch, without a session before."""
    live = runtime.live
    objects = [*(models if isinstance(models, list) else [models]), *optimizers]
    before = traces(*objects)
    hooks = dict(_global_optimizer_post_hooks)
    with pytest.raises(error):
        amp.initialize(models, list(optimizers), verbosity=0)
    assert traces(*objects) == before
    assert dict(_global_optimizer_post_hooks) == hooks
    assert runtime.live is live
    assert patched() is (live is not None)


class TestFailedInitialize:
    def test_registration_that_fails_undoes_the_others_and_all_stay_registered(self, sealed):
        amp.register_float_function(torch, "mm")
        amp.register_half_function(torch, "bmm")
        amp.register_half_function(sealed, "function")
        assert_initialize_fails(TypeError, Net())
        runtime.registered.pop()
        amp.initialize(Net(), verbosity=0)
        assert torch.mm(x().bfloat16(), x().t().bfloat16()).dtype is torch.float32

    def test_patch_that_fails_undoes_the_others(self, monkeypatch):
        monkeypatch.setattr(Wrappers, "rebind", refuse)
        assert_initialize_fails(MemoryError, Net())

    def test_hooks_that_fail_on_the_second_model_leave_none_on_the_first(self, monkeypatch):
        first, second = Net(), Net()
        monkeypatch.setattr(second, "register_forward_hook", refuse, raising=False)
        assert_initialize_fails(MemoryError, [first, second])

    @pytest.mark.parametrize("opt_level", ["O1", "O2"])
    def test_optimizer_without_weak_references_is_refused(self, opt_level):
        class Slim:
            __slots__ = ("param_groups", "step", "zero_grad")

        optimizer, model = Slim(), Net()
        optimizer.param_groups = [{"params": list(model.parameters())}]
        optimizer.step = optimizer.zero_grad = lambda: None
        with pytest.raises(OptionError, match="the step of this Slim cannot be replaced"):
            amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
        assert runtime.live is None

    @pytest.mark.parametrize("is_live", [False, True], ids=["first-session", "live-session"])
    def test_optimizer_that_cannot_be_adopted_leaves_the_session_and_the_others(self, is_live):
        first = amp.initialize(Net(), verbosity=0) if is_live else None
        model = Net()
        good, closed = torch.optim.SGD(model.parameters(), lr=0.1), Closed(model.parameters(), lr=0.1)
        assert_initialize_fails(OptionError, model, good, closed)
        if is_live:
            assert first.linear(x()).dtype is torch.bfloat16
            assert not runtime.live.adopted.has(good)
            assert runtime.live.adopted.parameter_ids() == {id(parameter) for parameter in first.parameters()}
        amp.initialize(model, good, verbosity=0)
        assert runtime.live.adopted.has(good)
        assert model.linear(x()).dtype is torch.bfloat16

    def test_hooks_of_kept_modules_can_be_made_by_the_next_attempt(self):
        options = {"opt_level": "O2", "verbosity": 0, "keep_fp32": nn.LayerNorm}
        first = amp.initialize(nn.Sequential(nn.LayerNorm(4)), **options)
        first.append(nn.LayerNorm(4))  # a new part of a model that amp knows
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        good, closed = torch.optim.SGD(model.parameters(), lr=0.1), Closed(model.parameters(), lr=0.1)
        with pytest.raises(OptionError):
            amp.initialize([first, model], [good, closed], **options)
        amp.initialize([first, model], good, **options)
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
        seen: list[torch.dtype] = []
        for kept in (*first, model[1]):
            kept.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        assert first(x()).dtype is model(x()).dtype is torch.float32
        assert seen == [torch.float32] * 3


class TestAdoptedObjects:
    @COPIES
    def test_copy_of_an_adopted_model_is_independent(self, copied):
        model = amp.initialize(Net(), verbosity=0)
        twin = copied(model)
        with torch.no_grad():
            twin.linear.weight.zero_()
        assert not torch.equal(twin(x()), model(x()))
        amp.deinitialize()
        assert torch.equal(twin(x()), twin.activation(twin.linear.bias.expand(3, 4), dim=-1))

    def test_optimizers_that_compare_equal_are_told_apart(self):
        class Equal(torch.optim.SGD):
            def __eq__(self, other: object) -> bool:
                return isinstance(other, Equal)

            __hash__ = None

        model = Net()
        adopted, other = (Equal(model.parameters(), lr=0.1) for _ in range(2))
        amp.initialize(model, adopted, half_dtype=torch.bfloat16, verbosity=0)
        assert amp.skipped_steps(adopted) == 0
        with pytest.raises(UsageError, match="never handed to"):
            amp.skipped_steps(other)
