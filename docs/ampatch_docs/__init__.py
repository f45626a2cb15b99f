"""What the documentation's site is made with beside Sphinx: text from the code, and drawings from text.

Only docs/conf.py, the Makefile and tests import it; the package ampatch must not.
"""
