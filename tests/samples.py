"""One sample call, or more, for every function in the cast lists.

A sample builds its arguments through a `Maker`, which decides the dtype of every floating tensor: one dtype for a plain
call, two in turn for a mixed one. Values are small and well conditioned, so that a half result can be compared with a
float32 one. This module knows torch and nothing of ampatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import yaml

HALF_DTYPES = (torch.float16, torch.bfloat16)

# Error allowed between a half computation and the float32 one, relative to the largest value of the result: a few
# roundings of the half type (2**-11 and 2**-8), as an argument and a result are rounded at least once each.
# `Sample.tolerance` multiplies it.
TOLERANCE = {torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8, torch.float32: 1e-5}

# What torch warns of when listed functions are used as intended: in these tests a warning is an error unless named.
TORCH_WARNINGS = (
    r"ignore:.nn.functional.upsample(_bilinear)?. is deprecated:UserWarning",
    r"ignore:ComplexHalf support is experimental:UserWarning",
    r"ignore:Mismatch dtype between input and weight:UserWarning",
    r"ignore:at..(frobenius|nuclear)_norm is deprecated:UserWarning",
    r"ignore:index_reduce.. is in beta:UserWarning",
    r"ignore:reduction. .mean. divides the total loss:UserWarning",
    r"ignore:torch.(chain_matmul|cholesky|lu|lu_solve|qr|triangular_solve) is deprecated:UserWarning",
)

LISTS = Path(__file__).parent.parent / "lists"
LIST_NAMES = ("whitelist", "blacklist", "promote", "banned")


@dataclass(frozen=True)
class Entry:
    """One line of a shipped list, read here without the loader, so that the lists can be tested without it."""

    list_name: str
    path: str
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES
    when: dict[str, list] = field(default_factory=dict)
    since: str = ""
    until: str = ""
    optional: bool = False
    via_dtype: bool = False
    needs_float32: object = False
    instead: str = ""

    @property
    def terms(self) -> tuple:
        """All that two paths of one function must have in common."""
        options = self.since, self.until, self.via_dtype, str(self.needs_float32)
        return self.list_name, self.dtypes, tuple(self.when.items()), *options

    @property
    def is_in_force(self) -> bool:
        """Whether it counts for this torch."""
        here = torch.__version__
        return not (self.since and here < self.since) and not (self.until and here >= self.until)


def flatten(names: object) -> Iterator[dict]:
    """The entries of a namespace as mappings, lists inside the list flattened."""
    for item in names if isinstance(names, list) else [names]:
        if isinstance(item, list):
            yield from flatten(item)
        else:
            yield item if isinstance(item, dict) else {"name": item}


def entries(list_name: str) -> list[Entry]:
    """A shipped list, read from its file."""
    document = yaml.safe_load((LISTS / f"{list_name}.yaml").read_text(encoding="utf-8"))
    found = []
    for namespace, names in document.items():
        for keys in flatten(names):
            options = {key: value for key, value in keys.items() if key not in ("name", "dtypes")}
            if "dtypes" in keys:
                options["dtypes"] = tuple(getattr(torch, dtype) for dtype in keys["dtypes"])
            found.append(Entry(list_name, f"{namespace}.{keys['name']}", **options))
    return found


class Maker:
    """Makes the tensors of a sample, seeded, in the dtypes under test.

    Args:
        dtypes: the dtypes that floating tensors get, in turn.
        seed: two makers of one seed make equal values, up to the rounding to their dtypes.
        requires_grad: whether the floating tensors that `t` and `leaf` make are to collect gradients.

    Attributes:
        made: every floating tensor made so far, in order; all of them are leaves.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], seed: int = 0, requires_grad: bool = False) -> None:
        self.made: list[torch.Tensor] = []
        self._dtypes = tuple(dtypes)
        self._requires_grad = requires_grad
        self._generator = torch.Generator().manual_seed(seed)

    def leaf(self, values: torch.Tensor, *, grad: bool = True) -> torch.Tensor:
        """The values as a leaf in the next dtype; without gradient where `grad` is False."""
        tensor = values.detach().clone().to(self._dtypes[len(self.made) % len(self._dtypes)])
        tensor.requires_grad_(grad and self._requires_grad)
        self.made.append(tensor)
        return tensor

    def t(self, *shape: int, low: float = -1.0, high: float = 1.0, grad: bool = True) -> torch.Tensor:
        """Uniform values in [low, high)."""
        return self.leaf(self.values(*shape, low=low, high=high), grad=grad)

    def spd(self, n: int) -> torch.Tensor:
        """A symmetric positive definite matrix with a condition number of about two."""
        a = self.values(n, n)
        return self.leaf(a @ a.T / n + torch.eye(n))

    def square(self, n: int) -> torch.Tensor:
        """An invertible matrix, not symmetric, with distinct eigenvalues and singular values."""
        return self.leaf(self.invertible(n))

    def invertible(self, n: int) -> torch.Tensor:
        """What `square` is made from, in float32."""
        return self.values(n, n, low=-0.25, high=0.25) + torch.diag(torch.arange(1.0, n + 1.0))

    def signs(self, *shape: int) -> torch.Tensor:
        """Floating ones and minus ones, without gradient: the targets of margin losses."""
        return self.leaf(self.bools(*shape).float() * 2 - 1, grad=False)

    def values(self, *shape: int, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
        """Uniform values in [low, high) that stay float32: raw material for `leaf`."""
        return torch.rand(*shape, generator=self._generator) * (high - low) + low

    def ints(self, *shape: int, low: int = 0, high: int = 2) -> torch.Tensor:
        """Whole numbers in [low, high) as int64."""
        return torch.randint(low, high, shape, generator=self._generator)

    def bools(self, *shape: int) -> torch.Tensor:
        """True and False at random."""
        return torch.rand(*shape, generator=self._generator) < 0.5


@dataclass(frozen=True)
class Sample:
    """One call of one function.

    Attributes:
        build: the arguments by name, in the order of the signature; for a method the first one is `self`.
        keywords: whether the function takes its arguments by keyword (operators and variadic functions do not).
        positional: whether all arguments but `keyword_only` may be handed by position.
        keyword_only: arguments that are handed by keyword even in a positional call, because the signature says so or
            because others stand between.
        grad: whether a gradient reaches the tensors that were made with one.
        applies: False where the `when` condition of the entry does not hold, so that nothing is cast.
        random: whether the function draws random numbers: seed before each call, and compare dtypes rather than values.
        tolerance: multiplies `TOLERANCE`.
        note: what is special about this call.
    """

    build: Callable[[Maker], dict[str, object]]
    keywords: bool = True
    positional: bool = True
    keyword_only: frozenset[str] = frozenset()
    grad: bool = True
    applies: bool = True
    random: bool = False
    tolerance: float = 1.0
    note: str = ""

    def arguments(self, maker: Maker, *, method: bool, form: str = "positional") -> tuple[tuple, dict[str, object]]:
        """The arguments as they are handed over.

        Args:
            maker: makes the tensors.
            method: whether the first argument is `self`, which is positional in either form.
            form: "positional" or "keyword".
        """
        named = self.build(maker)
        first = next(iter(named)) if method else None
        by_position = {
            name
            for name in named
            if name == first or (form == "positional" and self.positional and name not in self.keyword_only)
        }
        args = tuple(value for name, value in named.items() if name in by_position)
        return args, {name: value for name, value in named.items() if name not in by_position}

    def forms(self) -> tuple[str, ...]:
        """The forms in which this call can be written."""
        return (("positional",) if self.positional else ()) + (("keyword",) if self.keywords else ())


def is_method(path: str) -> bool:
    return path.startswith("torch.Tensor.")


def resolve(path: str) -> Callable:
    """The function that a dotted path below torch leads to."""
    return functools.reduce(getattr, path.split(".")[1:], torch)


def lacks(path: str) -> bool:
    """Whether this torch has no such function."""
    try:
        resolve(path)
    except AttributeError:
        return True
    return False


def call(path: str, sample: Sample, maker: Maker, form: str = "positional") -> object:
    """What the function gives for the sample."""
    args, kwargs = sample.arguments(maker, method=is_method(path), form=form)
    return resolve(path)(*args, **kwargs)


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors in a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


SAMPLES: dict[str, tuple[Sample, ...]] = {}

TORCH = ("torch",)
METHOD = ("torch.Tensor",)
BOTH = ("torch", "torch.Tensor")
F = ("torch.nn.functional",)
TORCH_AND_F = ("torch", "torch.nn.functional")
LINALG = ("torch.linalg",)
FFT = ("torch.fft",)
SPARSE = ("torch.sparse",)
SPECIAL = ("torch.special",)
RNN = ("torch", "torch._VF")


def _add(namespaces: Iterable[str], names: str, *samples: Sample) -> None:
    for namespace in namespaces:
        for name in names.split():
            path = f"{namespace}.{name}"
            if path in SAMPLES:
                raise ValueError(f"two rows for {path}")
            SAMPLES[path] = samples


def _add_in_place(namespaces: Iterable[str], names: str) -> None:
    """Adds the first call of each function as one of its in-place form."""
    for name in names.split():
        first, *_ = SAMPLES[f"torch.Tensor.{name}"]
        _add(namespaces, f"{name}_", replace(first, grad=False, note="in place"))


def _unary(low: float = -1.0, high: float = 1.0, **fields: object) -> Sample:
    return Sample(lambda m: {"input": m.t(3, 4, low=low, high=high)}, **fields)


def _binary(low: float = -1.0, high: float = 1.0, **fields: object) -> Sample:
    return Sample(lambda m: {"input": m.t(3, 4, low=low, high=high), "other": m.t(3, 4, low=low, high=high)}, **fields)


# --- convolutions ---------------------------------------------------------------------------------


def _convolution(spatial: int, *, transposed: bool = False) -> tuple[Sample, ...]:
    size, kernel = (5,) * spatial, (3,) * spatial
    outer, inner = (4, 3) if not transposed else (3, 4)
    return (
        Sample(lambda m: {"input": m.t(2, 3, *size), "weight": m.t(outer, inner, *kernel), "bias": m.t(4)}),
        Sample(
            lambda m: {"input": m.t(2, 3, *size), "weight": m.t(outer, inner, *kernel), "bias": None, "stride": 2},
            note="no bias",
        ),
    )


_add(TORCH_AND_F, "conv1d", *_convolution(1))
_add(TORCH_AND_F, "conv2d", *_convolution(2))
_add(TORCH_AND_F, "conv3d", *_convolution(3))
_add(TORCH_AND_F, "conv_transpose1d", *_convolution(1, transposed=True))
_add(TORCH_AND_F, "conv_transpose2d", *_convolution(2, transposed=True))
_add(TORCH_AND_F, "conv_transpose3d", *_convolution(3, transposed=True))
_add(
    TORCH_AND_F, "conv_tbc", Sample(lambda m: {"input": m.t(6, 2, 3), "weight": m.t(3, 3, 4), "bias": m.t(4), "pad": 1})
)
_add(
    TORCH,
    "convolution",
    Sample(
        lambda m: {
            "input": m.t(2, 3, 5, 5),
            "weight": m.t(4, 3, 3, 3),
            "bias": m.t(4),
            "stride": [1, 1],
            "padding": [0, 0],
            "dilation": [1, 1],
            "transposed": False,
            "output_padding": [0, 0],
            "groups": 1,
        }
    ),
)

# --- matrix products ------------------------------------------------------------------------------

_add(BOTH, "addbmm", Sample(lambda m: {"input": m.t(3, 4), "batch1": m.t(2, 3, 5), "batch2": m.t(2, 5, 4)}))
_add(
    BOTH,
    "addmm",
    Sample(lambda m: {"input": m.t(3, 4), "mat1": m.t(3, 5), "mat2": m.t(5, 4)}),
    Sample(
        lambda m: {"input": m.t(3, 4), "mat1": m.t(3, 5), "mat2": m.t(5, 4), "beta": 0.5, "alpha": 2.0},
        keyword_only=frozenset({"beta", "alpha"}),
    ),
)
_add(BOTH, "addmv", Sample(lambda m: {"input": m.t(3), "mat": m.t(3, 5), "vec": m.t(5)}))
_add(BOTH, "addr", Sample(lambda m: {"input": m.t(3, 4), "vec1": m.t(3), "vec2": m.t(4)}))
_add(BOTH, "baddbmm", Sample(lambda m: {"input": m.t(2, 3, 4), "batch1": m.t(2, 3, 5), "batch2": m.t(2, 5, 4)}))
_add(BOTH, "bmm", Sample(lambda m: {"input": m.t(2, 3, 5), "mat2": m.t(2, 5, 4)}))
_add(BOTH, "inner", Sample(lambda m: {"input": m.t(3, 5), "other": m.t(4, 5)}))
_MATMUL = (
    Sample(lambda m: {"input": m.t(3, 5), "other": m.t(5, 4)}),
    Sample(lambda m: {"input": m.t(2, 3, 5), "other": m.t(5)}, note="matrices times a vector"),
)
_add((*BOTH, *LINALG), "matmul", *_MATMUL)
_add(
    METHOD,
    "__matmul__ __rmatmul__",
    Sample(lambda m: {"self": m.t(4, 4), "other": m.t(4, 4)}, keywords=False),
)
_add(BOTH, "mm", Sample(lambda m: {"input": m.t(3, 5), "mat2": m.t(5, 4)}))
_add(TORCH, "dsmm spmm", Sample(lambda m: {"input": m.t(3, 5), "mat2": m.t(5, 4)}))
_add(BOTH, "mv", Sample(lambda m: {"input": m.t(3, 5), "vec": m.t(5)}))
_add_in_place(METHOD, "addbmm addmm addr baddbmm")
_add_in_place(BOTH, "addmv")
_add(
    TORCH,
    "chain_matmul",
    Sample(lambda m: {"a": m.t(3, 5), "b": m.t(5, 4), "c": m.t(4, 2)}, keywords=False, tolerance=2, note="variadic"),
)
_add(LINALG, "multi_dot", Sample(lambda m: {"tensors": [m.t(3, 5), m.t(5, 4), m.t(4, 2)]}, tolerance=2, note="a list"))
_add(LINALG, "vecdot", Sample(lambda m: {"x": m.t(3, 5), "y": m.t(3, 5)}))
_add(
    TORCH,
    "einsum",
    Sample(lambda m: {"equation": "ij,jk->ik", "a": m.t(3, 5), "b": m.t(5, 4)}, keywords=False, note="variadic"),
    Sample(
        lambda m: {"equation": "bij,bjk->bik", "operands": [m.t(2, 3, 5), m.t(2, 5, 4)]}, keywords=False, note="a list"
    ),
)
_add(
    TORCH,
    "tensordot",
    Sample(lambda m: {"a": m.t(3, 4, 5), "b": m.t(4, 5, 2), "dims": 2}),
    Sample(lambda m: {"a": m.t(3, 5), "b": m.t(4, 5), "dims": ([1], [1])}),
)
_add(
    F,
    "linear",
    Sample(lambda m: {"input": m.t(2, 3, 5), "weight": m.t(4, 5), "bias": m.t(4)}),
    Sample(lambda m: {"input": m.t(3, 5), "weight": m.t(4, 5)}, note="no bias"),
)
_add((*BOTH, *F), "prelu", Sample(lambda m: {"input": m.t(2, 3, 4), "weight": m.t(3, low=0.1, high=0.5)}))


def _grouped(first: str, second: str) -> Sample:
    return Sample(
        lambda m: {first: m.t(16, 16), second: m.t(2, 16, 16), "offs": torch.tensor([8, 16], dtype=torch.int32)},
        keyword_only=frozenset({"offs"}),
        tolerance=2,
        note="two groups of eight rows; the backward wants a dense gradient, so weight the result before summing it",
    )


_add(F, "grouped_mm", _grouped("mat_a", "mat_b"))
_add(TORCH, "_grouped_mm", _grouped("input", "mat2"))

# --- attention ------------------------------------------------------------------------------------


def _heads(m: Maker) -> dict[str, object]:
    return {name: m.t(2, 2, 4, 8) for name in ("query", "key", "value")}


_add(
    F,
    "scaled_dot_product_attention",
    Sample(_heads),
    Sample(lambda m: {**_heads(m), "attn_mask": m.t(4, 4, grad=False)}, note="an additive mask"),
    Sample(lambda m: {**_heads(m), "is_causal": True}, keyword_only=frozenset({"is_causal"})),
)


_add(
    F,
    "multi_head_attention_forward",
    Sample(
        lambda m: {
            **{name: m.t(3, 2, 8) for name in ("query", "key", "value")},
            "embed_dim_to_check": 8,
            "num_heads": 2,
            "in_proj_weight": m.t(24, 8),
            "in_proj_bias": m.t(24),
            "bias_k": None,
            "bias_v": None,
            "add_zero_attn": False,
            "dropout_p": 0.0,
            "out_proj_weight": m.t(8, 8),
            "out_proj_bias": m.t(8),
            "need_weights": False,
        },
        keyword_only=frozenset({"need_weights"}),
        tolerance=2,
        note="with need_weights, the weights come out of softmax in float32",
    ),
)


def _projections(m: Maker) -> dict[str, object]:
    return {"qkv_weight": m.t(24, 8), "qkv_bias": m.t(24), "proj_weight": m.t(8, 8), "proj_bias": m.t(8)}


_add(
    TORCH,
    "_native_multi_head_attention",
    Sample(
        lambda m: {
            **{name: m.t(2, 3, 8) for name in ("query", "key", "value")},
            "embed_dim": 8,
            "num_head": 2,
            **_projections(m),
        },
        grad=False,
        tolerance=4,
        note="inference only",
    ),
)


def _encoder_layer(m: Maker) -> dict[str, object]:
    return {
        "src": m.t(2, 3, 8),
        "embed_dim": 8,
        "num_heads": 2,
        **_projections(m),
        "use_gelu": False,
        "norm_first": False,
        "eps": 1e-5,
        "norm_weight_1": m.t(8, low=0.5),
        "norm_bias_1": m.t(8),
        "norm_weight_2": m.t(8, low=0.5),
        "norm_bias_2": m.t(8),
        "ffn_weight_1": m.t(16, 8),
        "ffn_bias_1": m.t(16),
        "ffn_weight_2": m.t(8, 16),
        "ffn_bias_2": m.t(8),
    }


_add(TORCH, "_transformer_encoder_layer_fwd", Sample(_encoder_layer, grad=False, tolerance=4, note="inference only"))

# --- recurrent layers and cells -------------------------------------------------------------------


def _layer(gates: int, *, cell_state: bool = False, packed: bool = False) -> Sample:
    def build(m: Maker) -> dict[str, object]:
        hidden = m.t(1, 2, 4)
        state = (hidden, m.t(1, 2, 4)) if cell_state else hidden
        weights = [m.t(gates * 4, 3), m.t(gates * 4, 4), m.t(gates * 4), m.t(gates * 4)]
        rest = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False}
        if packed:
            return {
                "data": m.t(7, 3),
                "batch_sizes": torch.tensor([2, 2, 2, 1]),
                "hx": state,
                "params": weights,
                **rest,
            }
        return {"input": m.t(2, 5, 3), "hx": state, "params": weights, **rest, "batch_first": True}

    return Sample(build, tolerance=3, note="a packed sequence" if packed else "weights arrive as a list")


