"""Parts of torch that torch does not promise, under names of this package: what a port to a new torch has to check.

No other file of ampatch names a private module, function or attribute of torch, except the attributes that
`conventions` lists; `tests/torch_private/test_torch_private.py` checks that. Each name says what it gives, where torch
has it, in which versions it was seen, and when it can go. Names of one paragraph share these lines. Must never decide
what amp does, and imports nothing of ampatch. `docs/design/torch_private.md` has the order of work for a new torch.

Functions of torch stand here themselves, without a wrapper: a call costs what torch's own costs. Attributes are strings
for ``getattr``, or `operator.attrgetter`, which runs no Python code either.
"""
