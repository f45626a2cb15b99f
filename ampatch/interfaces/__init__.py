"""Other interfaces to the same casts, loss scale and masters, which users know from other libraries.

`grad_scaler` is torch's GradScaler, `mixed_precision` wraps any optimizer, `inference_copy` makes a copy of a model for
inference. They check their arguments, and use `scaling`, `weights` and `patching`. Must not have rules of their own for
casts, scaling or conversion.
"""
