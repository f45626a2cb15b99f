"""Of the session: it is one, takes in all or nothing, and leaves everything as it was."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import OWN_ATTRIBUTES
from helpers import assert_same_bits
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from ampatch import amp
from ampatch.errors import AmpWarning, OptionError, UsageError
from ampatch.patching.function_patches import FunctionPatches
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
    """An optimizer that cannot be adopted: it lets nobody replace its step."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "step":
            raise AttributeError("step is closed")
        super().__setattr__(name, value)


class Slim:
    """An optimizer to which no weak reference can be made."""

    __slots__ = ("param_groups",)

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters)}]

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_an_optimizer_without_weak_references_is_refused(opt_level: str) -> None:
    model = Net()
    with pytest.raises(OptionError, match="the step of this Slim cannot be replaced"):
        amp.initialize(model, Slim(model.parameters()), opt_level=opt_level, verbosity=0)
    assert runtime.live is None


def traces(*models: nn.Module) -> list[object]:
    """What a session leaves on models: hooks, and functions in place of others."""
    return [
        [list(module._forward_hooks), list(module._forward_pre_hooks), vars(module).get("activation")]
        for model in models
        for module in model.modules()
    ]


def patched() -> bool:
    return hasattr(torch.mm, "__wrapped__")


class TestOneSession:
    def test_is_joined_by_equal_settings(self):
        amp.initialize(Net(), verbosity=0)
        first = runtime.live
        amp.initialize(Net(), verbosity=0)
        assert runtime.live is first

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"half_dtype": torch.float16}, "half_dtype is torch.bfloat16 (this call: torch.float16)"),
            ({"opt_level": "O0"}, "opt_level is 'O1' (this call: 'O0')"),
            ({"loss_scale": 8.0}, "loss_scale is 1.0 (this call: 8.0)"),
            ({"num_losses": 2}, "num_losses"),
            ({"cast_lists": {"blacklist": {"torch": ["mm"]}}}, "cast_lists"),
            ({"scale_window": 7}, "scale_window is 2000 (this call: 7)"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_is_not_joined_by_others_and_stays_as_it_is(self, options, named):
        live, model = amp.initialize(Net(), half_dtype=torch.bfloat16, verbosity=0), Net()
        before = traces(model)
        with pytest.raises(UsageError, match=r"amp\.deinitialize\(\)") as caught:
            amp.initialize(model, verbosity=0, **{"half_dtype": torch.bfloat16, **options})
        assert named in str(caught.value)
        assert traces(model) == before
        assert live.linear(x()).dtype is torch.bfloat16

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({}, "it was set up by amp.init (this call: amp.initialize)"),
            ({"enable_caching": False}, "enable_caching"),
            ({"allow_banned": True}, "allow_banned"),
        ],
        ids=["defaults", "enable_caching", "allow_banned"],
    )
    def test_of_init_is_not_joined_and_the_difference_is_said(self, options, named):
        amp.init(half_dtype=torch.bfloat16, **options)
        with pytest.raises(UsageError, match=r"amp\.deinitialize\(\)") as caught:
            amp.initialize(Net(), half_dtype=torch.bfloat16, verbosity=0)
        assert named in str(caught.value)

    def test_cannot_be_opened_over_another(self):
        amp.initialize(Net(), verbosity=0)
        live = runtime.live
        with pytest.raises(UsageError, match=r"amp\.deinitialize\(\)"):
            open_session(live.settings, ["cpu"])
        assert runtime.live is live


