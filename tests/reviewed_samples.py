"""One call, or more, of the functions that `lists/reviewed.yaml` keeps out of the cast lists.

A call is found by the path of a function, or else by its plain name: one sample serves ``torch.add``, the methods
``add`` and ``add_``, and ``+``. Like `samples`, whose `Maker` decides the dtypes, this module knows torch and nothing
of ampatch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from samples import Maker


class Call:
    """The arguments of one call."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args
        self.kwargs = kwargs


Build = Callable[[Maker], Call]

CALLS: dict[str, tuple[Build, ...]] = {}


def _add(names: str, *builds: Build) -> None:
    for name in names.split():
        if name in CALLS:
            raise ValueError(f"two rows for {name}")
        CALLS[name] = builds


def _unary(low: float = -1.0, high: float = 1.0) -> Build:
    return lambda m: Call(m.t(3, 4, low=low, high=high))


def _binary(low: float = -1.0, high: float = 1.0) -> Build:
    return lambda m: Call(m.t(3, 4, low=low, high=high), m.t(3, 4, low=low, high=high))


def _sparse(m: Maker) -> torch.Tensor:
    """A sparse tensor with two entries."""
    return torch.sparse_coo_tensor([[0, 1], [1, 2]], m.t(2), (3, 4), check_invariants=False).coalesce()


def _sparse_square(m: Maker) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0, 1], [1, 2]], m.t(2), (3, 3), check_invariants=False).coalesce()


def _compressed(m: Maker, layout: torch.layout = torch.sparse_csr) -> torch.Tensor:
    """A sparse tensor in compressed rows, or in compressed columns."""
    make = torch.sparse_csr_tensor if layout is torch.sparse_csr else torch.sparse_csc_tensor
    return make(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), m.t(2), (2, 2), check_invariants=False)


def _grid(m: Maker, *shape: int) -> torch.Tensor:
    """Distinct values that both half types hold exactly."""
    count = torch.Size(shape).numel()
    return m.leaf((torch.randperm(count, generator=torch.Generator().manual_seed(3)).float() - count / 2).view(shape))


# Of two operands.
_add("add sub subtract rsub", _binary(), lambda m: Call(m.t(3, 4), m.t(3, 4), alpha=2))
_add("mul multiply maximum minimum fmax fmin copysign hypot nextafter", _binary())
_add("div divide true_divide", _binary(0.5, 2.0))
_add("torch.Tensor.__truediv__ torch.Tensor.__itruediv__ torch.Tensor.__div__ torch.Tensor.__idiv__", _binary(0.5, 2.0))
_add("torch.Tensor.__rtruediv__ torch.Tensor.__rdiv__", _binary(0.5, 2.0))
_add("floor_divide fmod remainder", _binary(0.5, 2.0))
_add("torch.Tensor.__add__ torch.Tensor.__iadd__ torch.Tensor.__radd__", _binary())
_add("torch.Tensor.__sub__ torch.Tensor.__isub__ torch.Tensor.__rsub__", _binary())
_add("atan2 arctan2 ldexp float_power", _binary(0.5, 2.0))
_add("addcdiv addcmul", lambda m: Call(m.t(3, 4), m.t(3, 4), m.t(3, 4, low=0.5, high=2.0), value=0.5))
_add("outer ger kron", lambda m: Call(m.t(3), m.t(4)))
_add("where", lambda m: Call(m.bools(3, 4), m.t(3, 4), m.t(3, 4)))
_add("torch.Tensor.where", lambda m: Call(m.t(3, 4), m.bools(3, 4), m.t(3, 4)))
_add("cat concat concatenate stack hstack vstack dstack row_stack column_stack", lambda m: Call((m.t(3, 4), m.t(3, 4))))
_add("block_diag", lambda m: Call(m.t(2, 2), m.t(2, 2)))
_add("gradient", lambda m: Call(m.t(5)), lambda m: Call(m.t(5), spacing=(m.leaf(torch.arange(5.0)),)))
_add(
    "clamp clip",
    lambda m: Call(m.t(3, 4), m.t(3, 4, low=-1.0, high=-0.5), m.t(3, 4, low=0.5, high=1.0)),
    lambda m: Call(m.t(3, 4), -0.5, 0.5),
)
_add("clamp_min clamp_max", _binary(), lambda m: Call(m.t(3, 4), 0.5))
_add("diff", lambda m: Call(m.t(3, 4), prepend=m.t(3, 1)), lambda m: Call(m.t(3, 4)))

