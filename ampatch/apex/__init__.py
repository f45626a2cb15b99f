"""Replaces the `apex` package, so that scripts for Apex run: provides its names on top of torch and ampatch.

::

    import ampatch.apex

    ampatch.apex.install()

    from apex import amp

Importing this package changes nothing; `install` does. The modules have Apex's names, because projects import them.
Code outside this folder must not know these modules.
"""

from __future__ import annotations

from ampatch.apex._installation import install, uninstall

__all__ = ["install", "uninstall"]
