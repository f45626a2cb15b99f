"""The cast lists put into effect: functions of torch wrapped so that they cast their arguments.

Owns the wrappers, the places where a function is patched and the casts of weights that are kept. Must not know of
losses, gradients or optimizers. Begin with `wrappers` (a rule as a function), then `function_patches` (where it goes).
"""