# Comparisons, positions and counts.
_COMPARISONS = "eq ne ge gt le lt greater greater_equal less less_equal not_equal"
_add(_COMPARISONS, _binary(), lambda m: Call(m.t(3, 4), 0.5))
_add("equal isin logical_and logical_or logical_xor", _binary())
_add("isfinite isinf isnan isneginf isposinf isreal signbit logical_not all any", _unary())
_add("argmax argmin argsort argwhere nonzero count_nonzero", lambda m: Call(_grid(m, 3, 4)))
_add("nonzero_static", lambda m: Call(_grid(m, 3, 4), size=12))
_add("searchsorted", lambda m: Call(m.leaf(torch.arange(5.0)), m.t(3, low=0.0, high=4.0)))
_add("bucketize", lambda m: Call(m.t(3, low=0.0, high=4.0), m.leaf(torch.arange(5.0))))
_add("is_nonzero torch.Tensor.__bool__ torch.Tensor.__nonzero__", lambda m: Call(m.t(1)))
_add("torch.Tensor.__contains__", lambda m: Call(m.t(3, 4), m.t(1)))

# Exact: values are selected, copied or change their sign.
_EXACT = "abs absolute neg negative positive sgn sign ceil floor fix trunc round frac relu nan_to_num conj_physical"
_add(_EXACT, _unary(-3.0, 3.0))
_add("torch.Tensor.__pos__ alias_copy clone detach_copy torch.Tensor.contiguous", _unary())
_add(
    "amax amin aminmax max min median nanmedian", lambda m: Call(_grid(m, 3, 4)), lambda m: Call(_grid(m, 3, 4), dim=1)
)
_add("torch.median torch.nanmedian", lambda m: Call(_grid(m, 3, 4)), lambda m: Call(_grid(m, 3, 4), dim=1))
_add("cummax cummin mode", lambda m: Call(_grid(m, 3, 4), 1))
_add("kthvalue topk", lambda m: Call(_grid(m, 3, 4), 2))
_add("sort msort unique unique_consecutive", lambda m: Call(_grid(m, 3, 4)))
_add("gather", lambda m: Call(m.t(3, 4), 1, m.ints(3, 4)))
_add("take_along_dim", lambda m: Call(m.t(3, 4), m.ints(3, 4), 1))
_add("take", lambda m: Call(m.t(3, 4), m.ints(3, high=12)))
_add("index_select", lambda m: Call(m.t(3, 4), 1, m.ints(3)))
_add("torch.Tensor.__getitem__", lambda m: Call(m.t(3, 4), m.ints(3)), lambda m: Call(m.t(3, 4), slice(1)))
_add("masked_select", lambda m: Call(m.t(3, 4), m.bools(3, 4)))
_add("flip", lambda m: Call(m.t(3, 4), (1,)))
_add("fliplr flipud rot90 tril triu diag_embed diagflat", _unary())
_add("diag", lambda m: Call(m.t(3)))
_add("roll", lambda m: Call(m.t(3, 4), 1))
_add("fftshift ifftshift", _unary())
_add("repeat_interleave", lambda m: Call(m.t(3, 4), 2))
_add("torch.Tensor.repeat tile", lambda m: Call(m.t(3, 4), (2, 1)))
_add("combinations", lambda m: Call(m.t(4)))
_add("narrow_copy", lambda m: Call(m.t(3, 4), 1, 0, 2))
_add("as_strided_copy", lambda m: Call(m.t(3, 4), (2, 2), (1, 2)))
_add("diagonal_copy t_copy squeeze_copy unbind_copy", _unary())
_add("expand_copy", lambda m: Call(m.t(3, 1), (3, 4)))
_add("permute_copy", lambda m: Call(m.t(3, 4), (1, 0)))
_add("select_copy", lambda m: Call(m.t(3, 4), 1, 0))
_add("slice_copy", lambda m: Call(m.t(3, 4), 1, 0, 2))
_add("split_copy", lambda m: Call(m.t(3, 4), 2, 1))
_add("split_with_sizes_copy", lambda m: Call(m.t(3, 4), (1, 3), 1))
_add("transpose_copy", lambda m: Call(m.t(3, 4), 0, 1))
_add("unfold_copy", lambda m: Call(m.t(3, 4), 1, 2, 2))
_add("unsqueeze_copy", lambda m: Call(m.t(3, 4), 0))
_add("view_copy", lambda m: Call(m.t(3, 4), (4, 3)))
_add("constant_pad_nd", lambda m: Call(m.t(3, 4), (1, 1), 0.5))
_add("channel_shuffle native_channel_shuffle", lambda m: Call(m.t(1, 4, 2, 2), 2))
_add("pixel_shuffle", lambda m: Call(m.t(1, 4, 2, 2), 2))
_add("pixel_unshuffle", lambda m: Call(m.t(1, 1, 4, 4), 2))
_add("embedding", lambda m: Call(m.t(5, 3), m.ints(4, high=5)))
_add("torch.nn.functional.embedding", lambda m: Call(m.ints(4, high=5), m.t(5, 3)))
_add("torch.nn.functional.unfold", lambda m: Call(m.t(1, 2, 4, 4), 2))
_add(
    "torch.nn.functional.pad",
    *(
        lambda m, mode=mode: Call(m.t(1, 2, 4, 4), (1, 1, 1, 1), mode)
        for mode in ("constant", "reflect", "replicate", "circular")
    ),
)
_add("index_fill", lambda m: Call(m.t(3, 4), 1, m.ints(2), 0.5))
_add("masked_fill", lambda m: Call(m.t(3, 4), m.bools(3, 4), 0.5))
_add("hardtanh relu6 torch.nn.functional.hardtanh_", _unary(-8.0, 8.0))
_add("threshold", lambda m: Call(m.t(3, 4), 0.5, 0.25))
_add("hardshrink", _unary())
_add("adaptive_max_pool1d adaptive_max_pool1d_with_indices", lambda m: Call(_grid(m, 1, 2, 6), 2))
_add("adaptive_max_pool2d adaptive_max_pool2d_with_indices", lambda m: Call(_grid(m, 1, 2, 6, 6), 2))
_add("adaptive_max_pool3d adaptive_max_pool3d_with_indices", lambda m: Call(_grid(m, 1, 1, 4, 4, 4), 2))
_add("max_pool1d max_pool1d_with_indices", lambda m: Call(_grid(m, 1, 2, 6), 2))
_add("max_pool2d max_pool2d_with_indices", lambda m: Call(_grid(m, 1, 2, 6, 6), 2))
_add("max_pool3d max_pool3d_with_indices", lambda m: Call(_grid(m, 1, 1, 4, 4, 4), 2))


