"""Other ways to the same casts, scale and masters: interfaces that users know from other systems.

`grad_scaler` is torch's GradScaler, `mixed_precision` wraps any optimizer, `inference_copy` makes a model for
inference. They check their arguments and use what `scaling`, `weights` and `patching` do. Must not cast, scale or
convert by rules of their own.
"""
