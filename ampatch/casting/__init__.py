"""Casts of values: tensors in nested arguments, and the store of weights' casts.

Owns no rule and no patch, and must not import the modules that do: the callers decide what to cast, and when. Begin
with `nested`.
"""
