"""A package of data: the sources of the compiled extension. Must never hold Python code.

This file lets an editable install find `ampatch.csrc` in the directory at the top of the repository.
"""
