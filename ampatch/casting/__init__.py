"""Casts tensors in nested arguments, and stores the casts of weights.

Must not import the modules that own rules and patches: the callers decide what to cast, and when. Start reading at
`nested`.
"""