def _fractional(m: Maker, dimensions: int) -> Call:
    values = _grid(m, 1, 1, *[4] * dimensions)
    return Call(values, 2, 2, _random_samples=torch.full((1, 1, dimensions), 0.5, dtype=values.dtype))


_add("fractional_max_pool2d fractional_max_pool2d_with_indices", lambda m: _fractional(m, 2))
_add("fractional_max_pool3d fractional_max_pool3d_with_indices", lambda m: _fractional(m, 3))
_add("max_unpool1d", lambda m: Call(m.t(1, 2, 2), torch.tensor([[[0, 3], [1, 2]]]), 2))
_add("max_unpool2d", lambda m: Call(m.t(1, 1, 1, 2), torch.tensor([[[[0, 3]]]]), 2))
_add("max_unpool3d", lambda m: Call(m.t(1, 1, 1, 1, 2), torch.tensor([[[[[0, 3]]]]]), 2))
_add(
    "torch.Tensor.to_sparse torch.Tensor.to_sparse_coo torch.Tensor.to_sparse_csr torch.Tensor.to_sparse_csc", _unary()
)
_add("torch.Tensor.to_sparse_bsr torch.Tensor.to_sparse_bsc", lambda m: Call(m.t(2, 4), (2, 2)))
_add("torch.Tensor.to_dense torch.Tensor._to_dense torch.Tensor.coalesce", lambda m: Call(_sparse(m)))
_add("torch.Tensor.sparse_mask", lambda m: Call(m.t(3, 4), _sparse(m)))
_add("torch.Tensor._sparse_mask_projection", lambda m: Call(_sparse(m), _sparse(m)))
_add("values_copy", lambda m: Call(_sparse(m)))
_add("torch.Tensor.to_padded_tensor", lambda m: Call(torch.nested.nested_tensor([m.t(2), m.t(3)]), 0.0))
_add("torch.Tensor.__deepcopy__", lambda m: Call(m.t(3, 4, grad=True), {}))
_add("torch.Tensor.__reversed__", _unary())
_add("torch.Tensor.__array_wrap__", lambda m: Call(m.t(3, 4), numpy.ones(3, "float32")))
_add("view_as_real_copy", lambda m: Call(torch.complex(m.values(3), m.values(3))))
_add("view_as_complex_copy", lambda m: Call(m.values(3, 2)))

