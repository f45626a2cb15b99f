"""Adapters for training frameworks, whose users keep their code unchanged.

Adapters use the public API, plus the few parts of the core that a training loop needs. The core must never import them,
and `import ampatch` must not import them. Read `trainer_session` first: amp for the loop of a framework.
"""
