"""The sources of the compiled extension, as a package of data: it holds no code, and must never hold any.

This file is what lets an editable install find `ampatch.csrc` in the directory at the top of the repository.
"""
