"""Of `amp.convert_model`: a copy computes as the model does at O1, in half weights, and torch stays as it is."""

from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from helpers import HALF_DTYPES, assert_same_bits, assert_same_state, check_rows, dtype_name, together
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.profiler import ProfilerActivity, profile

from ampatch import amp
from ampatch.errors import AmpWarning, BannedFunctionError, CastListError, OptionError, UsageError
from ampatch.patching import casting_mode
from ampatch.patching.casting_mode import thread

# From torch 2.13 on, of what is traced here on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

EACH_HALF = pytest.mark.parametrize("half", HALF_DTYPES, ids=dtype_name)
# Where one case takes long.
ONE_HALF = pytest.mark.parametrize(
    "half", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=dtype_name
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


OF_STRICT_EXPORT = pytest.mark.filterwarnings("ignore:.*certain side effects happened:UserWarning")


class Mixed(nn.Module):
    """Weights that are read in half, in float32, and in both."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.product = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.rand(8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.norm(self.layer(self.embedding(indices)))
        hidden = torch.einsum("bij,jk->bik", hidden.softmax(-1), self.product) * self.scale
        return self.head(hidden.to(self.layer.weight.dtype))


class Attending(nn.Module):
    """Attention over half inputs and weights, for which torch would take its path in C++."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = (
            nn.MultiheadAttention(4, 2, batch_first=True)
            if inner == "attention"
            else nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
        )

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        hidden = self.layer(inputs)
        if isinstance(self.inner, nn.MultiheadAttention):
            return self.inner(hidden, hidden, hidden)
        return (self.inner(hidden),)


INDICES = torch.arange(12).view(2, 6)


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed().eval()


def of_o1(model: nn.Module, half: torch.dtype, *args: Any, **options: Any) -> Any:
    """What a model gives at O1."""
    amp.initialize(model, opt_level="O1", half_dtype=half, verbosity=0, **options)
    try:
        torch.manual_seed(1)
        return model(*args)
    finally:
        amp.deinitialize()


def of_copy(made: nn.Module, *args: Any) -> Any:
    torch.manual_seed(1)
    return made(*args)


def types_of(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in module.named_parameters()}


class Calling(nn.Module):
    """A function of the input and of a weight, as a model."""

    def __init__(self, function: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(4, 4) + 0.5)
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(self.layer(inputs), self.weight)


FUNCTIONS: list[tuple[str, Callable[[Tensor, Any], Any]]] = [
    ("function", lambda x, w: torch.mm(w, x)),
    ("method", lambda x, w: x.matmul(w)),
    ("operator", lambda x, w: x @ w),
    ("operator from the right", lambda x, w: (2**x) @ (1 / w) - 3 - x),
    ("power", lambda x, w: x**2 + w**2),
    ("in Python", lambda x, w: torch.einsum("ij,jk->ik", x, w)),
    ("in Python, calls listed ones", lambda x, w: F.normalize(x) + F.normalize(w)),
    ("method in Python", lambda x, w: x.norm(dim=1) + w.norm()),
    ("takes a list", lambda x, w: torch.cat([x, w])),
    ("nested list", lambda x, w: torch.block_diag(*[x, w])),
    ("keywords", lambda x, w: F.linear(weight=w, input=x)),
    ("its dtype", lambda x, w: F.softmax(x, -1, dtype=torch.float64)),
    ("via dtype", lambda x, w: x.sum() + w.sum()),
    ("in place", lambda x, w: x.clone().mul_(w[0])),
    ("out", lambda x, w: torch.mm(x, w.to(x.dtype), out=torch.empty(4, 4, dtype=x.dtype))),
    ("written to float32", lambda x, w: torch.mm(x.float(), w, out=torch.empty(4, 4))),
    ("in place in float32", lambda x, w: torch.zeros(4, 4).addmm_(x, w)),
    ("read in half first", lambda x, w: F.linear(x, w) + torch.mm(x.float(), w, out=torch.empty(4, 4))),
    ("view of the weight", lambda x, w: F.linear(x, w[:2]) + F.linear(x, w.t())[:, :2]),
    ("weight in float32 only", lambda x, w: x * w.exp()),
    ("weight in both", lambda x, w: F.linear(x, w) * w.mean()),
    ("property", lambda x, w: x.to(w.dtype) + w.T),
    ("functional dispatch", lambda x, w: F.max_pool2d(x[None] @ w, 2)),
    ("random", lambda x, w: F.gumbel_softmax(x @ w)),
    ("linalg", lambda x, w: torch.linalg.multi_dot([x, w, w])),
    ("checks of types", lambda x, w: x.float() if w.is_floating_point() and w.dim() == x.ndim else w),
    ("vmap", lambda x, w: torch.func.vmap(lambda row: row @ w)(x)),
    ("in place, of a number", lambda x, w: _summed(0, [w.exp(), x])),
    ("attention's function", lambda x, w: _attention(x, w)[1]),
    ("promotes in Python", lambda x, w: torch.cartesian_prod(x[0], w[0])),
    ("reads a size", lambda x, w: F.interpolate((x @ w)[None], scale_factor=2.0, mode="linear")),
]


OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "eq")
METHODS_OF_OPERATORS = {
    method
    for name in (*OPERATORS, "div", "matmul")
    for method in (f"__{name}__", f"__r{name}__")
    if hasattr(Tensor, method)
} | {"add", "sub", "mul", "div", "remainder", "pow", "matmul", "lt", "eq"}


def _summed(number: Any, tensors: list[Tensor]) -> Tensor:
    for tensor in tensors:
        number += tensor
    return number


def _attention(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return F.multi_head_attention_forward(
        *(x[None], x[None], x[None], 4, 2, torch.cat([w, w, w]), torch.zeros(12), None, None, False, 0.0, w, None)
    )


class Guarded(nn.Module):
    """Computes angles, and reads a weight, in blocks in which its own code has turned autocast off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("frequencies", 10000.0 ** -torch.linspace(0, 1, 8)[:, None])
        self.product = nn.Parameter(torch.randn(8, 8))

    def forward(self, positions: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", enabled=False):
            angles = (self.frequencies @ positions[None]).T
            rotated = torch.cat([angles.cos(), angles.sin()])
            product = angles @ self.product
            with torch.autocast("cpu", torch.bfloat16):
                inner = self.layer(angles)
        return rotated, product, inner, self.layer(angles)


#: Ways to run a copy of `Guarded`.
RUNS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "as it is": lambda made, x: made,
    "within a block that is off": lambda made, x: torch.autocast("cpu", enabled=False)(made),
    "compiled": lambda made, x: torch.compile(made, backend="eager", fullgraph=True),
    "exported": lambda made, x: torch.export.export(made, (x,)).module(),
    "exported strictly": lambda made, x: torch.export.export(made, (x,), strict=True).module(),
    "traced": torch.jit.trace,
}


class TestAutocastBlocks:
    @OF_STRICT_EXPORT
    @ONE_HALF
    @pytest.mark.parametrize("way", RUNS)
    def test_blocks_without_autocast_in_the_model_compute_in_float32(self, way, half):
        torch.manual_seed(0)
        model, positions = Guarded(), torch.arange(2000.0, 2016.0)
        rotated, product, inner, outer = model(positions)
        made = amp.convert_model(model, half)
        made(positions)
        found = RUNS[way](made, positions)(positions)
        assert_same_bits(found[0], rotated)
        assert_same_bits(found[1], product)
        assert found[2].dtype is inner.dtype is torch.bfloat16
        assert found[3].dtype is half
        assert outer.dtype is torch.float32


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 6, 6)),
    "lstm": (lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True), (6, 2, 5)),
    "gru": (lambda: nn.GRU(5, 4), (6, 2, 5)),
    "rnn": (lambda: nn.RNN(5, 4, nonlinearity="relu"), (6, 2, 5)),
    "cell": (lambda: nn.GRUCell(5, 4), (2, 5)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 2, 2), (2, 3, 6)),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Softmax(-1)), (2, 4)),
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4)),
    "spectral-norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), (2, 4)),
}


class TestAsO1:
    @ONE_HALF
    def test_a_copy_computes_as_o1_for_every_way_to_call(self, half, subtests):
        inputs = torch.randn(4, 4)

        def check(function: Callable[..., Tensor]) -> None:
            model = Calling(function)
            expected, made = of_o1(model, half, inputs), amp.convert_model(model, half)
            for _ in range(3):  # a weight may be half from the second forward on
                assert_same_bits(of_copy(made, inputs), expected)

        check_rows(subtests, FUNCTIONS, check)

    @EACH_HALF
    @pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
    def test_a_copy_computes_as_o1_for_torchs_layers(self, make, shape, half):
        torch.manual_seed(0)
        model, inputs = make().eval(), torch.randn(shape)
        expected, made = of_o1(model, half, inputs), amp.convert_model(model, half)
        for _ in range(2):
            assert_same_state(of_copy(made, inputs), expected)

    @EACH_HALF
    @pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
    @pytest.mark.parametrize(
        "make", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight-norm", "spectral-norm"]
    )
    def test_a_copy_runs_hooks_of_the_model_as_o1_runs_those_of_its_parts(self, make, half):
        torch.manual_seed(0)
        model, inputs = make(nn.Linear(8, 4)).eval(), torch.randn(2, 8)
        # At O1, hooks of the model itself run before its region begins, and those of its parts in it.
        assert_same_bits(of_copy(amp.convert_model(model, half), inputs), of_o1(nn.Sequential(model), half, inputs))

    @EACH_HALF
    def test_a_copy_casts_by_the_users_lists_and_decorated_functions(self, half):
        calls = []

        @amp.float_function
        def own(tensor: Tensor) -> Tensor:
            calls.append(tensor.dtype)
            return tensor

        model = Calling(lambda x, w: own(torch.mm(x, w)).tanh())
        lists = {"blacklist": {"torch": ["mm"]}, "whitelist": {"torch.Tensor": ["tanh"]}}
        expected = of_o1(model, half, torch.ones(4, 4), cast_lists=lists)
        made = amp.convert_model(model, half, cast_lists=lists)
        assert_same_bits(of_copy(made, torch.ones(4, 4)), expected)
        assert expected.dtype is half
        assert calls == [torch.float32] * 2

    def test_a_copy_casts_registered_functions(self, monkeypatch):
        monkeypatch.setattr("ampatch.runtime.runtime.registered", [])
        amp.register_float_function(torch, "mm")
        model = Calling(lambda x, w: torch.mm(w, x))
        assert of_copy(amp.convert_model(model, "bfloat16"), torch.ones(4, 4)).dtype is torch.float32

    @EACH_HALF
    def test_a_copy_computes_as_o1_under_autocast_of_the_other_half_type(self, half):
        other = next(dtype for dtype in HALF_DTYPES if dtype is not half)
        model, inputs = Calling(lambda x, w: torch.mm(w, x)), torch.randn(4, 4)
        made = amp.convert_model(model, half)
        with torch.autocast("cpu", other):
            expected = of_o1(model, half, inputs)
            for _ in range(2):
                assert_same_bits(of_copy(made, inputs), expected)

    def test_a_banned_function_raises(self):
        made = amp.convert_model(Calling(lambda x, w: F.binary_cross_entropy(x.sigmoid(), w.round().clamp(0, 1))))
        with pytest.raises(BannedFunctionError, match="binary_cross_entropy_with_logits"):
            made(torch.ones(4, 4))

    def test_errors_of_casts_name_the_function_and_its_list(self):
        made = amp.convert_model(Calling(lambda x, w: x.exp_()), "float16")
        with pytest.raises(BannedFunctionError) as raised:
            made(torch.ones(4, 4))
        assert "torch.Tensor.exp_ is in the blacklist" in raised.value.__notes__[0]


class TestWeights:
    @EACH_HALF
    def test_weights_that_only_whitelisted_functions_read_are_half(self, half):
        made = amp.convert_model(mixed(), half)
        known = types_of(made)
        assert {name for name, dtype in known.items() if dtype is half} == {"layer.weight", "layer.bias"}
        made(INDICES)
        seen = types_of(made)
        assert {name for name, dtype in seen.items() if dtype is half} == {"layer.weight", "layer.bias", "product"}
        assert made.head.weight is made.embedding.weight

    @EACH_HALF
    def test_a_half_weight_read_in_float32_gets_all_its_bits_back(self, half):
        model = Calling(lambda x, w: x)
        made = amp.convert_model(model, half)
        made(torch.ones(4, 4))
        made.function = lambda x, w: x + made.layer.weight.sum()
        model.function = lambda x, w: x + model.layer.weight.sum()
        assert_same_bits(made(torch.ones(4, 4)), of_o1(model, half, torch.ones(4, 4)))
        assert_same_bits(made.layer.weight, model.layer.weight)

    def test_a_half_weight_read_in_float32_is_an_error_without_kept_values(self):
        made = amp.convert_model(Calling(lambda x, w: x), "bfloat16", keep_float32=False)
        made.function = lambda x, w: x + made.layer.weight.sum()
        with pytest.raises(UsageError, match=r"'layer\.weight' is half.*Leave keep_float32=False out"):
            made(torch.ones(4, 4))

    @EACH_HALF
    def test_state_dict_of_a_copy_is_that_of_the_model(self, half):
        model = mixed()
        made = amp.convert_model(model, half)
        for _ in range(2):
            saved = made.state_dict()
            assert_same_state(saved, model.state_dict())
            made(INDICES)
        assert_same_bits(made.layer.state_dict()["weight"], model.layer.weight)
        plain = Mixed()
        plain.load_state_dict(saved)
        assert_same_bits(of_copy(amp.convert_model(plain.eval(), half), INDICES), of_copy(made, INDICES))

    def test_state_dict_without_kept_values_is_float32_and_rounded(self):
        model = nn.Linear(4, 4)
        saved = amp.convert_model(model, "bfloat16", keep_float32=False).state_dict()
        assert_same_bits(saved["weight"], model.weight.bfloat16().float())

    @EACH_HALF
    def test_loaded_weights_are_half_and_saved_with_every_bit(self, half):
        made, other = amp.convert_model(nn.Linear(4, 4), half), nn.Linear(4, 4)
        made.load_state_dict(other.state_dict())
        assert_same_bits(made.weight, other.weight.to(half))
        assert_same_bits(made.state_dict()["weight"], other.weight)

    @EACH_HALF
    @pytest.mark.parametrize(
        "write",
        [
            lambda weight: weight.mul_(2),
            lambda weight: weight.data.mul_(2),
            lambda weight: weight.copy_(weight * 2),
            lambda weight: weight.data.__setitem__(slice(None), weight.data * 2),
        ],
        ids=["in-place", "data", "copy", "setitem"],
    )
    def test_writing_to_a_half_weight_changes_what_is_saved(self, half, write):
        model = nn.Linear(4, 4)
        made = amp.convert_model(model, half)
        write(made.weight[:1] if write.__code__.co_names == ("mul_",) else made.weight)
        changed = made.state_dict()["weight"]
        assert_same_bits(changed[0], 2 * model.weight.to(half)[0].float())
        whole = changed.ne(model.weight)[1:].any()
        assert not whole or torch.equal(changed, made.weight.float())

    def test_a_float32_weight_that_changes_is_cast_anew(self):
        model = mixed()
        made = amp.convert_model(model, "bfloat16")
        made(INDICES)
        made.embedding.weight.mul_(2)
        model.embedding.weight.mul_(2)
        assert_same_bits(of_copy(made, INDICES), of_o1(model, torch.bfloat16, INDICES))

    @EACH_HALF
    @pytest.mark.parametrize(
        "again",
        [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))],
        ids=["deepcopy", "pickle"],
    )
    @pytest.mark.parametrize("run_before", [False, True])
    def test_a_copy_can_be_copied_and_pickled(self, half, again, run_before):
        made = amp.convert_model(mixed(), half, excluded="norm")
        if run_before:
            made(INDICES)
        other = again(made)
        assert types_of(other) == types_of(made)
        made.layer.weight.zero_()
        model = mixed()
        assert_same_bits(of_copy(other, INDICES), of_copy(amp.convert_model(model, half, excluded="norm"), INDICES))
        assert_same_bits(other.state_dict()["layer.weight"], model.layer.weight)

    def test_to_leaves_half_weights_half(self):
        made = amp.convert_model(mixed(), "bfloat16").to("cpu").to(torch.float32)
        assert_same_bits(of_copy(made, INDICES), of_o1(mixed(), torch.bfloat16, INDICES))
        assert_same_bits(made.state_dict()["layer.weight"], mixed().layer.weight)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_a_weight_that_stays_float32_is_cast_again_only_after_a_write(self, mode):
        made = amp.convert_model(mixed(), "bfloat16")
        made(INDICES)

        def casts() -> int:
            with mode(), profile(activities=[ProfilerActivity.CPU]) as profiled:
                made(INDICES)
            return [event.name for event in profiled.events()].count("aten::_to_copy")

        casts()
        of_activations = casts()
        made.embedding.weight.add_(1)
        assert casts() == of_activations + 1

    def test_casts_of_replaced_weights_are_dropped(self):
        made = amp.convert_model(mixed().requires_grad_(False), "bfloat16")
        casts = made.forward._copy._casts
        for _ in range(3):
            loaded = {name: value.clone() for name, value in mixed().state_dict().items()}
            made.load_state_dict(loaded, assign=True)
            made(INDICES)
        gc.collect()
        assert sum(parameter() is None for _, parameter, _ in casts.entries()) == 0

    def test_neither_copy_nor_model_is_kept_alive(self):
        model = mixed()
        made = amp.convert_model(model)
        made(INDICES)
        references = weakref.ref(model), weakref.ref(made)
        del model, made
        gc.collect()
        assert [reference() for reference in references] == [None, None]


class TestExcluded:
    @EACH_HALF
    @pytest.mark.parametrize(
        "excluded",
        ["0.inner", "*.inner", nn.Linear, "Linear", ["0.inner"]],
        ids=["name", "pattern", "class", "class-name", "list"],
    )
    def test_excluded_modules_compute_in_float32(self, half, excluded):
        model = nn.Sequential(nn.Sequential(), nn.Conv1d(1, 1, 1))
        model[0].add_module("inner", nn.Linear(3, 3))
        made = amp.convert_model(model, half, excluded=excluded)
        inputs = torch.randn(1, 1, 3)
        assert made[0](inputs.to(half)).dtype is torch.float32
        assert made(inputs).dtype is half
        assert made[0].inner.weight.dtype is torch.float32
        assert_same_bits(made[0](inputs), model[0](inputs))

    def test_a_module_object_can_be_excluded(self):
        model = mixed()
        assert amp.convert_model(model, excluded=model.layer).layer(torch.ones(8)).dtype is torch.float32

    @EACH_HALF
    @pytest.mark.parametrize(
        "excluded", [torch.mm, "mm", "torch.mm", [torch.mm]], ids=["itself", "name", "path", "list"]
    )
    def test_excluded_functions_compute_in_float32(self, half, excluded):
        made = amp.convert_model(Calling(lambda x, w: torch.mm(w, x)), half, excluded=excluded)
        assert made(torch.ones(4, 4)).dtype is torch.float32
        assert made.weight.dtype is torch.float32

    def test_a_name_excludes_every_spelling_of_a_function_and_a_path_one(self):
        model = Calling(lambda x, w: (torch.mm(x, w), x.mm(w)))
        every = amp.convert_model(model, "bfloat16", excluded="mm")(torch.ones(4, 4))
        one = amp.convert_model(model, "bfloat16", excluded="torch.mm")(torch.ones(4, 4))
        assert [result.dtype for result in every] == [torch.float32] * 2
        assert [result.dtype for result in one] == [torch.float32, torch.bfloat16]

    def test_a_weight_shared_with_an_excluded_module_stays_float32(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        made = amp.convert_model(model, "bfloat16", excluded="1")
        made(torch.ones(3))
        assert made[0].weight.dtype is torch.float32
        assert made[0](torch.ones(3)).dtype is torch.bfloat16

    @pytest.mark.parametrize(
        ("excluded", "said"),
        [
            ("layr", r"excluded has 'layr', which is neither.*Did you mean 'layer'"),
            ("sofmax", r"Did you mean 'softmax'"),
            ("torch.nn.functional.sofmax", "neither a submodule of the model nor a function of torch"),
            ("torch.nn.functional.sofmax", "Did you mean 'softmax'"),
            ("", "excluded has the model itself"),
            (Mixed, "excluded has the model itself"),
            ("product", "It is a parameter: name the module that holds it"),
            (3, "excluded has int; expected submodules"),
            (torch.ones(2), "excluded has Tensor; expected submodules"),
            (len, "excluded has <built-in function len>; expected submodules"),
            (nn.Conv2d, "Conv2d, which no module of the model is"),
            (nn.Linear(1, 1), "a Linear that is not in the model"),
        ],
    )
    def test_excluding_what_is_not_there_is_an_error(self, excluded, said):
        with pytest.raises(OptionError, match=said):
            amp.convert_model(mixed(), excluded=excluded)


class TestSideEffects:
    def test_converting_changes_neither_torch_nor_the_model(self):
        before = {name: vars(owner).copy() for name, owner in [("torch", torch), ("F", F), ("Tensor", Tensor)]}
        model = mixed()
        saved, held = copy.deepcopy(model.state_dict()), vars(model).copy()
        made = amp.convert_model(model)
        made(INDICES)
        assert before == {name: vars(owner) for name, owner in [("torch", torch), ("F", F), ("Tensor", Tensor)]}
        assert vars(model) == held
        assert not amp.is_on()
        assert_same_state(model.state_dict(), saved)
        assert model(INDICES).dtype is torch.float32

    def test_other_threads_see_plain_torch(self):
        found: list[torch.dtype] = []

        def look(x: Tensor, w: Tensor) -> Tensor:
            together([lambda: found.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)])
            return torch.mm(x, w)

        assert amp.convert_model(Calling(look), "bfloat16")(torch.ones(4, 4)).dtype is torch.bfloat16
        assert found == [torch.float32]

    def test_a_copy_serves_many_threads_at_once(self):
        made = amp.convert_model(mixed(), "bfloat16")
        expected, found = of_o1(mixed(), torch.bfloat16, INDICES), []

        def serve() -> None:
            with torch.inference_mode():
                found.extend(made(INDICES) for _ in range(20))

        together([serve] * 4)
        assert_same_state(found, [expected] * 80)

    def test_a_forward_that_raises_leaves_nothing_behind(self):
        def fail(x: Tensor, w: Tensor) -> Tensor:
            raise KeyboardInterrupt

        made = amp.convert_model(Calling(fail))
        with pytest.raises(KeyboardInterrupt):
            made(torch.ones(4, 4))
        assert thread.mode is None
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_a_copy_computes_the_same_beside_a_live_session(self, level):
        model, trained = mixed(), nn.Linear(2, 2)
        expected = of_o1(mixed(), torch.float16, INDICES)
        amp.initialize(trained, torch.optim.SGD(trained.parameters(), lr=1), opt_level=level, half_dtype="bfloat16")
        made = amp.convert_model(model, "float16")
        assert_same_bits(of_copy(made, INDICES), expected)
        amp.deinitialize()
        assert_same_bits(of_copy(made, INDICES), expected)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_a_model_under_amp_can_be_converted(self, level):
        model = mixed()
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1), opt_level=level, half_dtype="bfloat16")
        made = amp.convert_model(model, "bfloat16")
        found = of_copy(made, INDICES)
        amp.deinitialize()
        assert_same_bits(of_copy(made, INDICES), found)
        assert_same_bits(found, of_o1(mixed(), torch.bfloat16, INDICES))
        assert_same_bits(made.state_dict()["layer.weight"], mixed().layer.weight)

    def test_a_copy_called_within_another_keeps_its_half_type(self):
        inner = amp.convert_model(nn.Linear(4, 4), "float16")
        seen = []

        def both(x: Tensor, w: Tensor) -> Tensor:
            seen.append(inner(x).dtype)
            return torch.mm(x, w)

        made = amp.convert_model(Calling(both), "bfloat16")
        assert made(torch.ones(4, 4)).dtype is torch.bfloat16
        assert seen == [torch.float16]


class TestOtherCalls:
    def test_a_copy_made_in_inference_mode_can_be_called_outside_of_it(self):
        with torch.inference_mode():
            made = amp.convert_model(nn.Linear(4, 4), "bfloat16", excluded=None)
        with torch.enable_grad():
            made(torch.ones(4)).sum().backward()
        assert made.weight.grad is not None

    def test_functional_call_takes_other_weights(self):
        model = nn.Linear(4, 4)
        made = amp.convert_model(model, "bfloat16")
        other = {"weight": torch.ones(4, 4), "bias": torch.zeros(4)}
        found = torch.func.functional_call(made, other, (torch.ones(4),))
        assert_same_bits(found, torch.full((4,), 4, dtype=torch.bfloat16))
        assert_same_bits(made.state_dict()["weight"], model.weight)


class TestTracing:
    @EACH_HALF
    def test_an_exported_program_carries_casts_and_half_weights(self, half):
        made = amp.convert_model(mixed(), half)
        expected = of_copy(made, INDICES)
        program = torch.export.export(made, (INDICES,))
        assert_same_bits(program.module()(INDICES), expected)
        assert program.state_dict["layer.weight"].dtype is half
        assert program.state_dict["product"].dtype is half
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        assert_same_bits(torch.export.load(buffer).module()(INDICES), expected)

    @EACH_HALF
    def test_a_copy_can_be_exported_before_its_first_forward(self, half):
        program = torch.export.export(amp.convert_model(mixed(), half), (INDICES,))
        assert_same_bits(program.module()(INDICES), of_o1(mixed(), half, INDICES))

    def test_tracing_a_half_weight_read_in_float32_is_an_error_before_a_forward(self):
        made = amp.convert_model(Calling(lambda x, w: x + made.layer.weight.sum()), "bfloat16")
        with pytest.raises(UsageError, match=r"Run the converted model once.*'layer\.weight'"):
            torch.export.export(made, (torch.ones(4, 4),))
        made(torch.ones(4, 4))
        torch.export.export(made, (torch.ones(4, 4),))

    @EACH_HALF
    @pytest.mark.parametrize("run_before", [False, True])
    @pytest.mark.covering(1)
    def test_a_copy_compiles_without_a_graph_break(self, half, run_before):
        torch._dynamo.reset()
        made = amp.convert_model(mixed(), half)
        expected = of_o1(mixed(), half, INDICES)
        if run_before:
            made(INDICES)
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(INDICES), expected)

    def test_every_way_to_call_compiles(self, subtests):
        class All(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.of_each = nn.ModuleDict({name: Calling(function) for name, function in rows})

            def forward(self, inputs: Tensor) -> list[Tensor]:
                return [each(inputs) for each in self.of_each.values()]

        torch._dynamo.reset()
        inputs, rows = torch.randn(4, 4), [row for row in FUNCTIONS if row[0] != "vmap"]
        made = amp.convert_model(All(), torch.bfloat16)
        for _ in range(2):
            expected = of_copy(made, inputs)
        found = of_copy(torch.compile(made, backend="eager"), inputs)
        names = [name for name, _ in rows]
        check_rows(subtests, zip(names, found, expected, strict=True), assert_same_bits)

    @pytest.mark.slow
    @OF_STRICT_EXPORT
    @EACH_HALF
    def test_every_way_to_call_exports_strictly(self, half, subtests):
        inputs = torch.randn(4, 4)

        def check(function: Callable[..., Tensor]) -> None:
            made = amp.convert_model(Calling(function), half)
            expected = of_copy(made, inputs)
            found = torch.export.export(made, (inputs,), strict=True).module()
            assert_same_bits(of_copy(found, inputs), expected)

        check_rows(subtests, [row for row in FUNCTIONS if row[0] != "vmap"], check)

    def test_operators_are_looked_up_beneath_patches(self):
        """The table is made once a process: a session that is live then must not show in it."""
        tables = []
        for is_live in (True, False):
            casting_mode.reported_functions.cache_clear()
            if is_live:
                lists = {"whitelist": {"torch.Tensor": ["__eq__", "eq"]}}
                amp.initialize(nn.Linear(2, 2), half_dtype="bfloat16", cast_lists=lists, verbosity=0)
            tables.append(casting_mode.reported_functions())
            amp.deinitialize()
        assert tables[0] == tables[1]

    @OF_STRICT_EXPORT
    @pytest.mark.parametrize("strict", [pytest.param(True, marks=pytest.mark.slow), False])
    def test_every_operator_of_python_is_cast_and_exported(self, strict, subtests):
        lists = {"whitelist": {"torch.Tensor": [*METHODS_OF_OPERATORS]}}

        def check(name: str) -> None:
            function = getattr(operator, name)
            model = Calling(lambda x, w: (function(x.float(), w), function(3.0, w), function(x.float(), 3.0)))
            made = amp.convert_model(model, "bfloat16", cast_lists=lists)
            expected = made(torch.ones(4, 4))
            assert_same_state(expected, of_o1(model, torch.bfloat16, torch.ones(4, 4), cast_lists=lists))
            program = torch.export.export(made, (torch.ones(4, 4),), strict=strict).module()
            assert_same_state(program(torch.ones(4, 4)), expected)

        check_rows(subtests, [(name, name) for name in OPERATORS], check)

    @pytest.mark.slow
    @OF_STRICT_EXPORT
    @EACH_HALF
    @pytest.mark.parametrize("trace", ["compile", "strict", "export"])
    @pytest.mark.parametrize("inner", ["attention", "encoder"])
    @pytest.mark.covering(1)
    def test_attention_takes_no_path_that_the_lists_do_not_reach(self, half, trace, inner):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, inputs = Attending(inner).eval(), torch.randn(2, 3, 4)
        expected = of_o1(model, half, inputs)
        made = amp.convert_model(model, half)
        if trace == "compile":
            traced = torch.compile(made, backend="eager", fullgraph=True)
        else:
            traced = torch.export.export(made, (inputs,), strict=trace == "strict").module()
        assert_same_state(traced(inputs), expected)
        assert torch.backends.mha.get_fastpath_enabled()

    @pytest.mark.slow
    @ONE_HALF
    def test_a_compiled_copy_casts_after_a_graph_break(self, half):
        def breaking(x: Tensor, w: Tensor) -> Tensor:
            y = x @ w
            torch._dynamo.graph_break()
            return encoder((y @ w)[None]).exp()

        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Calling(breaking)
        encoder = model.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
        expected = of_o1(model, half, torch.ones(4, 4))
        made = amp.convert_model(model, half)
        encoder = made.encoder
        assert_same_bits(torch.compile(made, backend="eager")(torch.ones(4, 4)), expected)

    @pytest.mark.slow
    def test_a_copy_compiles_after_a_session_in_which_another_was_made(self, monkeypatch):
        torch._dynamo.reset()
        monkeypatch.setattr(casting_mode, "_globals_by_module", {})
        casting_mode._without_override_check.cache_clear()
        model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
        amp.initialize(nn.Linear(4, 4), half_dtype=torch.bfloat16, verbosity=0)
        amp.convert_model(model, "bfloat16")
        amp.deinitialize()
        made = amp.convert_model(model, "bfloat16")
        compiled = torch.compile(made, backend="eager")
        assert_same_bits(compiled(torch.ones(1, 4, 4)), made(torch.ones(1, 4, 4)))
        casting_mode._without_override_check.cache_clear()  # it holds the globals of this test

    @pytest.mark.slow
    def test_a_copy_compiles_in_another_thread(self):
        torch._dynamo.reset()
        compiled, found = torch.compile(amp.convert_model(mixed(), "bfloat16"), backend="eager", fullgraph=True), []
        together([lambda: found.append(compiled(INDICES))])
        assert_same_bits(found[0], of_o1(mixed(), torch.bfloat16, INDICES))

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")  # in torch's exporter
    def test_an_onnx_export_has_casts_and_half_weights(self):
        made = amp.convert_model(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)).eval(), "float16")
        inputs = torch.randn(2, 4)
        graph = torch.onnx.export(made, (inputs,), dynamo=True, verbose=False).model_proto.graph
        assert {each.name: each.data_type for each in graph.initializer} == {
            "0.weight": onnx.TensorProto.FLOAT16,
            "0.bias": onnx.TensorProto.FLOAT16,
        }
        assert [node.op_type for node in graph.node].count("Cast") >= 1


class TestBadInput:
    @pytest.mark.parametrize(
        ("make", "options", "error", "said"),
        [
            (lambda: 3, {}, OptionError, "found int as a model"),
            (lambda: nn.Linear(1, 1), {"half_dtype": "float32"}, OptionError, "half_dtype"),
            (lambda: nn.Linear(1, 1), {"keep_float32": "yes"}, OptionError, "keep_float32"),
            (lambda: nn.Linear(1, 1), {"cast_lists": {"whitelist": {"torch": ["mn"]}}}, CastListError, "mn"),
            (lambda: nn.DataParallel(nn.Linear(1, 1)), {}, OptionError, r"amp\.convert_model\(model\.module\)"),
            (lambda: torch.compile(nn.Linear(1, 1)), {}, OptionError, "compile the copy"),
            (lambda: torch.jit.trace(nn.Linear(1, 1), torch.ones(1)), {}, OptionError, "TorchScript"),
            (lambda: nn.Linear(1, 1, device="meta"), {}, OptionError, "'weight' is on the meta device"),
            (lambda: nn.LazyLinear(1), {}, OptionError, "no shape yet"),
            (lambda: amp.convert_model(nn.Linear(1, 1)), {}, OptionError, "has made for inference"),
        ],
    )
    def test_a_model_or_option_that_cannot_be_converted_is_an_error(self, make, options, error, said):
        with pytest.raises(error, match=said):
            amp.convert_model(make(), **options)

    def test_training_a_copy_is_an_error(self):
        with pytest.raises(OptionError, match=r"what amp\.convert_model has made for inference"):
            amp.initialize(nn.Sequential(amp.convert_model(nn.Linear(1, 1))))
        assert not amp.is_on()

    def test_a_listed_function_whose_calls_cannot_be_seen_warns(self):
        with pytest.warns(AmpWarning, match=r"does not cast for json\.dumps"):
            amp.convert_model(nn.Linear(1, 1), cast_lists={"whitelist": {"json": ["dumps"]}})

    def test_a_forward_set_on_the_instance_is_converted(self):
        model = nn.Module()
        model.layer = nn.Linear(2, 2)
        model.forward = lambda inputs: model.layer(inputs).exp()
        assert_same_bits(amp.convert_model(model, "float16")(torch.ones(2)), of_o1(model, torch.float16, torch.ones(2)))

    @pytest.mark.parametrize("excluded", [(), "inner"])
    def test_a_forward_that_returns_a_generator_is_an_error(self, excluded):
        class Streaming(nn.Linear):
            def forward(self, inputs: Tensor) -> Iterator[Tensor]:
                yield super().forward(inputs)

        made = amp.convert_model(nn.ModuleDict({"inner": Streaming(2, 2)}), excluded=excluded)
        with pytest.raises(UsageError, match="a forward of the converted model returned a generator"):
            made["inner"](torch.ones(2))

    def test_a_pruned_weight_is_an_error_with_the_cure(self):
        with torch.enable_grad():
            pruned = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
        with pytest.raises(OptionError, match=r"'0\.weight' was computed from weights.*prune\.remove"):
            amp.convert_model(nn.Sequential(pruned))

    def test_an_operator_that_torch_reports_by_another_name_warns(self):
        with pytest.warns(AmpWarning, match=r"torch\.Tensor\.__add__ as .* List torch\.Tensor\.add, too"):
            amp.convert_model(nn.Linear(1, 1), cast_lists={"whitelist": {"torch.Tensor": ["__add__"]}})

    def test_a_part_compiled_by_torchscript_warns_unless_excluded(self):
        part = torch.jit.trace(nn.Linear(2, 2), torch.ones(2))
        with pytest.warns(AmpWarning, match="nothing is cast in 0"):
            amp.convert_model(nn.Sequential(part))
        made = amp.convert_model(nn.Sequential(nn.Linear(2, 2), part, nn.Linear(2, 2)), "bfloat16", excluded="1")
        assert made(torch.ones(2)).dtype is torch.bfloat16
        assert made[1](torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32