# Writes of other tensors into a copy of one.
_add("as_strided_scatter", lambda m: Call(m.t(3, 4), m.t(2, 2), (2, 2), (1, 2)))
_add("diagonal_scatter", lambda m: Call(m.t(3, 4), m.t(3)))
_add("select_scatter", lambda m: Call(m.t(3, 4), m.t(3), 1, 0))
_add("slice_scatter", lambda m: Call(m.t(3, 4), m.t(3, 2), 1, 0, 2))
_add("torch.Tensor.copy_", _binary())
_add("torch.Tensor.__setitem__", lambda m: Call(m.t(3, 4), slice(1), m.t(4)))
_add("fill", lambda m: Call(m.t(3, 4), m.leaf(torch.tensor(0.3))))
CALLS["fill_"] = CALLS["fill"]
_add("torch.Tensor.fill_diagonal_", lambda m: Call(m.t(3, 4), 0.5))
_add("zero_", _unary())

# Of one tensor, computed in float32 inside.
_add(
    "cos sin sinc atan arctan asinh arcsinh erf erfc i0 i0e sigmoid expit tanh deg2rad rad2deg ndtr", _unary(-3.0, 3.0)
)
_add("sqrt entr", _unary(0.1, 3.0))
_add("lgamma gammaln digamma psi", _unary(0.5, 4.0))
_add("polygamma", lambda m: Call(1, m.t(3, 4, low=0.5, high=4.0)))
_add("torch.Tensor.polygamma torch.Tensor.polygamma_", lambda m: Call(m.t(3, 4, low=0.5, high=4.0), 1))
_add("mvlgamma multigammaln", lambda m: Call(m.t(3, 4, low=2.0, high=4.0), 2))
_add("frexp", _unary(0.1, 3.0))
_add("celu selu elu gelu silu mish softsign tanhshrink logsigmoid hardswish hardsigmoid", _unary(-3.0, 3.0))
_add("leaky_relu softshrink rrelu", _unary(-3.0, 3.0))
_add("glu", _unary())
# In the last row of each, a sum of the values is beyond float16, and their mean is not.
_add("mean", _unary(0.0, 3.0), lambda m: Call(m.t(64, 32), dim=0), lambda m: Call(m.t(2048, low=100.0, high=200.0)))
_LARGE = {"low": 3e4, "high": 6e4}
_add("avg_pool1d adaptive_avg_pool1d", lambda m: Call(m.t(1, 2, 6), 2), lambda m: Call(m.t(1, 2, 6, **_LARGE), 2))
_add("avg_pool2d adaptive_avg_pool2d", lambda m: Call(m.t(1, 2, 6, 6), 2), lambda m: Call(m.t(1, 2, 6, 6, **_LARGE), 2))

# Several operations in half.
_add("nanmean", _unary(0.0, 3.0), lambda m: Call(m.t(64, 32), dim=0))
_add("fold", lambda m: Call(m.t(1, 8, 9), (4, 4), 2))
_add("segment_reduce", lambda m: Call(m.t(6), "sum", lengths=torch.tensor([2, 4])))
_add("vander", lambda m: Call(m.t(4)))
_add("embedding_renorm_", lambda m: Call(m.t(3, 4), torch.tensor([1]), 0.5, 2.0))
_add("fake_quantize_per_tensor_affine", lambda m: Call(m.t(3, 4), 0.25, 0, 0, 255))
_add(
    "fake_quantize_per_channel_affine",
    lambda m: Call(m.t(3, 4), torch.full((3,), 0.25), torch.zeros(3, dtype=torch.int32), 0, 0, 255),
)
_add("torch.sparse.sum", lambda m: Call(_sparse(m)))

