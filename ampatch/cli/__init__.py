"""The command line: `ampatch run | demo | lists | doctor | build`.

Turns arguments into calls of the public API and results into text and exit statuses. Must not decide what is cast,
scaled or converted. Nothing else in ampatch imports from this folder. Begin with `main`.
"""