def _cell(gates: int, *, cell_state: bool = False) -> Sample:
    return Sample(
        lambda m: {
            "input": m.t(2, 3),
            "hx": (m.t(2, 4), m.t(2, 4)) if cell_state else m.t(2, 4),
            "w_ih": m.t(gates * 4, 3),
            "w_hh": m.t(gates * 4, 4),
            "b_ih": m.t(gates * 4),
            "b_hh": m.t(gates * 4),
        }
    )


_add(RNN, "lstm", _layer(4, cell_state=True), _layer(4, cell_state=True, packed=True))
_add(RNN, "gru", _layer(3), _layer(3, packed=True))
_add(RNN, "rnn_tanh rnn_relu", _layer(1), _layer(1, packed=True))
_add(RNN, "lstm_cell", _cell(4, cell_state=True))
_add(RNN, "gru_cell", _cell(3))
_add(RNN, "rnn_tanh_cell rnn_relu_cell", _cell(1))

# --- elementwise ----------------------------------------------------------------------------------

_add(BOTH, "exp exp2 expm1 cosh sinh tan square", _unary())
_add(SPECIAL, "exp2 expm1", _unary())
_add(BOTH, "reciprocal rsqrt", _unary(0.5, 2.0))
_POWERS = (
    Sample(lambda m: {"input": m.t(3, 4, low=0.5, high=2.0), "exponent": 3}),
    Sample(lambda m: {"input": m.t(3, 4, low=0.5, high=2.0), "exponent": m.t(3, 4)}, note="a tensor of exponents"),
)
_add(BOTH, "pow", *_POWERS)
_add(METHOD, "pow_", *(replace(each, grad=False) for each in _POWERS))
_add(METHOD, "__pow__", *(replace(each, keywords=False) for each in _POWERS))
_add(METHOD, "__ipow__", replace(_POWERS[0], keywords=False, grad=False, note="in place"))
_add(METHOD, "__rpow__", Sample(lambda m: {"self": m.t(3, 4), "base": 2.0}, keywords=False))
_add(F, "softplus", _unary(-3.0, 3.0))
_add(BOTH, "log log10 log2", _unary(0.2, 3.0))
_add(BOTH, "log1p", _unary(-0.5, 3.0))
_add(SPECIAL, "log1p", _unary(-0.5, 3.0))
_add(BOTH, "logit", _unary(0.1, 0.9))
_add(SPECIAL, "logit", _unary(0.1, 0.9))
_add((*BOTH, *SPECIAL), "xlogy", _binary(0.2, 3.0))
_add(SPECIAL, "xlog1py", _binary(0.2, 3.0))
_add(BOTH, "acos arccos asin arcsin atanh arctanh erfinv", _unary(-0.8, 0.8))
_add(SPECIAL, "erfinv", _unary(-0.8, 0.8))
_add(BOTH, "acosh arccosh", _unary(1.2, 3.0))
_add_in_place(BOTH, "exp exp2 expm1 cosh sinh tan square reciprocal rsqrt log log10 log2 log1p logit xlogy")
_add_in_place(BOTH, "acos arccos asin arcsin atanh arctanh acosh arccosh")
_add_in_place(METHOD, "erfinv")
_add(
    F,
    "rrelu",
    Sample(
        lambda m: {"input": m.t(3, 4), "lower": 0.1, "upper": 0.3, "training": True}, random=True, note="draws slopes"
    ),
    Sample(
        lambda m: {"input": m.t(3, 4), "lower": 0.1, "upper": 0.3, "training": False}, applies=False, note="no training"
    ),
)