# Computed in float64.
_add("bincount", lambda m: Call(m.ints(8, high=3), m.t(8)))

# Random ones.
_add(
    "dropout dropout2d alpha_dropout feature_dropout feature_alpha_dropout",
    lambda m: Call(m.t(2, 8, 4, 4), 0.5, True),
)
_add("dropout1d", lambda m: Call(m.t(2, 8, 4), 0.5, True))
_add("dropout3d", lambda m: Call(m.t(2, 8, 2, 2, 2), 0.5, True))
_add("native_dropout", lambda m: Call(m.t(2, 8), 0.5, True))
_add("bernoulli", _unary(0.0, 1.0))
_add("poisson", _unary(0.5, 3.0))
_add("multinomial", lambda m: Call(m.t(5, low=0.1, high=1.0), 3))
_add("normal", lambda m: Call(m.t(3, 4), 1.0))
_add("torch.Tensor.normal_ torch.Tensor.uniform_ torch.Tensor.random_ torch.Tensor.exponential_", _unary())
_add("torch.Tensor.cauchy_ torch.Tensor.log_normal_", _unary())
_add("torch.Tensor.geometric_", lambda m: Call(m.t(3, 4), 0.5))
_add("rand_like randn_like empty_like ones_like zeros_like", _unary())
_add("randint_like full_like", lambda m: Call(m.t(3, 4), 2))
_add(
    "torch.Tensor.new_empty torch.Tensor.new_ones torch.Tensor.new_zeros torch.Tensor.new",
    lambda m: Call(m.t(3, 4), (2,)),
)
_add("torch.Tensor.new_full", lambda m: Call(m.t(3, 4), (2,), 0.5))
_add("torch.Tensor.new_empty_strided", lambda m: Call(m.t(3, 4), (2,), (1,)))
_add("torch.Tensor.new_tensor", lambda m: Call(m.t(3, 4), [0.5]))

# Factories.
_add("arange eye ones zeros empty rand randn randperm", lambda m: Call(4))
_add("bartlett_window blackman_window hamming_window hann_window kaiser_window fftfreq rfftfreq", lambda m: Call(4))
_add("linspace logspace", lambda m: Call(0, 1, 3))
_add("range", lambda m: Call(0, 3))
_add("full", lambda m: Call((2,), 0.5))
_add("randint", lambda m: Call(4, (2,)))
_add("tril_indices triu_indices", lambda m: Call(2, 2))
_add("as_tensor asarray tensor", lambda m: Call([0.5]))
_add("scalar_tensor", lambda m: Call(0.5))
_add("empty_permuted", lambda m: Call((2, 2), (1, 0)))
_add("empty_strided", lambda m: Call((2,), (1,)))
_add("from_numpy", lambda m: Call(numpy.ones(3, "float32")))
_add("from_dlpack", lambda m: Call(numpy.ones(3, "float32")))
_add("frombuffer", lambda m: Call(bytearray(8), dtype=torch.float32))
_add("sparse_coo_tensor", lambda m: Call([[0, 1]], [0.5, 0.5], (2,), check_invariants=False))
_add(
    "sparse_csr_tensor sparse_csc_tensor",
    lambda m: Call([0, 1, 2], [0, 1], [0.5, 0.5], (2, 2), check_invariants=False),
)
_add(
    "sparse_bsr_tensor sparse_bsc_tensor",
    lambda m: Call([0, 1], [0], [[[0.5]]], (1, 1), check_invariants=False),
)
_add(
    "sparse_compressed_tensor",
    lambda m: Call([0, 1], [0], [0.5], (1, 1), layout=torch.sparse_csr, check_invariants=False),
)


