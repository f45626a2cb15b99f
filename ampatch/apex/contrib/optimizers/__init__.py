"""Empty: what replaces these optimizers is elsewhere.

Python imports this package before it asks for an optimizer in it. So errors name the optimizer that was meant.
"""
