"""The loss scale: how it grows and backs off, the `scale_loss` block, unscaling, and the step that may be skipped.

Owns the scale, the overflow flag and the optimizers that were handed to `amp.initialize`. Must not cast a function's
arguments, nor convert a weight. Begin with `loss_scaler` (the scale), then `scaled_block` (one block) and `optimizers`
(the step).
"""
