"""Empty: the replacements of these optimizers are elsewhere.

Python imports this package before an optimizer in it, so that errors name the optimizer that the script needs.
"""
