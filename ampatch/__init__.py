"""ampatch: mixed precision for PyTorch by patching its functions, with cast lists that users edit.

::

    from ampatch import amp
"""

from ampatch import amp

__all__ = ["__version__", "amp"]

__version__ = "0.1.0"
