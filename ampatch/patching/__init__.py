"""Applies the cast lists by wrapping torch's functions, so that they cast their arguments.

Owns the wrappers, the places where they are installed, and the kept casts of weights. Must not know losses, gradients
or optimizers. Start reading at `wrappers` (one wrapper), then `function_patches` (where it is installed).
"""