# --- reductions -----------------------------------------------------------------------------------


def _matrix(note: str = "", **options: object) -> Sample:
    return Sample(lambda m: {"input": m.t(3, 4), **options}, note=note)


_REDUCED = _matrix(), _matrix(dim=1)
_add(BOTH, "sum nansum", *_REDUCED, Sample(lambda m: {"input": m.t(2, 3, 4), "dim": (0, 2), "keepdim": True}))
_PRODUCT = (
    Sample(lambda m: {"input": m.t(3, 4, low=0.5, high=1.5)}),
    Sample(lambda m: {"input": m.t(3, 4, low=0.5, high=1.5), "dim": 1, "keepdim": True}),
)
_add(BOTH, "prod", *_PRODUCT)
_add(BOTH, "cumsum", Sample(lambda m: {"input": m.t(3, 4), "dim": 1}))
_add(BOTH, "cumprod", Sample(lambda m: {"input": m.t(3, 4, low=0.5, high=1.5), "dim": 1}))
_add(
    TORCH,
    "cumulative_trapezoid trapezoid trapz",
    Sample(lambda m: {"y": m.t(3, 4), "x": m.t(3, 4)}),
    Sample(lambda m: {"y": m.t(3, 4), "dx": 0.5}, keyword_only=frozenset({"dx"})),
)
_add(METHOD, "sum_to_size", Sample(lambda m: {"input": m.t(3, 4), "size": (1, 4)}))
_ALONG = _matrix(dim=-1)
_add((*BOTH, *F, *SPECIAL), "softmax log_softmax", _ALONG)
_add(F, "softmin", _ALONG)
_add(F, "gumbel_softmax", Sample(lambda m: {"logits": m.t(3, 4)}, random=True, note="draws noise"))
_add((*BOTH, *SPECIAL), "logsumexp", _ALONG)
_add(BOTH, "logcumsumexp", _ALONG)
_add(BOTH, "logaddexp logaddexp2", _binary())
_add(BOTH, "std var", *_REDUCED)
_add(TORCH, "std_mean var_mean", *_REDUCED)
_add(BOTH, "cov corrcoef", Sample(lambda m: {"input": m.t(3, 6)}, tolerance=2))
_add(TORCH, "norm_except_dim", Sample(lambda m: {"v": m.t(3, 4), "pow": 2, "dim": 0}))
_add(BOTH, "trace", Sample(lambda m: {"input": m.square(4)}))
_add(BOTH, "dist", _binary(), Sample(lambda m: {"input": m.t(3, 4), "other": m.t(3, 4), "p": 3}))
_add(BOTH, "renorm", _matrix(p=2, dim=0, maxnorm=1.0))
_add_in_place(METHOD, "cumsum cumprod renorm")
_REFUSES = "torch refuses dtype= with this one"
_OF_VECTORS = _matrix(), _matrix(p=1, dim=1), _matrix(p=3.5, dim=0, keepdim=True), _matrix(p=torch.inf)
_add(BOTH, "norm", *_OF_VECTORS, _matrix(p="fro", dim=(0, 1)), _matrix(_REFUSES, p="nuc"))
_add(TORCH, "frobenius_norm", _matrix(dim=[0, 1]))
_add(TORCH, "nuclear_norm", _matrix())
_add(LINALG, "norm", _matrix(), _matrix("the largest singular value", ord=2), _matrix(ord=torch.inf, dim=1))
_add(LINALG, "matrix_norm", _matrix(), _matrix(_REFUSES, ord="nuc"))
_add(
    LINALG,
    "vector_norm",
    Sample(lambda m: {"x": m.t(3, 4)}),
    Sample(lambda m: {"x": m.t(3, 4), "ord": 1, "dim": 1}),
    Sample(lambda m: {"x": m.t(3, 4), "ord": float("inf"), "dim": 0, "keepdim": True}),
)
_add(
    BOTH,
    "quantile nanquantile",
    Sample(lambda m: {"input": m.t(3, 5), "q": 0.3, "dim": 1}),
    Sample(lambda m: {"input": m.t(9), "q": m.t(2, low=0.1, high=0.9, grad=False)}, note="q is a tensor"),
)

