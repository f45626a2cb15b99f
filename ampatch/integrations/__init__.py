"""Adapters for training frameworks: what a framework's users write stays as it is.

They use the public API, and of the core only what a loop needs besides. Nothing in the core may know of them, and none
of them is imported with ampatch.
"""
