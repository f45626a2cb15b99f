"""What stands in for the `apex` package, so that scripts written for it run: its names, on torch and ampatch.

::

    import ampatch.apex

    ampatch.apex.install()

    from apex import amp

Importing this changes nothing; `install` does. The modules have the names of Apex's own, because projects import those.
Nothing outside of this folder may know of them.
"""

from __future__ import annotations

from ampatch.apex._installation import install, uninstall

__all__ = ["install", "uninstall"]