# --- distances, normalisations, sampling, pooling -------------------------------------------------

_ROWS = Sample(lambda m: {"x1": m.t(3, 5), "x2": m.t(3, 5)})
_add(TORCH_AND_F, "cosine_similarity pairwise_distance", _ROWS)
_add(TORCH_AND_F, "pdist", Sample(lambda m: {"input": m.t(4, 5)}))
_add(
    TORCH,
    "cdist",
    Sample(lambda m: {"x1": m.t(3, 5), "x2": m.t(4, 5)}),
    Sample(lambda m: {"x1": m.t(3, 5), "x2": m.t(4, 5), "p": 1.0}),
)


def _affine(m: Maker) -> dict[str, object]:
    return {"weight": m.t(4, low=0.5, high=1.5), "bias": m.t(4)}


_add(TORCH_AND_F, "group_norm", Sample(lambda m: {"input": m.t(2, 4, 5), "num_groups": 2, **_affine(m)}))
_add(
    TORCH_AND_F,
    "layer_norm",
    Sample(lambda m: {"input": m.t(2, 5, 4), "normalized_shape": (4,), **_affine(m)}),
    Sample(lambda m: {"input": m.t(2, 5, 4), "normalized_shape": (4,)}, note="no parameters"),
)
_add(
    TORCH_AND_F,
    "rms_norm",
    Sample(lambda m: {"input": m.t(2, 5, 4), "normalized_shape": (4,), "weight": m.t(4, low=0.5, high=1.5)}),
)
_add(
    TORCH,
    "native_group_norm",
    Sample(lambda m: {"input": m.t(2, 4, 5), **_affine(m), "N": 2, "C": 4, "HxW": 5, "group": 2, "eps": 1e-5}),
)
_add(
    TORCH,
    "native_layer_norm",
    Sample(lambda m: {"input": m.t(2, 5, 4), "normalized_shape": (4,), **_affine(m), "eps": 1e-5}),
)
_add(F, "local_response_norm", Sample(lambda m: {"input": m.t(2, 4, 5, 5), "size": 3}))
_WINDOWS = {"norm_type": 2.0, "kernel_size": 2}
_add(F, "lp_pool1d", Sample(lambda m: {"input": m.t(1, 2, 8, low=0.2), **_WINDOWS}))
_add(F, "lp_pool2d", Sample(lambda m: {"input": m.t(1, 2, 4, 4, low=0.2), **_WINDOWS}))
_add(F, "lp_pool3d", Sample(lambda m: {"input": m.t(1, 2, 4, 4, 4, low=0.2), **_WINDOWS}))
_add(F, "normalize", Sample(lambda m: {"input": m.t(3, 5)}), Sample(lambda m: {"input": m.t(3, 5), "p": 1.0, "dim": 0}))
_add(F, "upsample_bilinear", Sample(lambda m: {"input": m.t(1, 2, 4, 4), "size": None, "scale_factor": 2}))
_add(
    F,
    "upsample",
    Sample(lambda m: {"input": m.t(1, 2, 4, 4), "size": None, "scale_factor": 2, "mode": "bilinear"}),
    Sample(lambda m: {"input": m.t(1, 2, 4, 4), "size": (8, 8)}, applies=False, note="nearest"),
)
_add(
    F,
    "interpolate",
    *(
        Sample(
            lambda m, spatial=spatial, mode=mode: {
                "input": m.t(1, 2, *(4,) * spatial),
                "size": None,
                "scale_factor": 2.0,
                "mode": mode,
            },
            note=mode,
        )
        for mode, spatial in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3), ("area", 2))
    ),
    Sample(
        lambda m: {"input": m.t(1, 2, 4, 4), "scale_factor": 2.0, "mode": "bilinear", "antialias": True},
        positional=False,
        note="antialiased",
    ),
    Sample(lambda m: {"input": m.t(1, 2, 4, 4), "size": (8, 8)}, applies=False, note="nearest"),
)
_THETA = Sample(lambda m: {"theta": m.t(1, 2, 3), "size": [1, 2, 4, 4], "align_corners": False})
_add(F, "affine_grid", _THETA)
_add(TORCH, "affine_grid_generator", _THETA)
_add(
    F,
    "grid_sample",
    Sample(
        lambda m: {
            "input": m.t(1, 2, 5, 5),
            "grid": m.t(1, 3, 3, 2),
            "mode": "bilinear",
            "padding_mode": "zeros",
            "align_corners": False,
        }
    ),
)