class TestTakingDown:
    def test_restores_torch_models_and_optimizers(self):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [*traces(model), vars(optimizer).get("step"), torch.mm, dict(vars(torch.backends.mha))]
        parameters = [parameter.detach().clone() for parameter in model.parameters()]
        amp.initialize(model, optimizer, verbosity=0)
        assert traces(model)[0] != before[0]
        assert "step" in vars(optimizer)
        assert patched()
        amp.deinitialize()
        assert [*traces(model), vars(optimizer).get("step"), torch.mm, dict(vars(torch.backends.mha))] == before
        for parameter, was in zip(model.parameters(), parameters, strict=True):
            assert_same_bits(parameter, was)

    def test_twice_is_once(self):
        amp.initialize(Net(), verbosity=0)
        amp.deinitialize()
        amp.deinitialize()
        assert runtime.live is None

    def test_of_a_session_that_is_over_does_nothing_to_the_next(self):
        amp.initialize(Net(), verbosity=0)
        first = runtime.live
        amp.deinitialize()
        amp.initialize(Net(), verbosity=0)
        close_session(first)
        assert runtime.live is not None
        assert patched()

    def test_makes_room_for_another_policy(self):
        model = Net()
        for half in (torch.float16, torch.bfloat16, torch.float16):
            amp.initialize(model, half_dtype=half, verbosity=0)
            assert model.linear(x()).dtype is half
            amp.deinitialize()
            assert model.linear(x()).dtype is torch.float32

    def test_is_complete_where_a_piece_raises(self):
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

    def test_reports_what_somebody_else_replaced_at_the_line_that_took_it_down(self):
        model = amp.initialize(Net(), verbosity=0)
        model.activation = torch.tanh
        with pytest.warns(AmpWarning, match=r"and its replacements stay: Net\.activation\.") as caught:
            amp.deinitialize()
        assert caught[0].filename == __file__
        assert model.activation is torch.tanh

    def test_lets_the_session_go(self):
        model = amp.initialize(Net(), verbosity=0)
        model(x())
        died = weakref.ref(runtime.live)
        amp.deinitialize()
        gc.collect()
        assert died() is None


def refuse(name: str) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise MemoryError(name)

    return fail


