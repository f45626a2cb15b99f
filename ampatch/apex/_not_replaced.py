"""Names of Apex that ampatch does not replace, and what to use instead: the text of one error."""

from __future__ import annotations

_EPILOGUE = "plain torch.nn layers under torch.compile, which fuses them"
_SHARDED = "torch.distributed.fsdp, or torch.distributed.optim.ZeroRedundancyOptimizer"

#: Apex's top-level extension modules, and what to use instead.
EXTENSIONS = {
    "bnp": "torch.nn.SyncBatchNorm",
    "fast_multihead_attn": "torch.nn.functional.scaled_dot_product_attention",
    "fused_adam_cuda": "FusedAdam of apex.optimizers",
    "fused_dense_cuda": _EPILOGUE,
    "fused_lamb_cuda": "FusedLAMB of apex.optimizers",
    "mlp_cuda": _EPILOGUE,
    "syncbn": "SyncBatchNorm of apex.parallel",
    "xentropy_cuda": "SoftmaxCrossEntropyLoss of apex.contrib.xentropy",
}

# The longest key that a missing name starts with counts. Python imports a package before its contents, so the parent of
# each key must be a package that exists here.
_INSTEAD = {
    **EXTENSIONS,
    "apex.RNN": "torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN",
    "apex.contrib": "torch itself, in most cases",
    "apex.contrib.bottleneck": _EPILOGUE,
    "apex.contrib.conv_bias_relu": _EPILOGUE,
    "apex.contrib.cudnn_gbn": "torch.nn.SyncBatchNorm",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "torch.nn.BatchNorm2d with inputs in torch.channels_last, or torch.nn.SyncBatchNorm",
    "apex.contrib.index_mul_2d": "indexing and a product under torch.compile",
    "apex.contrib.layer_norm": "torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention, or torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.optimizers": _SHARDED,
    "apex.contrib.optimizers.FusedLAMB": "apex.optimizers.FusedLAMB",
    "apex.contrib.optimizers.fused_lamb": "apex.optimizers.FusedLAMB",
    "apex.contrib.optimizers.FusedSGD": "apex.optimizers.FusedSGD",
    "apex.contrib.optimizers.fused_sgd": "apex.optimizers.FusedSGD",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured and torch.ao.pruning.WeightNormSparsifier",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.fused_dense": _EPILOGUE,
    "apex.mlp": _EPILOGUE,
    "apex.optimizers": "torch.optim, whose optimizers take fused=True",
    "apex.normalization": "the modules and functions of apex.normalization.fused_layer_norm, or torch.nn.LayerNorm",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "torch.distributed.tensor.parallel and torch.distributed.pipelining, or Megatron-LM; and for "
    "apex.transformer.functional torch.nn.functional.softmax and scaled_dot_product_attention under torch.compile",
    "apex.amp": "the functions of ampatch.amp",
}


def message(name: str) -> str:
    """Returns the error message for a name of Apex.

    Args:
        name: full dotted name, such as "apex.contrib.xentropy".
    """
    known = [prefix for prefix in _INSTEAD if f"{name}.".startswith(f"{prefix}.")]
    instead = _INSTEAD[max(known, key=len)] if known else "torch itself; ampatch's guide lists what it replaces"
    return f"ampatch stands in for Apex, and does not replace {name}. Use instead: {instead}."