def _sampler(spatial: int) -> Sample:
    return Sample(
        lambda m: {
            "input": m.t(1, 2, *(5,) * spatial),
            "grid": m.t(1, *(3,) * spatial, spatial),
            "interpolation_mode": 0,
            "padding_mode": 0,
            "align_corners": False,
        }
    )


_add(TORCH, "grid_sampler", _sampler(2), _sampler(3))
_add(TORCH, "grid_sampler_2d", _sampler(2))
_add(TORCH, "grid_sampler_3d", _sampler(3))
_add(F, "avg_pool3d", Sample(lambda m: {"input": m.t(1, 2, 4, 4, 4), "kernel_size": 2}))
_add(F, "adaptive_avg_pool3d", Sample(lambda m: {"input": m.t(1, 2, 5, 5, 5), "output_size": 2}))
_BAG = Sample(
    lambda m: {
        "input": m.ints(3, 2, high=5),
        "weight": m.t(5, 4),
        "per_sample_weights": m.t(3, 2),
        "mode": "sum",
    },
    keyword_only=frozenset({"per_sample_weights", "mode"}),
)
_add(F, "embedding_bag", _BAG)
_add(
    TORCH,
    "embedding_bag",
    Sample(
        lambda m: {
            "weight": m.t(5, 4),
            "indices": m.ints(6, high=5),
            "offsets": torch.tensor([0, 2, 4]),
            "scale_grad_by_freq": False,
            "mode": 0,
            "sparse": False,
            "per_sample_weights": m.t(6),
        }
    ),
)

