"""Casts of the weights of recurrent layers: they lie in one buffer, and are made once in an iteration."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, casts_on, dtype_name
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ampatch import amp
from ampatch.patching import recurrent_weights
from ampatch.runtime import runtime

FEATURES, HIDDEN, SEQUENCE, BATCH = 3, 4, 5, 2

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN tanh": nn.RNN,
    "RNN relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, bidirectional": {"num_layers": 2, "bidirectional": True},
    "no bias, batch first": {"bias": False, "batch_first": True},
}
KINDS = [
    *(
        pytest.param(make, options, id=f"{name}, {which}")
        for (name, make), (which, options) in itertools.product(LAYERS.items(), OPTIONS.items())
    ),
    pytest.param(nn.LSTM, {"proj_size": 2, "num_layers": 2}, id="LSTM, projection"),
]
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Tensor]]]:
    """The weights that torch's LSTM gets, call by call, while amp is set up."""
    calls: list[list[Tensor]] = []
    original = torch._VF.lstm

    def lstm(*args: Any, **kwargs: Any) -> Any:
        if runtime.live is not None:
            calls.append(next(each for each in (*args, *kwargs.values()) if isinstance(each, list)))
        return original(*args, **kwargs)

    monkeypatch.setitem(recurrent_weights._MODES, lstm, recurrent_weights._MODES[original])
    for module in (torch, torch._VF):
        monkeypatch.setattr(module, "lstm", lstm)
    yield calls
    amp.deinitialize()


