"""Holds the compiled extension and its replacements in torch and Python, and alone chooses between them.

Owns the operators on lists of tensors (`kernels`), the C++ calls of patched functions (`calls`), and how the libraries
are found, loaded and built. Every implementation must give the same results. Start reading at `kernels`.
"""