# --- losses ---------------------------------------------------------------------------------------

_LOGITS = Sample(lambda m: {"input": m.t(3, 4), "target": m.t(3, 4, low=0.0, grad=False)})
_add(
    TORCH_AND_F,
    "binary_cross_entropy_with_logits",
    _LOGITS,
    Sample(
        lambda m: {
            "input": m.t(3, 4),
            "target": m.t(3, 4, low=0.0, grad=False),
            "weight": None,
            "pos_weight": m.t(4, low=0.5, high=2.0, grad=False),
        },
        keyword_only=frozenset({"pos_weight"}),
    ),
)
_add(
    F,
    "binary_cross_entropy",
    Sample(lambda m: {"input": m.t(3, 4, low=0.1, high=0.9), "target": m.t(3, 4, low=0.0, grad=False)}),
)
_add(
    TORCH_AND_F,
    "cosine_embedding_loss",
    Sample(lambda m: {"input1": m.t(3, 4), "input2": m.t(3, 4), "target": m.signs(3)}),
)
_add(
    F,
    "cross_entropy",
    Sample(lambda m: {"input": m.t(5, 4), "target": m.ints(5, high=4)}),
    Sample(
        lambda m: {"input": m.t(5, 4), "target": m.ints(5, high=4), "weight": m.t(4, low=0.5, high=2.0, grad=False)},
        note="class weights",
    ),
    Sample(
        lambda m: {"input": m.t(5, 4), "target": m.leaf(torch.softmax(m.values(5, 4), -1), grad=False)},
        note="probabilities as targets",
    ),
)
_add(
    TORCH_AND_F,
    "ctc_loss",
    Sample(
        lambda m: {
            "log_probs": m.leaf(torch.log_softmax(m.values(6, 2, 5), -1)),
            "targets": m.ints(2, 3, low=1, high=5),
            "input_lengths": torch.tensor([6, 6]),
            "target_lengths": torch.tensor([3, 2]),
        }
    ),
)
_add(
    F,
    "gaussian_nll_loss",
    Sample(lambda m: {"input": m.t(3, 4), "target": m.t(3, 4), "var": m.t(3, 4, low=0.5, high=2.0)}, tolerance=2),
)
_SIGNED = Sample(lambda m: {"input": m.t(3, 4), "target": m.signs(3, 4)})
_add(TORCH_AND_F, "hinge_embedding_loss", _SIGNED)
_add(F, "soft_margin_loss", _SIGNED)
_PAIR = Sample(lambda m: {"input": m.t(3, 4), "target": m.t(3, 4)})
_add(F, "huber_loss l1_loss mse_loss smooth_l1_loss", _PAIR)
_add(
    TORCH_AND_F,
    "kl_div",
    Sample(
        lambda m: {
            "input": m.leaf(torch.log_softmax(m.values(3, 4), -1)),
            "target": m.leaf(torch.softmax(m.values(3, 4), -1), grad=False),
        }
    ),
)
_add(
    TORCH_AND_F,
    "margin_ranking_loss",
    Sample(lambda m: {"input1": m.t(6), "input2": m.t(6), "target": m.signs(6)}),
)
_add(F, "multi_margin_loss nll_loss", Sample(lambda m: {"input": m.t(5, 4), "target": m.ints(5, high=4)}))
_add(
    F,
    "multilabel_margin_loss",
    Sample(lambda m: {"input": m.t(2, 4), "target": torch.tensor([[0, 2, -1, -1], [3, -1, -1, -1]])}),
)
_add(F, "multilabel_soft_margin_loss", Sample(lambda m: {"input": m.t(3, 4), "target": m.bools(3, 4).long()}))
_add(
    F,
    "poisson_nll_loss",
    Sample(lambda m: {"input": m.t(3, 4), "target": m.t(3, 4, low=0.0, high=3.0, grad=False)}),
)
_add(
    TORCH,
    "poisson_nll_loss",
    Sample(
        lambda m: {
            "input": m.t(3, 4),
            "target": m.t(3, 4, low=0.0, high=3.0, grad=False),
            "log_input": True,
            "full": False,
            "eps": 1e-8,
            "reduction": 1,
        }
    ),
)
_TRIPLET = Sample(lambda m: {"anchor": m.t(3, 5), "positive": m.t(3, 5), "negative": m.t(3, 5)})
_add(TORCH_AND_F, "triplet_margin_loss", _TRIPLET)
_add(F, "triplet_margin_with_distance_loss", _TRIPLET)
_add(
    F,
    "linear_cross_entropy",
    Sample(
        lambda m: {"input": m.t(5, 8), "linear_weight": m.t(4, 8), "target": m.ints(5, high=4)},
        tolerance=2,
        note="its linear layer is whitelisted",
    ),
)

