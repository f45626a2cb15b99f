"""Adapters for training frameworks, one module each: what a framework's users write stays as it is.

They are users of the public API. Nothing in the core may know of them, and nothing here is imported with ampatch.
"""
