"""Casts where a half weight is used: at O2, O3 and O5 inputs and buffers keep their types until they meet one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import COPIES, HALF_DTYPES, pickled
from torch import Tensor, nn

from ampatch import amp
from ampatch.errors import OptionError

LEVELS = ["O2", "O3", "O5"]
pytestmark = pytest.mark.usefixtures("calls_in_both")


class Net(nn.Module):
    """Does what a test asks for, with a layer to have weights."""

    def __init__(self, work: Callable[..., Any] = lambda net, x: net.layer(x), **buffers: Tensor) -> None:
        super().__init__()
        self.layer, self.work = nn.Linear(8, 8), work
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.work(self, *args, **kwargs)


def adopted(model: nn.Module, half: torch.dtype, level: str = "O2", **options: Any) -> Any:
    level = "O2" if (level, half) == ("O5", torch.float16) else level
    return amp.initialize(model, opt_level=level, half_dtype=half, verbosity=0, **options)


class TestBuffers:
    """Buffers of the kinds that a half type ruins."""

    @pytest.mark.parametrize("level", LEVELS)
    def test_buffers_keep_their_type_and_values(self, level: str, half: torch.dtype) -> None:
        given = {
            "inv_freq": 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64),
            "fourier": torch.randn(8, 8) * 30,
            "alphas_cumprod": torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0),
            "position_ids": torch.arange(4097.0),
            "slopes": 2.0 ** -torch.arange(0.5, 8.5, 0.5),
            "steps": torch.tensor(2049.0),
            "codebook": torch.randn(16, 8) * 39,
            "mask": torch.full((4, 4), -1e9),
            "wide": torch.ones(2, dtype=torch.float64),
            "narrow": torch.ones(2, dtype=torch.float16),
        }
        model = adopted(Net(**{name: buffer.clone() for name, buffer in given.items()}), half, level)
        for name, buffer in given.items():
            assert getattr(model, name).dtype is buffer.dtype, name
            assert torch.equal(getattr(model, name), buffer), name
            assert torch.equal(model.state_dict()[name], buffer), name
        amp.deinitialize()
        assert all(torch.equal(getattr(model, name), buffer) for name, buffer in given.items())

    def test_counters_and_moving_averages_do_not_stall(self, half: torch.dtype) -> None:
        def work(net: Net, x: Tensor) -> Tensor:
            with torch.no_grad():
                net.count += 1
                net.average.mul_(0.999).add_(net.layer(x).mean(), alpha=0.001)
            return net.layer(x)

        model = adopted(Net(work, count=torch.tensor(2048.0), average=torch.tensor(100.0)), half)
        for _ in range(3):
            model(torch.ones(1, 8))
        assert model.count == 2051
        assert 99.6 < model.average < 99.8
        assert model.average.dtype is torch.float32

    def test_batch_norm_with_half_weights_updates_float32_statistics(self, half: torch.dtype) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        adopted(model, half, "O3")
        model(torch.randn(4, 8)).sum().backward()
        assert (model[1].weight.dtype, model[1].running_mean.dtype) == (half, torch.float32)
        assert model[1].running_mean.any()
        assert model[1].weight.grad.dtype is half

    def test_a_mask_of_numbers_beyond_half_gives_no_nan(self, half: torch.dtype) -> None:
        def work(net: Net, x: Tensor) -> Tensor:
            return F.softmax(net.layer(x) @ net.layer(x).mT + net.mask, -1)

        model = adopted(Net(work, mask=torch.full((4, 4), -1e9)), half)
        assert model(torch.randn(2, 4, 8)).isfinite().all()

    def test_a_loss_takes_weights_from_a_buffer(self, half: torch.dtype) -> None:
        def work(net: Net, x: Tensor) -> Tensor:
            return F.cross_entropy(net.layer(x), torch.tensor([0, 3, 5, 7]), net.weights)

        model, x = Net(work, weights=torch.rand(8)), torch.randn(4, 8)
        expected = model(x)
        loss = adopted(model, half)(x)
        torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
        loss.backward()
        assert model.layer.weight.grad.isfinite().all()


class TestCastBuffers:
    def both(self) -> nn.Module:
        model = nn.Sequential(Net(table=torch.rand(3), other=torch.rand(3)), Net(table=torch.rand(3)))
        model.register_buffer("pos_table", torch.rand(3))
        return model

    @pytest.mark.parametrize(
        ("asked", "cast"),
        [
            (True, ["0.other", "0.table", "1.table", "pos_table"]),
            (False, []),
            ("pos_table", ["pos_table"]),
            (["*.table"], ["0.table", "1.table"]),
            (("0.other", "pos*"), ["0.other", "pos_table"]),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("level", LEVELS)
    def test_cast_buffers_takes_names_and_patterns(
        self, level: str, asked: object, cast: list[str], half: torch.dtype
    ) -> None:
        model = self.both()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        adopted(model, half, level, cast_buffers=asked)
        assert sorted(name for name, buffer in model.named_buffers() if buffer.dtype is half) == cast
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
        assert amp.settings()["cast_buffers"] == (
            asked if isinstance(asked, bool) else [asked] if isinstance(asked, str) else list(asked)  # type: ignore[call-overload]
        )
        amp.deinitialize()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name])

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            ("pos_tabel", "cast_buffers has 'pos_tabel', which matches no floating-point buffer.*'pos_table'"),
            ("0.layer", "matches no floating-point buffer of the model"),
            ("count", "cast_buffers has 'count', which .* It is torch.int64"),
            (3, "cast_buffers has 3; expected True, False, or names of buffers"),
            ([nn.Linear], "cast_buffers has <class 'torch.nn.*expected True, False, or names"),
        ],
    )
    def test_other_values_of_cast_buffers_raise_before_anything_is_changed(
        self, asked: object, told: str, half: torch.dtype
    ) -> None:
        model = self.both()
        model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        with pytest.raises(OptionError, match=told):
            adopted(model, half, cast_buffers=asked)
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        assert not amp.is_on()

    @pytest.mark.parametrize("level", ["O0", "O1", "O4"])
    def test_cast_buffers_contradicts_levels_without_half_weights(self, level: str) -> None:
        with pytest.raises(OptionError, match="cast_buffers contradicts opt_level"):
            amp.initialize(self.both(), opt_level=level, cast_buffers=True)

    def test_two_calls_must_agree_on_cast_buffers(self, half: torch.dtype) -> None:
        adopted(self.both(), half, cast_buffers="pos_table")
        with pytest.raises(amp.UsageError, match=r"cast_buffers is \('pos_table',\) \(this call: True\)"):
            adopted(self.both(), half, cast_buffers=True)


class TestInputs:
    def test_inputs_keep_their_digits_until_they_meet_a_half_weight(self, half: torch.dtype) -> None:
        model = Net(lambda net, time: net.layer((time - 1.7e9).expand(1, 8)))
        expected = model(torch.tensor([1.7e9 + 128]))
        found = adopted(model, half)(torch.tensor([1.7e9 + 128]))
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=0.5)

    @pytest.mark.parametrize(
        "attend",
        [
            pytest.param(lambda x, mask: F.softmax(x @ x.mT + mask, -1) @ x, id="by hand"),
            pytest.param(lambda x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask), id="torch's"),
        ],
    )
    def test_a_mask_of_the_lowest_number_of_float32_gives_no_nan(self, attend: Any, half: torch.dtype) -> None:
        mask = torch.zeros(4, 4)
        mask[:2] = torch.finfo(torch.float32).min
        mask[3, :2] = -torch.inf
        model, x = Net(lambda net, x, mask: attend(net.layer(x), mask)), torch.randn(2, 4, 8)
        expected = model(x, mask)
        found = adopted(model, half)(x, mask)
        assert found.isfinite().all()  # also where everything is masked
        torch.testing.assert_close(found[:, 2:], expected[:, 2:], rtol=5e-2, atol=5e-2)

    def test_multi_head_attention_takes_such_a_mask(self, half: torch.dtype) -> None:
        model = nn.MultiheadAttention(8, 2, batch_first=True)
        mask = torch.zeros(4, 4)
        mask[:2] = torch.finfo(torch.float32).min
        x = torch.randn(2, 4, 8)
        expected = model(x, x, x, attn_mask=mask)[0]
        found = adopted(model, half)(x, x, x, attn_mask=mask)[0]
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)

    def test_an_object_with_a_method_to_is_not_converted(self, half: torch.dtype) -> None:
        class Helper:
            def __init__(self) -> None:
                self.weight = torch.ones(4, 8)

            def to(self, *args: Any) -> Helper:
                self.weight = self.weight.to(*args)
                return self

        helper = Helper()
        adopted(Net(lambda net, helper: net.layer(helper.weight)), half)(helper)
        assert helper.weight.dtype is torch.float32


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "Linear": (lambda: nn.Linear(4, 4), lambda: (torch.randn(2, 4),)),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 4), lambda: (torch.randn(2, 4), torch.randn(2, 4))),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 3), lambda: (torch.randn(2, 4, 8),)),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3), lambda: (torch.randn(2, 4, 8, 8),)),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 3), lambda: (torch.randn(2, 4, 8, 8, 8),)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 4, 3), lambda: (torch.randn(2, 4, 8),)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 4, 3), lambda: (torch.randn(2, 4, 8, 8),)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 4, 3), lambda: (torch.randn(2, 4, 4, 4, 4),)),
    "LSTM": (lambda: nn.LSTM(4, 4), lambda: (torch.randn(3, 2, 4), (torch.randn(1, 2, 4), torch.randn(1, 2, 4)))),
    "GRU": (lambda: nn.GRU(4, 4), lambda: (torch.randn(3, 2, 4),)),
    "RNN": (lambda: nn.RNN(4, 4), lambda: (torch.randn(3, 2, 4),)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 4), lambda: (torch.randn(2, 4),)),
    "GRUCell": (lambda: nn.GRUCell(4, 4), lambda: (torch.randn(2, 4), torch.randn(2, 4))),
    "LayerNorm": (lambda: nn.LayerNorm(4), lambda: (torch.randn(2, 4),)),
    "RMSNorm": (lambda: nn.RMSNorm(4), lambda: (torch.randn(2, 4),)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: (torch.randn(2, 4, 8),)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), lambda: (torch.randn(2, 4, 8),)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), lambda: (torch.randn(2, 4, 8),)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), lambda: (torch.randn(2, 4, 8, 8),)),
    "PReLU": (nn.PReLU, lambda: (torch.randn(2, 4),)),
    "EmbeddingBag": (
        lambda: nn.EmbeddingBag(4, 4, mode="sum"),
        lambda: (torch.tensor([[0, 1]]), None, torch.rand(1, 2)),
    ),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), lambda: (torch.randn(3, 2, 4),) * 3),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
        lambda: (torch.randn(3, 2, 4), torch.zeros(3, 3)),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0),
        lambda: (torch.randn(3, 2, 4), torch.randn(5, 2, 4)),
    ),
}


def first_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else first_tensor(value[0])


@pytest.mark.parametrize(("make", "inputs"), MODULES.values(), ids=MODULES)
class TestModules:
    """Every module of torch.nn with weights takes float32 inputs, forward and backward."""

    @pytest.mark.parametrize("level", ["O2", "O3"])
    def test_modules_of_torch_train_and_evaluate(self, make: Any, inputs: Any, level: str, half: torch.dtype) -> None:
        torch.manual_seed(0)
        model, given = make(), inputs()
        expected = first_tensor(model(*given))
        adopted(model, half, level)
        found = first_tensor(model(*given))
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
        found.float().sum().backward()
        assert all(each.grad is not None and each.grad.dtype is each.dtype for each in model.parameters())
        model.eval()
        with torch.no_grad():
            assert first_tensor(model(*given)).isfinite().all()

    def test_modules_of_torch_run_as_parts_of_a_container(self, make: Any, inputs: Any, half: torch.dtype) -> None:
        model = nn.ModuleDict({"part": make()})
        adopted(model, half, "O3")
        assert first_tensor(model["part"](*inputs())).isfinite().all()


class TestOthers:
    def test_products_of_mixed_types_outside_of_the_model_raise(self, half: torch.dtype) -> None:
        other = nn.Linear(8, 8).to(half)
        adopted(Net(), half)
        with pytest.raises(RuntimeError, match=r"must have the same dtype|expected m1 and m2"):
            other(torch.ones(2, 8))
        with pytest.raises(RuntimeError, match=r"must have the same dtype|expected m1 and m2"):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8, dtype=half))
        assert other(torch.ones(2, 8, dtype=half)).dtype is half

    def test_float32_products_in_the_forward_stay_float32(self, half: torch.dtype) -> None:
        def work(net: Net, x: Tensor) -> Tensor:
            net.seen = (x @ x.mT).dtype
            return net.layer(x)

        model = adopted(Net(work), half)
        model(torch.randn(2, 8))
        assert model.seen is torch.float32

    @pytest.mark.parametrize("around", [amp.disable_casts, lambda: torch.autocast("cpu", enabled=False)])
    def test_half_weights_meet_float32_inputs_in_regions_without_casts(self, around: Any, half: torch.dtype) -> None:
        def work(net: Net, x: Tensor) -> Tensor:
            with around():
                return net.layer(x)

        assert adopted(Net(work), half)(torch.ones(2, 8)).isfinite().all()

    def test_writes_into_a_float32_tensor_leave_it_float32(self, half: torch.dtype) -> None:
        def work(net: Net, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            out[torch.tensor([0, 1])] = net.layer(x)
            out.index_add_(0, torch.tensor([0, 1]), net.layer(x))
            return out

        model, x = Net(work), torch.randn(2, 8)
        expected = model(x)
        found = adopted(model, half)(x)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)

    def test_backward_passes_of_users_functions_cast(self, half: torch.dtype) -> None:
        class Product(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                return x @ weight

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                x, weight = ctx.saved_tensors
                return grad @ weight.T, x.T @ grad

        model = adopted(Net(lambda net, x: Product.apply(x, net.layer.weight)), half)
        x = torch.randn(2, 8, requires_grad=True)
        model(x).sum().backward()
        sum(model(x) for _ in range(500)).sum().backward()  # as many steps of a sequence
        assert x.grad is not None
        assert model.layer.weight.grad.dtype is half
        with pytest.raises(RuntimeError, match="dtype"):
            Product.apply(torch.randn(2, 8).to(half), model.layer.weight.float()).sum().backward()

    def test_inputs_of_the_other_half_type_are_cast(self, half: torch.dtype) -> None:
        (other,) = set(HALF_DTYPES) - {half}
        model = adopted(Net(lambda net, x: net.layer(x)), half)
        seen: list[torch.dtype] = []
        model.layer.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
        model(torch.ones(2, 8, dtype=other))
        assert seen == [half]

    def test_parameters_of_the_other_half_type_are_kept(self, half: torch.dtype) -> None:
        (other,) = set(HALF_DTYPES) - {half}
        model = Net(lambda net, x: net.layer(x) * net.scale)
        model.scale = nn.Parameter(torch.ones(8, dtype=other))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O2", half_dtype=half, verbosity=0, loss_scale=1.0)
        assert (model.scale.dtype, model.layer.weight.dtype) == (other, half)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        amp.deinitialize()
        assert (model.scale.dtype, model.layer.weight.dtype) == (other, torch.float32)

    @COPIES
    @pytest.mark.parametrize("level", ["O2", "O3"])
    def test_copies_cast_during_and_after_the_session(self, copied: Any, level: str, half: torch.dtype) -> None:
        model = nn.Sequential(Wide(), nn.Linear(8, 8))
        twin = copied(adopted(model, half, level))
        wanted = twin(torch.ones(2, 8))
        assert wanted.isfinite().all()
        amp.deinitialize()
        torch.testing.assert_close(twin(torch.ones(2, 8)), wanted, rtol=1e-2, atol=1e-2)
        compiled = torch.compile(twin, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(2, 8)), wanted, rtol=1e-2, atol=1e-2)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("offset", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.offset


class Positions(nn.Module):
    """A residual stream to which a table is added."""

    def __init__(self, table: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.layer, self.norm = nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("table", table)
        self.add, self.types = add, list[torch.dtype]()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.add(self.words(ids), self.table[: ids.shape[1]])
        self.types = [x.dtype]
        x = x + self.layer(self.norm(x))
        self.types.append(x.dtype)
        return x


ADDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stream + table": lambda x, table: x + table,
    "table + stream": lambda x, table: table + x,
    "torch.add": torch.add,
    "method": lambda x, table: x.add(table),
}


class TestResidualStreams:
    SINES = torch.sin(torch.arange(32.0)[:, None] * torch.rand(8))

    def types(self, table: Tensor, add: Any, half: torch.dtype, **options: Any) -> list[torch.dtype]:
        model = Positions(table.clone(), add)
        adopted(model, half, **options)
        model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
        return model.types

    @pytest.mark.parametrize("add", ADDITIONS.values(), ids=ADDITIONS)
    def test_a_half_stream_stays_half_where_a_table_is_added(self, add: Any, half: torch.dtype) -> None:
        assert self.types(self.SINES, add, half) == [half, half]

    @pytest.mark.slow
    def test_a_half_stream_stays_half_in_compiled_code(self, half: torch.dtype) -> None:
        model = Positions(self.SINES.clone(), ADDITIONS["table + stream"])
        adopted(model, half)
        ids = torch.zeros(2, 4, dtype=torch.int64)
        expected = model(ids)
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(ids)
        assert model.types == [half, half]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize(
        "table",
        [
            pytest.param(torch.full((4, 8), -1e9), id="mask"),
            pytest.param(torch.full((4, 8), -torch.inf), id="mask of -inf"),
            pytest.param(torch.zeros(4, 8), id="sum"),
            pytest.param(torch.arange(32.0).reshape(4, 8), id="positions"),
            pytest.param(torch.rand(1, 8), id="vector"),
        ],
    )
    def test_a_half_stream_becomes_float32_where_other_buffers_are_added(
        self, table: Tensor, half: torch.dtype
    ) -> None:
        assert self.types(table, ADDITIONS["stream + table"], half)[0] is torch.float32

    def test_a_half_stream_becomes_float32_where_gradients_are_off(self, half: torch.dtype) -> None:
        model = adopted(Positions(self.SINES.clone(), ADDITIONS["stream + table"]), half)
        with torch.no_grad():
            model(torch.zeros(2, 4, dtype=torch.int64))
        assert model.types[0] is torch.float32

    def test_a_half_stream_stays_half_where_cast_buffers_names_the_buffer(self, half: torch.dtype) -> None:
        types = self.types(torch.arange(32.0).reshape(4, 8), ADDITIONS["stream + table"], half, cast_buffers="table")
        assert types == [half, half]

    def test_addition_is_not_patched_without_tables(self, half: torch.dtype) -> None:
        before = torch.Tensor.__add__
        adopted(Net(), half)
        assert torch.Tensor.__add__ is before


class TestWhatIsNoStream:
    """Sums with buffers that look like tables, but meet no words of a sequence."""

    def test_a_sampling_grid_keeps_its_digits(self, half: torch.dtype) -> None:
        lines = torch.linspace(-1, 1, 256)
        grid = torch.stack(torch.meshgrid(lines, lines, indexing="ij")[::-1], -1)[None]

        def work(net: Net, image: Tensor) -> Tensor:
            return F.grid_sample(image, net.table + 0.01 * net.layer(torch.ones(1, 8))[0, :2], align_corners=True)

        image = torch.randn(1, 1, 256, 256)
        model = Net(work, table=grid)
        expected = model(image).detach()
        assert (adopted(model, half)(image) - expected).abs().max() < 0.1

    def test_a_matrix_to_invert_keeps_its_digits(self, half: torch.dtype) -> None:
        def work(net: Net, x: Tensor) -> Tensor:
            seen.append(net.table + F.softplus(net.layer(x)).diag() * 1e-3)
            return net.layer(x)

        seen: list[Tensor] = []
        adopted(Net(work, table=torch.rand(8, 8)), half)(torch.randn(8))
        assert seen[0].dtype is torch.float32


class TestOutsideOfTheForward:
    @pytest.mark.parametrize("kind", [nn.ModuleDict, nn.ModuleList])
    def test_containers_are_pickled(self, kind: Any, half: torch.dtype) -> None:
        parts = {"a": nn.Linear(8, 8)}
        model = kind(parts if kind is nn.ModuleDict else parts.values())
        amp.initialize(model, opt_level="O2", half_dtype=half, verbosity=0)
        loaded = pickled(model)
        assert [each.dtype for each in loaded.parameters()] == [half] * 2

    def test_a_loss_in_the_forward_has_a_backward_pass(self, half: torch.dtype) -> None:
        model = adopted(Net(lambda net, x: F.huber_loss(net.layer(x), x)), half)
        model(torch.randn(2, 8)).backward()
        assert model.layer.weight.grad is not None
