"""The cast lists, as a package of data: it holds no code, and must never hold any.

This file is what lets an editable install find `ampatch.lists` in the directory at the top of the repository.
"""
