"""``keep_fp32`` at O1: a part of a model computes in float32, forward and backward, wherever and however it runs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import COPIES, assert_same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampatch import amp
from ampatch.errors import OptionError


class Product(torch.autograd.Function):
    """A user's function whose backward pass calls a whitelisted function."""

    seen: tuple[torch.dtype, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.mm(gradient, weight.t()), torch.mm(x.t(), gradient)
        Product.seen += (of_x.dtype, of_weight.dtype)
        return of_x, of_weight


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.seen += [x.dtype, hidden.dtype]
        return Product.apply(hidden, self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.tail = nn.Linear(8, 8), Head(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.head(self.body(x)))


class ByHand(Net):
    """The same with casts off by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        with amp.disable_casts():
            x = self.head(x.float())
        return self.tail(x)


INPUTS = torch.linspace(-1, 1, 24).view(3, 8)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    Product.seen = ()


def kept(half: torch.dtype = torch.bfloat16, keep: Any = "head", **options: Any) -> Net:
    return amp.initialize(Net(), half_dtype=half, keep_fp32=keep, verbosity=0, **options)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    model(INPUTS).float().square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters()}


class TestForward:
    def test_a_kept_part_computes_in_float32_between_half_parts(self, half: torch.dtype) -> None:
        model = kept(half)
        result = model(INPUTS)
        assert (model.head.seen, result.dtype) == ([torch.float32, torch.float32], half)
        amp.deinitialize()
        by_hand = amp.initialize(ByHand(), half_dtype=half, verbosity=0)
        assert_same_bits(result, by_hand(INPUTS))

    @pytest.mark.parametrize("keep", ["head", "he*", Head, ["head", "tail"], "Head", f"{__name__}.Head"], ids=str)
    def test_keep_fp32_takes_names_patterns_and_classes(self, keep: Any) -> None:
        model = kept(keep=keep)
        assert model(INPUTS).dtype is (torch.float32 if isinstance(keep, list) else torch.bfloat16)
        assert model.head.seen == [torch.float32] * 2

    def test_keep_fp32_of_a_container_keeps_its_modules(self) -> None:
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        amp.initialize(model, half_dtype=torch.bfloat16, keep_fp32="layers", verbosity=0)
        assert [layer(INPUTS).dtype for layer in model.layers] == [torch.float32] * 2

    def test_a_kept_part_computes_in_float32_at_o2_with_patches(self) -> None:
        model = kept(opt_level="O2", patch_torch_functions=True)
        model(INPUTS)
        assert model.head.seen == [torch.float32] * 2

    def test_writes_of_a_kept_part_to_its_arguments_reach_the_caller(self) -> None:
        class Writes(nn.Module):
            def forward(self, x: Tensor, found: dict[str, Tensor]) -> Tensor:
                found["x"] = x
                return x.add_(1)

        model = nn.Sequential(Writes())
        amp.initialize(model, half_dtype=torch.bfloat16, keep_fp32="0", verbosity=0)
        given, found = torch.zeros(2, dtype=torch.bfloat16), {}
        model[0](given, found)
        assert given.tolist() == [1, 1]
        assert found["x"] is given

    def test_a_forward_that_the_user_replaced_is_kept_and_restored(self) -> None:
        model, calls = Net(), []
        own = model.head.forward
        model.head.forward = replaced = lambda x: (calls.append(x.dtype), own(x))[1]
        amp.initialize(model, half_dtype=torch.bfloat16, keep_fp32="head", verbosity=0)
        model(INPUTS)
        amp.deinitialize()
        assert calls == [torch.float32]
        assert model.head.forward is replaced


class TestBackward:
    def test_backward_passes_of_users_functions_in_a_kept_part_run_in_float32(self, half: torch.dtype) -> None:
        gradients(kept(half))
        assert Product.seen == (torch.float32, torch.float32)

    def test_backward_passes_of_users_functions_elsewhere_cast(self) -> None:
        model = kept(keep="tail")
        gradients(model)
        assert torch.bfloat16 in Product.seen

    def test_backward_passes_before_a_kept_part_cast(self) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.inner = nn.Parameter(torch.eye(8)), nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(Product.apply(x, self.weight))

        model = amp.initialize(Outer(), half_dtype=torch.bfloat16, keep_fp32="inner", verbosity=0)
        gradients(model)
        assert Product.seen == (torch.bfloat16, torch.bfloat16)


class TestCopies:
    def test_a_deep_copy_computes_in_float32_by_its_own_weights(self) -> None:
        model = kept()
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.head.linear.weight.zero_()
        twin(INPUTS)
        assert twin.head.seen == [torch.float32] * 2
        assert model.head.seen == []
        assert not torch.equal(twin(INPUTS), model(INPUTS))
        amp.deinitialize()
        with pytest.raises(RuntimeError, match="dtype"):
            twin.head(INPUTS.bfloat16())

    def test_a_shallow_copy_computes_by_its_own_attributes(self) -> None:
        model = kept()
        twin = copy.copy(model.head)
        again = copy.copy(twin)
        for each in (twin, again):
            each._modules = dict(each._modules)
            each.linear, each.seen = nn.Linear(8, 8), []
            nn.init.zeros_(each.linear.weight)
            assert not torch.equal(each(INPUTS), model.head(INPUTS))
            assert each.seen == [torch.float32] * 2
        amp.deinitialize()
        assert not torch.equal(twin(INPUTS), model.head(INPUTS))
        assert "forward" not in vars(model.head)

    def test_shallow_copies_of_other_modules_are_as_without_amp(self) -> None:
        class Only(nn.Linear):
            def __reduce_ex__(self, protocol):
                return "only"

        kept()
        only = Only(2, 2)
        assert copy.copy(only) is only
        amp.deinitialize()
        assert "__copy__" not in vars(nn.Module)

    def test_a_pickled_part_has_its_own_forward(self) -> None:
        model = kept()
        stored = pickle.dumps(model.tail)  # not kept
        assert pickle.loads(stored)(INPUTS).dtype is torch.bfloat16
        other = pickle.loads(pickle.dumps(model.head))
        amp.deinitialize()
        assert_same_bits(other(INPUTS), model.head(INPUTS))

    @COPIES
    @pytest.mark.parametrize("in_new_session", [False, True], ids=["same session", "new session"])
    def test_a_copy_can_be_adopted_again(self, copied: Any, in_new_session: bool) -> None:
        model = kept()
        wanted = model(INPUTS)
        twin = copied(model)
        if in_new_session:
            amp.deinitialize()
        twin = amp.initialize(twin, half_dtype=torch.bfloat16, keep_fp32="head", verbosity=0)
        twin.head.seen.clear()
        assert_same_bits(twin(INPUTS), wanted)
        assert twin.head.seen == [torch.float32] * 2
        amp.deinitialize()
        assert_same_bits(twin.head(INPUTS), model.head(INPUTS))

    def test_a_replica_of_data_parallel_uses_its_own_weights(self) -> None:
        replica = kept().head._replicate_for_data_parallel()
        again = replica._replicate_for_data_parallel()
        for each in (replica, again):
            each.linear, each.weight = nn.Linear(8, 8), torch.zeros(8, 8)
            result = each(INPUTS.bfloat16())
            assert (result.dtype, result.count_nonzero()) == (torch.float32, 0)
        amp.deinitialize()
        assert again(INPUTS).count_nonzero() == 0

    def test_a_converted_copy_casts_by_the_lists(self) -> None:
        model = kept()
        converted = amp.convert_model(model, half_dtype=torch.bfloat16)
        with torch.no_grad():
            converted(INPUTS)
        assert converted.head.seen[1] is torch.bfloat16


class TestEnd:
    def test_an_error_in_initialize_leaves_no_replaced_forward(self) -> None:
        model = Net()
        model.tail.half()
        with pytest.raises(OptionError, match=r"matches 'tail', whose 'weight' is half.*get_submodule\('tail'\)"):
            amp.initialize(model, half_dtype=torch.float16, keep_fp32=["head", "tail"], verbosity=0)
        assert not any("forward" in vars(each) for each in model.modules())

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
    def test_torchscript_compiles_the_forward_of_the_module_itself(self) -> None:
        model = amp.initialize(nn.Sequential(nn.Linear(8, 8)), half_dtype=torch.bfloat16, keep_fp32="0", verbosity=0)
        assert torch.jit.script(model)(INPUTS).dtype is torch.float32
        assert model(INPUTS.bfloat16()).dtype is torch.float32


@pytest.mark.usefixtures("nothing_compiled")
class TestCompiled:
    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("keep", ["1", "1.1"], ids=["region", "part of it"])
    def test_a_compiled_checkpoint_of_a_kept_part_has_the_same_gradients(self, backend: str, keep: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 2))
        amp.initialize(model, half_dtype=torch.bfloat16, keep_fp32=keep, verbosity=0)
        wanted = gradients(model)
        model.zero_grad()

        def forward(x: Tensor) -> Tensor:
            return model[2](checkpoint(model[1], model[0](x), use_reentrant=False))

        torch.compile(forward, backend=backend, fullgraph=True)(INPUTS).float().square().sum().backward()
        for name, each in model.named_parameters():
            assert_same_bits(each.grad, wanted[name])
