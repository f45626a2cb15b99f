"""The compiled extension, its replacements in torch and Python, and the only place that chooses between them.

Owns the operators on lists of tensors (`kernels`), the C++ calls of patched functions (`calls`), and how the libraries
are found, loaded and built. Every implementation must give the same results. Start reading at `kernels`.
"""
