"""The compiled extension, its stand-ins in torch and Python, and the one place that chooses between them.

Owns the operators on lists of tensors (`kernels`), the C++ calls of patched functions (`calls`), and how the libraries
are found, loaded and built. Must give the same results whatever is chosen. Begin with `kernels`.
"""