# --- linear algebra -------------------------------------------------------------------------------

_MATRIX = Sample(lambda m: {"input": m.square(3)})
_A = Sample(lambda m: {"A": m.square(3)})
_SPD = Sample(lambda m: {"input": m.spd(3)})
_add(BOTH, "cholesky cholesky_inverse", _SPD)
_add(BOTH, "cholesky_solve", Sample(lambda m: {"input": m.t(3, 2), "input2": m.spd(3)}))
_add(BOTH, "det inverse logdet slogdet pinverse qr svd matrix_exp", _MATRIX)
_add(BOTH, "geqrf", Sample(lambda m: {"input": m.square(3)}, grad=False))
_add(BOTH, "lu", _A)
_REFLECTORS = Sample(lambda m: {"input": m.t(4, 3), "input2": m.t(3)})
_add(BOTH, "orgqr", _REFLECTORS)
_add(BOTH, "ormqr", Sample(lambda m: {"input": m.t(4, 3), "input2": m.t(3), "input3": m.t(4, 2)}))
_add(BOTH, "triangular_solve", Sample(lambda m: {"input": m.t(3, 2), "A": m.square(3)}))


def _pivots() -> torch.Tensor:
    return torch.tensor([1, 2, 3], dtype=torch.int32)


_add(
    BOTH, "lu_solve", Sample(lambda m: {"input": m.t(3, 2), "LU_data": m.square(3), "LU_pivots": _pivots()}, grad=False)
)
_add(TORCH, "lu_unpack", Sample(lambda m: {"LU_data": m.square(3), "LU_pivots": _pivots()}))
_add(
    (*BOTH, *LINALG),
    "matrix_power",
    Sample(lambda m: {"input": m.square(3), "n": 3}),
    Sample(lambda m: {"input": m.square(3), "n": -1}, note="an inverse"),
)
_add(LINALG, "cholesky cholesky_ex matrix_sqrth", _SPD)
_add(LINALG, "det slogdet inv inv_ex lu lu_factor lu_factor_ex qr svd svdvals", _A)
_add(LINALG, "cond eigvals pinv matrix_exp", _MATRIX)
_add(LINALG, "polar", Sample(lambda m: {"A": m.square(3)}))
_add(LINALG, "eig", Sample(lambda m: {"input": m.square(3)}, grad=False, note="eigenvectors have no fixed phase"))
_add(LINALG, "matrix_rank", Sample(lambda m: {"input": m.square(3)}, grad=False))
_add(LINALG, "eigh eigvalsh", Sample(lambda m: {"input": m.spd(3)}, tolerance=8, note="steep backward"))
_add(LINALG, "ldl_factor ldl_factor_ex", Sample(lambda m: {"input": m.spd(3)}, grad=False))
_add(LINALG, "ldl_solve", Sample(lambda m: {"LD": m.spd(3), "pivots": _pivots(), "B": m.t(3, 2)}, grad=False))
_add(LINALG, "lu_solve", Sample(lambda m: {"LU": m.square(3), "pivots": _pivots(), "B": m.t(3, 2)}))
_add(LINALG, "householder_product", Sample(lambda m: {"input": m.t(4, 3), "tau": m.t(3)}))
_add(LINALG, "lstsq", Sample(lambda m: {"input": m.t(4, 3), "b": m.t(4, 2)}))
_add(LINALG, "solve solve_ex", Sample(lambda m: {"A": m.square(3), "B": m.t(3, 2)}))
_add(
    LINALG,
    "solve_triangular",
    Sample(lambda m: {"input": m.square(3), "B": m.t(3, 2), "upper": True}, keyword_only=frozenset({"upper"})),
)
_add(LINALG, "tensorinv", Sample(lambda m: {"input": m.leaf(m.invertible(4).reshape(2, 2, 4)), "ind": 2}))
_add(LINALG, "tensorsolve", Sample(lambda m: {"input": m.square(3), "other": m.t(3)}))
_add(LINALG, "vander", Sample(lambda m: {"x": m.t(4)}))

# --- spectra and complex numbers ------------------------------------------------------------------

_add(FFT, "fft hfft ifft ihfft irfft rfft", Sample(lambda m: {"input": m.t(3, 8)}))
_add(
    FFT,
    "fft2 fftn hfft2 hfftn ifft2 ifftn ihfft2 ihfftn irfft2 irfftn rfft2 rfftn",
    Sample(lambda m: {"input": m.t(4, 8)}),
)
_add(
    BOTH,
    "stft",
    Sample(
        lambda m: {
            "input": m.t(64),
            "n_fft": 16,
            "hop_length": 4,
            "win_length": 16,
            "window": m.t(16, low=0.5, grad=False),
            "return_complex": True,
        },
        keyword_only=frozenset({"return_complex"}),
    ),
)


def _spectrum(m: Maker) -> torch.Tensor:
    window = torch.ones(16)
    return torch.stft(m.values(64), 16, 4, 16, window, return_complex=True)


_add(
    BOTH,
    "istft",
    Sample(
        lambda m: {
            "input": _spectrum(m),
            "n_fft": 16,
            "hop_length": 4,
            "win_length": 16,
            "window": m.t(16, low=0.5, grad=False),
        },
        grad=False,
        note="the spectrum is complex and stays so; the window is cast",
    ),
)
_add(TORCH, "complex", Sample(lambda m: {"real": m.t(3), "imag": m.t(3)}))
_add(TORCH, "polar", Sample(lambda m: {"abs": m.t(3, low=0.5), "angle": m.t(3)}))
_add(TORCH, "view_as_complex", Sample(lambda m: {"input": m.t(3, 2)}))
_add(BOTH, "angle", _unary())

# --- special functions, histograms, random draws --------------------------------------------------