def _normalised(m: Maker, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and bias of a normalisation of three channels."""
    return m.t(*shape), m.leaf(torch.full((3,), 1.5)), m.leaf(torch.full((3,), 0.5))


def _inner_norm(m: Maker, *shape: int) -> Call:
    values, weight, bias = _normalised(m, *shape)
    return Call(values, weight, bias, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5, False)


def _outer_norm(m: Maker, *shape: int) -> Call:
    values, weight, bias = _normalised(m, *shape)
    return Call(values, torch.zeros(3), torch.ones(3), weight, bias, True)


_add("batch_norm", lambda m: _inner_norm(m, 16, 3))
_add("instance_norm", lambda m: _inner_norm(m, 2, 3, 16))
_add("native_batch_norm", lambda m: Call(*_inner_norm(m, 16, 3).args[:-1]))
_add("torch.nn.functional.batch_norm", lambda m: _outer_norm(m, 16, 3))
_add("torch.nn.functional.instance_norm", lambda m: _outer_norm(m, 2, 3, 16))

# Types and layouts by name.
_add("torch.Tensor.to torch.Tensor.type", lambda m: Call(m.t(3, 4), torch.float64))
_add("torch.Tensor.type_as", lambda m: Call(m.t(3, 4), m.values(2).double()))
_TYPES = "bfloat16 bool byte cdouble cfloat chalf char double float half int long short"
for _name in [*_TYPES.split(), "cpu", "to_mkldnn"]:
    _add(f"torch.Tensor.{_name}", _unary())
_add("torch.Tensor._autocast_to_full_precision", lambda m: Call(m.t(3, 4), True, True))
_add("torch.Tensor._autocast_to_reduced_precision", lambda m: Call(m.t(3, 4), True, True, torch.half, torch.bfloat16))

# Refused.
_add("hsmm hspmm smm", lambda m: Call(_sparse(m), m.t(4, 3)))
_add("saddmm sspaddmm", lambda m: Call(_sparse_square(m), _sparse_square(m), m.t(3, 3)))
_add("lobpcg", lambda m: Call(m.leaf(torch.eye(9)), 1))
_add("pca_lowrank svd_lowrank", lambda m: Call(m.leaf(torch.eye(9)), 2))
_add("native_norm", _unary())
_add("torch.Tensor.float_power_", lambda m: Call(m.t(3, 4, low=0.5), 2))
_add("torch.sparse.log_softmax torch.sparse.softmax", lambda m: Call(_sparse(m), 1))
_add("torch.sparse.sampled_addmm", lambda m: Call(_compressed(m), m.t(2, 2), m.t(2, 2)))
_add("torch.sparse.spsolve", lambda m: Call(_compressed(m), m.t(2)))
_add("torch.sparse.spdiags", lambda m: Call(m.t(3, 3), torch.arange(3), (3, 3)))
_add("upsample_nearest", lambda m: Call(m.t(1, 1, 2, 2), scale_factor=2))
_add("_threshold", lambda m: Call(m.t(3, 4), 0.5, 0.25))

_add("lstsq solve torch.Tensor.reinforce", lambda m: Call(m.t(2, 2), m.t(2, 2)))

# Python's functions on numbers.
_add("torch.Tensor.apply_", lambda m: Call(m.t(2), abs))
_add("torch.Tensor.map_", lambda m: Call(m.t(2), m.t(2), max))
_add("torch.Tensor.map2_", lambda m: Call(m.t(2), m.t(2), m.t(2), max))

# Views.
_add("adjoint t squeeze ravel flatten conj resolve_conj resolve_neg detach diagonal unbind", _unary())
_add("torch.linalg.diagonal atleast_1d atleast_2d atleast_3d real", _unary())
_add("torch.Tensor.as_strided_ as_strided torch.as_strided_", lambda m: Call(m.t(3, 4), (2, 2), (1, 2)))
_add("broadcast_to torch.Tensor.expand", lambda m: Call(m.t(3, 1), (3, 4)))
_add("torch.Tensor.expand_as", lambda m: Call(m.t(3, 1), m.t(3, 4)))
_add("torch.Tensor.view_as reshape_as torch.Tensor.reshape_as", lambda m: Call(m.t(3, 4), m.t(4, 3)))
_add("broadcast_tensors", lambda m: Call(m.t(3, 1), m.t(1, 4)))
_add("chunk tensor_split unsafe_chunk", lambda m: Call(m.t(4, 4), 2))
_add("hsplit vsplit split unsafe_split", lambda m: Call(m.t(4, 4), 2))
_add("dsplit", lambda m: Call(m.t(2, 2, 4), 2))
_add("split_with_sizes unsafe_split_with_sizes", lambda m: Call(m.t(4, 4), (1, 3)))
_add("moveaxis movedim swapaxes swapdims transpose", lambda m: Call(m.t(3, 4), 0, 1))
_add("narrow", lambda m: Call(m.t(3, 4), 1, 0, 2))
_add("permute", lambda m: Call(m.t(3, 4), (1, 0)))
_add("reshape torch.Tensor.view", lambda m: Call(m.t(3, 4), (4, 3)))
_add("select", lambda m: Call(m.t(3, 4), 1, 0))
_add("unsqueeze", lambda m: Call(m.t(3, 4), 0))
_add("torch.Tensor.unfold", lambda m: Call(m.t(3, 4), 1, 2, 2))
_add("unflatten", lambda m: Call(m.t(3, 4), 1, (2, 2)))
_add("view_as_real", lambda m: Call(torch.complex(m.values(3), m.values(3))))
_add("imag", lambda m: Call(torch.complex(m.values(3), m.values(3))))
_add("torch.Tensor.as_subclass", lambda m: Call(m.t(3, 4), torch.Tensor))
_add("slice_inverse", lambda m: _slice_inverse(m.t(3, 4)))
_add("torch.Tensor.values torch.Tensor._values", lambda m: Call(_sparse(m)))
# Properties.
_add("torch.Tensor.H torch.Tensor.T torch.Tensor.mH torch.Tensor.mT torch.Tensor.data torch.Tensor.real", _unary())
_add("torch.Tensor.imag", lambda m: Call(torch.complex(m.values(3), m.values(3))))
_add("torch.Tensor._base", lambda m: Call(m.t(3, 4)[0]))


def _slice_inverse(whole: torch.Tensor) -> Call:
    return Call(whole[:, :2], whole, 1, 0, 2)


# Facts.
_add("is_same_size torch.Tensor.is_set_to", _binary())
_add(
    "torch.Tensor.__complex__ torch.Tensor.__float__ torch.Tensor.__int__ torch.Tensor.__long__ torch.Tensor.item",
    lambda m: Call(m.t(1)),
)
_add("torch.Tensor.__index__", lambda m: Call(m.ints(1)[0]))
_add("torch.Tensor.__format__", lambda m: Call(m.t(1), ""))
_add("torch.Tensor.__reduce_ex__", lambda m: Call(m.t(1), 2))
for _name in ["_dimI", "_dimV", "_indices", "_nnz", "dense_dim", "indices", "is_coalesced", "sparse_dim"]:
    _add(f"torch.Tensor.{_name}", lambda m: Call(_sparse(m)))
for _name in ["crow_indices", "col_indices"]:
    _add(f"torch.Tensor.{_name}", lambda m: Call(_compressed(m)))
for _name in ["ccol_indices", "row_indices"]:
    _add(f"torch.Tensor.{_name}", lambda m: Call(_compressed(m, torch.sparse_csc)))
for _name in ["size", "storage_offsets", "strides"]:
    _add(f"torch.Tensor._nested_tensor_{_name}", lambda m: Call(torch.nested.nested_tensor([m.t(2), m.t(3)])))

# Whole numbers.
_INTS = "bitwise_and bitwise_or bitwise_xor gcd lcm"
_add(_INTS, lambda m: Call(m.ints(3, high=9), m.ints(3, high=9)))
_add("bitwise_left_shift bitwise_right_shift", lambda m: Call(m.ints(3, high=9), m.ints(3, high=9)))
for _name in ["and", "or", "xor"]:
    _add(
        f"torch.Tensor.__{_name}__ torch.Tensor.__i{_name}__ torch.Tensor.__r{_name}__",
        lambda m: Call(m.ints(3, high=9), m.ints(3, high=9)),
    )
_add("torch.Tensor.__rlshift__ torch.Tensor.__rrshift__", lambda m: Call(m.ints(3, high=9), m.ints(3, high=9)))
_add("bitwise_not torch.Tensor.__invert__", lambda m: Call(m.ints(3, high=9)))
_add("one_hot", lambda m: Call(m.ints(3, high=9)))
_add("unravel_index", lambda m: Call(m.ints(3, high=9), (3, 4)))
_add(
    "torch.Tensor.__lshift__ torch.Tensor.__rshift__ torch.Tensor.__ilshift__ torch.Tensor.__irshift__",
    lambda m: Call(m.t(3, 4), 2),
)