@pytest.fixture
def sealed() -> Iterator[object]:
    """A class whose functions can be found, and not replaced."""

    class Meta(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise TypeError("sealed")

    class Sealed(metaclass=Meta):
        @staticmethod
        def function(value: Tensor) -> Tensor:
            return value

    return Sealed


def test_every_place_in_torch_that_is_patched_is_compared_after_every_test():
    amp.initialize(Net(), half_dtype=torch.float16, verbosity=0)
    owners = {id(patch.owner()): patch.owner() for patch in runtime.live.ledger.patches}
    compared = {id(owner) for owner in OWN_ATTRIBUTES.values()}
    others = [owner for key, owner in owners.items() if key not in compared and not isinstance(owner, nn.Module)]
    assert not [name for name in map(module_name, others) if name.partition(".")[0] == "torch"]


def module_name(owner: object) -> str:
    return owner.__module__ if isinstance(owner, type) else owner.__name__


class TestFailureHalfWay:
    """Everything is as it was, and the next attempt works."""

    def attempt(self, error: type[BaseException], model: nn.Module, *optimizers: object) -> None:
        before = [*traces(model), *(dict(vars(optimizer)) for optimizer in optimizers)]
        hooks = dict(_global_optimizer_post_hooks)
        with pytest.raises(error):
            amp.initialize(model, list(optimizers), verbosity=0)
        assert [*traces(model), *(dict(vars(optimizer)) for optimizer in optimizers)] == before
        assert dict(_global_optimizer_post_hooks) == hooks

    def test_of_a_registration(self, sealed):
        amp.register_half_function(torch, "mm")
        amp.register_half_function(sealed, "function")
        amp.register_half_function(torch, "bmm")
        self.attempt(TypeError, Net())
        assert runtime.live is None
        assert not patched()

    def test_of_a_rule(self, monkeypatch):
        monkeypatch.setattr(FunctionPatches, "rebind", refuse("in the middle"))
        self.attempt(MemoryError, Net())
        assert runtime.live is None
        assert not patched()

    def test_of_an_optimizer_of_a_first_session(self):
        model = Net()
        good, closed = torch.optim.SGD(model.parameters(), lr=0.1), Closed(model.parameters(), lr=0.1)
        self.attempt(OptionError, model, good, closed)
        assert runtime.live is None
        assert not patched()
        model, good = amp.initialize(model, good, verbosity=0)
        assert model.linear(x()).dtype is torch.bfloat16

    def test_of_an_optimizer_of_a_session_that_is_live(self):
        first = amp.initialize(Net(), verbosity=0)
        live, model = runtime.live, Net()
        good, closed = torch.optim.SGD(model.parameters(), lr=0.1), Closed(model.parameters(), lr=0.1)
        self.attempt(OptionError, model, good, closed)
        assert runtime.live is live
        assert first.linear(x()).dtype is torch.bfloat16
        assert not live.adopted.has(good)
        assert live.adopted.parameter_ids() == {id(parameter) for parameter in first.parameters()}
        amp.initialize(model, good, verbosity=0)
        assert live.adopted.has(good)

    def test_of_a_session_with_half_weights_leaves_the_next_attempt_every_hook(self):
        options = {"opt_level": "O2", "verbosity": 0, "keep_fp32": nn.LayerNorm}
        first = amp.initialize(nn.Sequential(nn.LayerNorm(4)), **options)
        first.append(nn.LayerNorm(4))  # in between, a part of a model that is known has come
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

    def test_of_the_hooks_of_a_second_model(self, monkeypatch):
        first, second = Net(), Net()
        monkeypatch.setattr(second, "register_forward_hook", refuse("no hooks"), raising=False)
        before = traces(first, second)
        with pytest.raises(MemoryError):
            amp.initialize([first, second], verbosity=0)
        assert runtime.live is None
        assert traces(first, second) == before

    def test_leaves_registrations_for_the_next_attempt(self, sealed):
        amp.register_float_function(torch, "mm")
        amp.register_half_function(sealed, "function")
        self.attempt(TypeError, Net())
        runtime.registered.pop()
        amp.initialize(Net(), verbosity=0)
        assert torch.mm(x().bfloat16(), x().t().bfloat16()).dtype is torch.float32


class Plain:
    """An optimizer that is none of torch's: copied and pickled attribute by attribute."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)


COPIES = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"]
)
MAKERS = pytest.mark.parametrize(
    "make", [lambda parameters: torch.optim.Adam(parameters, lr=0.1), Plain], ids=["torch", "plain"]
)


class TestWhatUsersDoWithTheirObjects:
    @COPIES
    @MAKERS
    def test_an_adopted_optimizer_copies_and_the_copy_steps_by_itself(self, copied, make):
        model = Net()
        model, optimizer = amp.initialize(model, make(list(model.parameters())), verbosity=0)
        with amp.scale_loss(model(x()).pow(2).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        twin = copied(optimizer)
        assert type(twin) is type(optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        its = list(twin.param_groups[0]["params"])
        its_before = [parameter.detach().clone() for parameter in its]
        for parameter in its:
            parameter.grad = torch.ones_like(parameter)
        twin.step()
        assert all(torch.equal(was, parameter) for was, parameter in zip(before, model.parameters(), strict=True))
        assert not any(torch.equal(was, parameter) for was, parameter in zip(its_before, its, strict=True))

    def test_the_state_dict_of_an_adopted_optimizer_is_that_of_a_plain_one(self):
        def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            return optimizer.state_dict()

        plain = Net()
        expected = train(plain, torch.optim.Adam(plain.parameters(), lr=0.1))
        model = Net()
        found = train(*amp.initialize(model, torch.optim.Adam(model.parameters(), lr=0.1), verbosity=0))
        assert found.keys() == expected.keys()
        assert found["param_groups"] == expected["param_groups"]
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)

    @COPIES
    def test_an_adopted_model_copies_and_the_copy_is_independent(self, copied):
        model = amp.initialize(Net(), verbosity=0)
        twin = copied(model)
        with torch.no_grad():
            twin.linear.weight.zero_()
        assert not torch.equal(twin(x()), model(x()))
        amp.deinitialize()
        assert torch.equal(twin(x()), twin.activation(twin.linear.bias.expand(3, 4), dim=-1))

    def test_a_copy_may_be_adopted_itself(self):
        model = amp.initialize(Net(), half_dtype=torch.bfloat16, verbosity=0)
        twin = amp.initialize(copy.deepcopy(model), half_dtype=torch.bfloat16, verbosity=0)
        with torch.no_grad():
            assert torch.equal(twin(x()), model(x()))
        amp.deinitialize()
        assert twin.linear(x()).dtype is torch.float32

    def test_an_optimizer_that_compares_and_does_not_hash_is_told_from_its_equal(self):
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

    def test_dropped_models_and_optimizers_are_let_go(self):
        amp.initialize(nn.Module(), half_dtype=torch.bfloat16, verbosity=0)
        model = Net()
        model, optimizer = amp.initialize(model, torch.optim.Adam(model.parameters(), lr=0.1), verbosity=0)
        with amp.scale_loss(model(x()).pow(2).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        died = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.linear.weight)]
        del model, optimizer, loss
        gc.collect()
        assert [reference() for reference in died] == [None, None, None]
        assert not runtime.live.adopted.by_id