def made(make: Callable[..., nn.RNNBase] = nn.LSTM, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return make(FEATURES, HIDDEN, **options)


def sequence(seed: int = 1) -> Tensor:
    return torch.randn(SEQUENCE, BATCH, FEATURES, generator=torch.Generator().manual_seed(seed))


def weights_of(layer: nn.RNNBase) -> list[Tensor]:
    return layer._flat_weights  # in the order in which torch's functions take them


def lie_in_order(casts: Sequence[Tensor]) -> bool:
    """Whether tensors fill one storage, each right after the one before."""
    ends = list(itertools.accumulate(cast.numel() for cast in casts))
    storage = casts[0].untyped_storage()
    return (
        all(cast.is_contiguous() and cast.untyped_storage().data_ptr() == storage.data_ptr() for cast in casts)
        and [cast.storage_offset() for cast in casts] == [0, *ends[:-1]]
        and storage.nbytes() == ends[-1] * casts[0].element_size()
    )


def gradients(layer: nn.Module) -> list[Tensor | None]:
    found = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    return found


def cast_one_by_one(layer: nn.RNNBase, x: Tensor, half: torch.dtype) -> tuple[Tensor, Any]:
    """Runs a float32 layer on casts that were made by hand, without amp."""
    plain = copy.copy(layer)
    plain.__dict__["_flat_weights"] = [weight.to(half) for weight in layer._flat_weights]
    return plain(x.to(half))  # type: ignore[no-any-return]


class TestInOneBuffer:
    @pytest.mark.parametrize(("make", "options"), KINDS)
    @pytest.mark.covering(1)
    def test_layers_compute_and_train_as_with_casts_one_by_one(self, make, options, half):
        layer, x = made(make, **options), sequence()
        expected, _ = cast_one_by_one(layer, x, half)
        expected.float().square().sum().backward()
        wanted = gradients(layer)
        with casts_on(half):
            found, _ = layer(x)
            casts = [runtime.live.cache._iteration.find(weight, half) for weight in weights_of(layer)]
            assert lie_in_order(casts)
            found.float().square().sum().backward()
        assert_same_bits(found, expected)
        for gradient, other in zip(gradients(layer), wanted, strict=True):
            assert_same_bits(gradient, other)

    def test_casts_for_a_packed_sequence_lie_in_one_buffer(self, passed):
        layer = made()
        with casts_on():
            layer(pack_sequence([sequence()[:, 0], sequence()[:2, 1]]))
        assert lie_in_order(passed[0])

    def test_weights_are_cast_once_in_an_iteration(self, passed):
        layer, count = made(num_layers=2), 8
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        amp.initialize(layer, optimizer, half_dtype=torch.bfloat16, verbosity=0)
        state, x = torch.zeros(2, BATCH, HIDDEN, dtype=torch.bfloat16), sequence().bfloat16()
        for _ in range(2):
            before = amp.cast_counts()
            loss = layer(x, (state, state))[0].sum() + layer(x, (state, state))[0].sum()
            now = amp.cast_counts()
            assert (now.casts - before.casts, now.cache_hits - before.cache_hits) == (count, count)
            assert all(map(lambda one, other: one is other, *passed[-2:]))
            with amp.scale_loss(loss.float(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        assert passed[0][0] is not passed[2][0]

    @pytest.mark.parametrize("written", ["weight", "cast"])
    def test_weights_are_cast_anew_after_a_write_to_one_or_to_a_cast(self, written, passed):
        layer, x = made(), sequence()
        with casts_on(torch.bfloat16):
            layer(x)
            with torch.no_grad():
                (layer.bias_hh_l0 if written == "weight" else passed[0][1]).add_(1)
            found, _ = layer(x)
        assert lie_in_order(passed[1])
        assert_same_bits(found, cast_one_by_one(layer, x, torch.bfloat16)[0])

    def test_a_weight_that_was_used_alone_before_is_cast_into_the_buffer(self, passed):
        layer, x = made(), sequence()
        with casts_on(torch.bfloat16):
            alone = nn.functional.linear(x, layer.weight_ih_l0)
            layer(x)
            assert lie_in_order(passed[0])
            hits = amp.cast_counts().cache_hits
            again = nn.functional.linear(x, layer.weight_ih_l0)
            assert amp.cast_counts().cache_hits == hits + 1
        assert_same_bits(again, alone)

    def test_layers_that_share_a_weight_have_a_buffer_each(self, passed):
        first, second, x = made(), made(), sequence()
        second.weight_hh_l0 = first.weight_hh_l0
        expected = cast_one_by_one(first, x, torch.bfloat16)[0] + cast_one_by_one(second, x, torch.bfloat16)[0]
        (expected.float().sum() * 2).backward()
        wanted = [*gradients(first), *gradients(second)]
        with casts_on(torch.bfloat16):
            results = [first(x)[0] + second(x)[0] for _ in range(2)]
            assert all(map(lie_in_order, passed))
            sum(result.float().sum() for result in results).backward()
        for result in results:
            assert_same_bits(result, expected)
        for found, other in zip([*gradients(first), *gradients(second)], wanted, strict=True):
            assert (found is None) == (other is None)
            torch.testing.assert_close(found, other, rtol=2e-2, atol=1e-2)


class TestModes:
    """The weights lie together, and results are those of casts one by one."""

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_casts_lie_in_one_buffer_in_every_grad_mode(self, mode, passed):
        layer, x = made(), sequence()
        amp.initialize(layer, half_dtype=torch.bfloat16, verbosity=0)
        with mode():
            found, _ = layer(x)
        assert lie_in_order(passed[0])
        assert all(cast.requires_grad for cast in passed[0])
        assert not any(cast.is_inference() for cast in passed[0])
        amp.deinitialize()
        assert_same_bits(found, cast_one_by_one(layer, x, torch.bfloat16)[0])

    def test_a_frozen_block_keeps_the_casts(self, passed):
        layer, x = made(), sequence()
        amp.initialize(layer, half_dtype=torch.bfloat16, verbosity=0)
        with torch.no_grad(), amp.frozen_weights(layer):
            for _ in range(2):
                layer(x)
        assert all(map(lambda one, other: one is other, *passed))
        assert lie_in_order(passed[0])

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
    def test_checkpoints_have_the_gradients_of_casts_one_by_one(self, reentrant, passed):
        layer, x = made(), sequence().requires_grad_()
        cast_one_by_one(layer, x, torch.bfloat16)[0].float().sum().backward()
        wanted = gradients(layer)
        with casts_on(torch.bfloat16):
            checkpoint(layer, x, use_reentrant=reentrant)[0].float().sum().backward()
        assert len(passed) == 2
        assert all(map(lie_in_order, passed))
        for found, other in zip(gradients(layer), wanted, strict=True):
            assert_same_bits(found, other)

    def test_selective_checkpoints_may_find_kept_casts(self):
        layer, x = made(nn.GRU), sequence().requires_grad_()
        contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        with casts_on(torch.bfloat16):
            layer(x)  # the first forward of the checkpoint finds the casts, its recomputation does not
            result = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False, context_fn=contexts)
            amp.clear_cache()
            result.float().sum().backward()
        assert all(gradient is not None for gradient in gradients(layer))

    def test_second_derivatives_reach_the_parameters(self, passed):
        layer, x = made(nn.RNN), sequence()

        def second(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
            first = torch.autograd.grad(run().float().square().sum(), layer.weight_ih_l0, create_graph=True)
            return torch.autograd.grad(first[0].square().sum(), list(layer.parameters()))

        wanted = second(lambda: cast_one_by_one(layer, x, torch.bfloat16)[0])
        with casts_on(torch.bfloat16):
            found = second(lambda: layer(x)[0])
        for one, other in zip(found, wanted, strict=True):
            assert_same_bits(one, other)

    def test_a_tracer_sees_a_cast_for_each_weight(self):
        layer, x = made(nn.GRU), sequence().bfloat16()
        state = torch.zeros(1, BATCH, HIDDEN, dtype=torch.bfloat16)
        with casts_on(torch.bfloat16):
            layer(x, state)
            traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: layer(x, state)[0])(x)
        casts = [node for node in traced.graph.nodes if node.target is torch.ops.aten._to_copy.default]
        assert len(casts) == 4


class TestKindsOfWeights:
    def test_frozen_weights_get_no_gradient(self, passed):
        layer, x = made(), sequence()
        layer.weight_hh_l0.requires_grad_(False)
        with casts_on(torch.bfloat16):
            layer(x)[0].float().sum().backward()
        assert lie_in_order(passed[0])
        assert [gradient is None for gradient in gradients(layer)] == [False, True, False, False]

    def test_some_weights_may_be_half_already(self, passed):
        layer, x = made(), sequence()
        layer.weight_ih_l0.data = layer.weight_ih_l0.data.bfloat16()
        with casts_on(torch.bfloat16):
            for _ in range(2):
                layer(x)[0].float().sum().backward()
        assert lie_in_order(passed[0])
        assert all(map(lambda one, other: one is other, *passed))
        assert layer.weight_ih_l0.grad.dtype == torch.bfloat16
        assert layer.weight_hh_l0.grad.dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=dtype_name)
    def test_weights_that_need_no_cast_are_passed_on(self, dtype, passed):
        layer = made().to(dtype)
        with casts_on(torch.bfloat16):
            layer(sequence().to(dtype))
        assert all(map(lambda cast, weight: cast is weight, passed[0], weights_of(layer)))

    def test_some_weights_may_be_computed(self, passed):
        layer, x = made(), sequence()
        nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
        with casts_on(torch.bfloat16):
            for _ in range(2):
                layer(x)[0].float().sum().backward()
        assert all(map(lie_in_order, passed))
        assert all(gradient is not None for gradient in gradients(layer))

    def test_weights_given_by_keyword_are_cast_one_by_one(self, passed):
        layer, state = made(), torch.zeros(1, BATCH, HIDDEN)
        options = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False}
        with casts_on(torch.bfloat16):
            found, *_ = torch.lstm(sequence(), (state, state), params=weights_of(layer), **options, batch_first=False)
        assert not lie_in_order(passed[0])
        assert_same_bits(found, cast_one_by_one(layer, sequence(), torch.bfloat16)[0])


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A stand-in for cuDNN, which wants all matrices first, then all biases, with a gap between the two."""
    asked: list[tuple[Any, ...]] = []

    def flatten(weights: list[Tensor], *how: Any) -> Tensor:
        asked.append(how)
        buffer = torch.zeros(sum(weight.numel() for weight in weights) + 7, dtype=weights[0].dtype)
        offset = 0
        for dimensions in (2, 1):
            for weight in weights:
                if weight.dim() == dimensions:
                    weight.set_(buffer.untyped_storage(), offset, weight.shape)
                    offset += weight.numel()
            offset += 7
        return buffer

    recurrent_weights._layout_of_cudnn.cache_clear()
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: tensor.dtype is torch.float16)
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: mode)
    for owner, prefix in ((torch, "_"), (recurrent_weights, "")):
        monkeypatch.setattr(owner, f"{prefix}use_cudnn_rnn_flatten_weight", lambda: True)
        monkeypatch.setattr(owner, f"{prefix}cudnn_rnn_flatten_weight", flatten)
    yield asked
    recurrent_weights._layout_of_cudnn.cache_clear()


class TestLayoutOfCudnn:
    """On any machine, with a stand-in that has an order of its own."""

    def test_casts_lie_where_cudnn_puts_weights(self, cudnn, passed):
        layer, x = made(num_layers=2), sequence()
        with casts_on(torch.float16):
            found, _ = layer(x)
            layer(x)
        matrices = [cast for cast in passed[0] if cast.dim() == 2]
        biases = [cast for cast in passed[0] if cast.dim() == 1]
        ends = list(itertools.accumulate((each.numel() for each in matrices), initial=0))
        assert [each.storage_offset() for each in matrices] == ends[:-1]
        assert biases[0].storage_offset() == ends[-1] + 7
        assert len({each.untyped_storage().data_ptr() for each in passed[0]}) == 1
        assert all(map(lambda one, other: one is other, *passed))
        assert len(cudnn) == 1
        assert_same_bits(found, cast_one_by_one(layer, x, torch.float16)[0])

    @pytest.mark.parametrize(
        ("make", "options", "how"),
        [
            (nn.LSTM, {}, (4, FEATURES, "LSTM", HIDDEN, 0, 1, False, False)),
            (nn.LSTM, {"bias": False, "num_layers": 3}, (2, FEATURES, "LSTM", HIDDEN, 0, 3, False, False)),
            (nn.LSTM, {"proj_size": 2, "num_layers": 2}, (5, FEATURES, "LSTM", HIDDEN, 2, 2, False, False)),
            (nn.LSTM, {"proj_size": 2, "bias": False}, (3, FEATURES, "LSTM", HIDDEN, 2, 1, False, False)),
            (nn.GRU, {"bidirectional": True}, (4, FEATURES, "GRU", HIDDEN, 0, 1, False, True)),
            (nn.RNN, {}, (4, FEATURES, "RNN_TANH", HIDDEN, 0, 1, False, False)),
            (LAYERS["RNN relu"], {"num_layers": 2}, (4, FEATURES, "RNN_RELU", HIDDEN, 0, 2, False, False)),
        ],
    )
    def test_cudnn_is_asked_once_for_all_layers_alike_as_torch_does(self, make, options, how, cudnn):
        with casts_on(torch.float16):
            for _ in range(2):
                made(make, **options)(sequence())
        assert cudnn == [how]

    @pytest.mark.parametrize(
        ("version", "capability", "takes"),
        [(91300, (8, 0), True), (91300, (7, 5), False), (91200, (9, 0), False)],
    )
    def test_bfloat16_casts_lie_so_only_where_torch_runs_them_by_cudnn(
        self, version, capability, takes, cudnn, passed, monkeypatch
    ):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        with casts_on(torch.bfloat16):
            made()(sequence())
        assert bool(cudnn) == takes
        assert lie_in_order(passed[0]) == (not takes)


class TestHalfWeights:
    """Of a layer that `amp.initialize` or `amp.convert_model` has made half."""

    @pytest.fixture
    def flattened(self, monkeypatch: pytest.MonkeyPatch) -> list[set[torch.dtype]]:
        """The types of the weights at each call of torch's function that puts them into one buffer."""
        found: list[set[torch.dtype]] = []

        def flatten_parameters(layer: nn.RNNBase) -> None:
            found.append({weight.dtype for weight in layer._flat_weights})

        monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_parameters)
        return found

    def test_converted_weights_are_put_into_one_buffer_and_again_when_they_are_float32(self, flattened):
        model = nn.Sequential(made(), nn.Linear(2, 2))
        flattened.clear()
        amp.convert_model(model, torch.bfloat16)
        assert flattened[-1] == {torch.bfloat16}
        flattened.clear()
        amp.initialize(model, opt_level="O2", half_dtype=torch.bfloat16, verbosity=0)
        assert flattened[-1] == {torch.bfloat16}
        amp.deinitialize()
        assert flattened[-1] == {torch.float32}