_add(BOTH, "histc", Sample(lambda m: {"input": m.t(8), "bins": 4, "min": -1, "max": 1}, grad=False))
_add(
    BOTH,
    "histogram",
    Sample(lambda m: {"input": m.t(8), "bins": 4, "range": (-1.0, 1.0)}, keyword_only=frozenset({"range"}), grad=False),
)
_add(
    TORCH,
    "histogramdd",
    Sample(
        lambda m: {"input": m.t(8, 2), "bins": [3, 3], "range": [-1.0, 1.0, -1.0, 1.0]},
        keyword_only=frozenset({"range"}),
        grad=False,
    ),
)
_INCOMPLETE = Sample(
    lambda m: {"input": m.t(3, 4, low=0.5, high=2.0, grad=False), "other": m.t(3, 4, low=0.5, high=2.0)},
    note="no gradient of the first argument",
)
_add(BOTH, "igamma igammac", _INCOMPLETE)
_add(SPECIAL, "gammainc gammaincc", _INCOMPLETE)
_add_in_place(METHOD, "igamma igammac")
_add(
    TORCH,
    "binomial",
    Sample(
        lambda m: {"count": m.leaf(torch.full((4,), 5.0), grad=False), "prob": m.t(4, low=0.1, high=0.9)},
        random=True,
        grad=False,
    ),
)
_add(TORCH, "_standard_gamma", _unary(0.5, 2.0, random=True))
_add(TORCH, "_sample_dirichlet", _unary(0.5, 2.0, random=True, grad=False))
_add(
    SPECIAL,
    "bessel_j0 bessel_j1 bessel_y0 bessel_y1 "
    "modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1",
    _unary(0.5, 2.0, grad=False),
)
_add(
    SPECIAL,
    "airy_ai scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0",
    Sample(lambda m: {"x": m.t(3, 4, low=0.5, high=2.0)}, grad=False),
)
_add(SPECIAL, "erfcx i1 i1e log_ndtr", _unary())
_add(SPECIAL, "ndtri", _unary(0.1, 0.9))
_add(SPECIAL, "zeta", _binary(1.5, 3.0, grad=False))
_add(
    SPECIAL,
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h "
    "hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t "
    "shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w",
    Sample(lambda m: {"x": m.t(3, 4, low=0.1, high=0.9), "n": 3}, grad=False, tolerance=3),
)

# --- promoted -------------------------------------------------------------------------------------

_add(BOTH, "cross", Sample(lambda m: {"input": m.t(4, 3), "other": m.t(4, 3), "dim": -1}))
_add(
    LINALG,
    "cross",
    Sample(lambda m: {"input": m.t(4, 3), "other": m.t(4, 3), "dim": -1}, keyword_only=frozenset({"dim"})),
)
_add(BOTH, "dot", Sample(lambda m: {"input": m.t(5), "tensor": m.t(5)}))
_add(BOTH, "vdot", Sample(lambda m: {"input": m.t(5), "other": m.t(5)}))
_add(
    TORCH_AND_F,
    "bilinear",
    Sample(lambda m: {"input1": m.t(2, 3), "input2": m.t(2, 4), "weight": m.t(5, 3, 4), "bias": m.t(5)}),
)
_add(BOTH, "allclose isclose", _binary(grad=False))
_HEAVISIDE = Sample(lambda m: {"input": m.t(3, 4), "values": m.t(3, 4)}, grad=False)
_add(BOTH, "heaviside", _HEAVISIDE)
_add(METHOD, "heaviside_", _HEAVISIDE)
_add(
    BOTH,
    "lerp",
    Sample(lambda m: {"input": m.t(3, 4), "end": m.t(3, 4), "weight": m.t(3, 4, low=0.0)}),
    Sample(lambda m: {"input": m.t(3, 4), "end": m.t(3, 4), "weight": 0.25}, note="a number as weight"),
)
_add(METHOD, "lerp_", replace(SAMPLES["torch.lerp"][1], grad=False, note="in place"))
_add(SPARSE, "mm", Sample(lambda m: {"sparse": m.t(3, 4).to_sparse(), "dense": m.t(4, 3)}))
_add(SPARSE, "addmm", Sample(lambda m: {"input": m.t(3, 3), "mat1": m.t(3, 4).to_sparse(), "mat2": m.t(4, 3)}))


def _at_places(**options: object) -> Sample:
    index = torch.tensor([0, 2])
    return Sample(lambda m: {"input": m.t(4, 3), "dim": 0, "index": index, "source": m.t(2, 3), **options})


def _scattered(**options: object) -> Sample:
    index = torch.tensor([[0, 2, 1], [3, 0, 0]])
    return Sample(lambda m: {"input": m.t(4, 3), "dim": 0, "index": index, "src": m.t(2, 3), **options})


_add(BOTH, "index_add index_copy", _at_places())
_add(BOTH, "index_reduce", _at_places(reduce="amax"))
_add(BOTH, "index_put", Sample(lambda m: {"input": m.t(4), "indices": (torch.tensor([0, 2]),), "values": m.t(2)}))
_add(BOTH, "put", Sample(lambda m: {"input": m.t(4, 3), "index": torch.tensor([0, 5]), "source": m.t(2)}))
_add(BOTH, "scatter scatter_add", _scattered())
_add(BOTH, "scatter_reduce", _scattered(reduce="amax"))
_add(BOTH, "masked_scatter", Sample(lambda m: {"input": m.t(3, 4), "mask": torch.eye(3, 4) > 0, "source": m.t(3)}))
_add_in_place(METHOD, "index_add index_copy index_reduce put scatter scatter_add scatter_reduce masked_scatter")
_add_in_place(BOTH, "index_put")
_add(TORCH, "cartesian_prod", Sample(lambda m: {"a": m.t(2), "b": m.t(3)}, keywords=False, note="variadic"))
_add(
    TORCH,
    "meshgrid",
    Sample(
        lambda m: {"a": m.t(2), "b": m.t(3), "indexing": "ij"},
        keywords=False,
        keyword_only=frozenset({"indexing"}),
        note="variadic",
    ),
    Sample(
        lambda m: {"tensors": [m.t(2), m.t(3)], "indexing": "ij"},
        keywords=False,
        keyword_only=frozenset({"indexing"}),
        note="a list",
    ),
)
