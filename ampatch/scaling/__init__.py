"""The loss scale: its growth and backoff, the `scale_loss` block, unscaling, and steps skipped after an overflow.

Owns the scale, the overflow flag and the optimizers passed to `amp.initialize`. Must not cast arguments of functions or
convert weights. Read `loss_scaler` (the scale) first, then `scaled_block` (one block) and `optimizer_step` (the step).
"""