class TestBfloat16Weights:
    """torch leaves them where they are. On any machine, with a stand-in for cuDNN."""

    @pytest.fixture(autouse=True)
    def takes_bfloat16(self, cudnn: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91300)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    @staticmethod
    def lie_as_cudnn_wants(layer: nn.RNNBase) -> bool:
        """Whether the weights lie in one buffer, and the first bias after all matrices and a gap."""
        weights = weights_of(layer)
        matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
        bias = next(weight for weight in weights if weight.dim() == 1)
        return bias.storage_offset() == matrices + 7 and len({w.untyped_storage().data_ptr() for w in weights}) == 1

    @pytest.mark.parametrize("in_inference_mode", [False, True])
    @pytest.mark.parametrize(("make", "options"), [each for each in KINDS if "no bias" not in each.id])
    def test_weights_lie_as_cudnn_wants_and_are_the_same_parameters(self, make, options, in_inference_mode):
        layer = made(make, **options)
        parameters, values = list(layer.parameters()), [weight.detach().clone() for weight in layer.parameters()]
        with torch.inference_mode(in_inference_mode):
            amp.initialize(layer, opt_level="O5", verbosity=0)
        assert self.lie_as_cudnn_wants(layer)
        assert all(map(lambda one, other: one is other, layer.parameters(), parameters))
        assert all(map(lambda one, other: one is other, weights_of(layer), parameters))
        for weight, value in zip(parameters, values, strict=True):
            assert_same_bits(weight, value.bfloat16())
        layer(sequence())[0].sum().backward()
        assert all(weight.grad is not None for weight in parameters)

    def test_training_has_the_same_bits_where_weights_lie_apart(self, monkeypatch):
        def train() -> tuple[list[Tensor], dict[str, Tensor]]:
            model = nn.Sequential(made(num_layers=2))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
            for seed in range(3):
                optimizer.zero_grad()
                with amp.scale_loss(model(sequence(seed))[0].float().square().sum(), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
            found = [master.detach().clone() for master in amp.master_params(optimizer)]
            assert self.lie_as_cudnn_wants(model[0]) == is_flattened
            assert all(copied.dtype is torch.float32 for copied in copy.deepcopy(model).parameters())
            return found, {name: value.clone() for name, value in model.state_dict().items()}

        is_flattened = True
        masters, state = train()
        amp.deinitialize()
        is_flattened = False
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91200)
        wanted, wanted_state = train()
        for one, other in zip([*masters, *state.values()], [*wanted, *wanted_state.values()], strict=True):
            assert_same_bits(one, other)

    def test_float32_values_come_back(self):
        layer = made()
        values = [weight.detach().clone() for weight in layer.parameters()]
        amp.initialize(layer, torch.optim.SGD(layer.parameters(), lr=0.1), opt_level="O5", verbosity=0)
        assert self.lie_as_cudnn_wants(layer)
        amp.deinitialize()
        for weight, value in zip(layer.parameters(), values, strict=True):
            assert_same_bits(weight, value)

    @pytest.mark.parametrize("kind", ["in order", "shared", "computed"])
    def test_weights_that_lie_in_order_or_cannot_be_moved_stay_where_they_are(self, kind):
        layer = made().bfloat16()
        if kind == "in order":
            recurrent_weights.flatten(layer)
        elif kind == "shared":
            layer.bias_hh_l0 = nn.Parameter(layer.bias_ih_l0.detach())
        else:
            nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
            layer(sequence().bfloat16())
        before = [weight.data_ptr() for weight in layer.parameters()]
        recurrent_weights.flatten(layer)
        assert [weight.data_ptr() for weight in layer.parameters()] == before


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize(("make", "options"), KINDS)
    def test_cudnn_gets_one_buffer_and_results_are_those_of_autocast(self, make, options, half):
        layer, x = made(make, **options).cuda(), sequence().cuda()
        with torch.autocast("cuda", half):
            expected, _ = layer(x)
        expected.float().square().sum().backward()
        wanted = gradients(layer)
        with casts_on(half), warnings.catch_warnings():
            warnings.simplefilter("error")
            before = amp.cast_counts()
            for _ in range(2):
                found, _ = layer(x)
            now = amp.cast_counts()
            found.float().square().sum().backward()
        inputs = 2 + 2 * (2 if isinstance(layer, nn.LSTM) else 1)  # the sequences, and the states that torch makes
        assert now.cache_hits - before.cache_hits == len(weights_of(layer))
        assert now.casts - before.casts <= len(weights_of(layer)) + inputs
        # Autocast runs these layers in float16, whatever its type is, and bfloat16 rounds 8 times as coarsely.
        room, of_gradients = (1e-3, 1e-2) if half is torch.float16 else (1.6e-2, 8e-2)
        torch.testing.assert_close(found.float(), expected.float(), rtol=room, atol=room)
        for gradient, other in zip(gradients(layer), wanted, strict=True):
            torch.testing.assert_close(gradient, other, rtol=of_gradients, atol=of_gradients)

    def test_casts_lie_in_the_order_of_torch_s_own_buffer(self):
        layer = made(num_layers=2, bidirectional=True).cuda()
        with casts_on(torch.float16):
            layer(sequence().cuda())
            casts = [runtime.live.cache._iteration.find(weight, torch.float16) for weight in weights_of(layer)]
        half = copy.deepcopy(layer).half()
        half.flatten_parameters()
        assert [each.storage_offset() for each in casts] == [each.storage_offset() for each in weights_of(half)]
        assert casts[0].untyped_storage().nbytes() >= weights_of(half)[0].untyped_storage().nbytes()

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    def test_a_model_trains_without_a_warning_and_is_left_as_it_was(self, level, half):
        model = nn.ModuleList([made(num_layers=2)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="RNN module weights are not part of single contiguous chunk")
            amp.initialize(model, optimizer, opt_level=level, half_dtype=half, loss_scale=8.0, verbosity=0)
            dtype = torch.float32 if level == "O1" else half
            for _ in range(2):
                optimizer.zero_grad()
                loss = model[0](sequence().cuda().to(dtype))[0].float().mean()
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
            amp.deinitialize()
            model[0](sequence().cuda())
