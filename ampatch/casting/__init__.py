"""Casts of values: tensors in nested arguments, and the casts of weights that are kept.

Owns no rule and no patch, and must import from neither: what is cast, and when, is said by the callers. Begin with
`nested`.
"""
