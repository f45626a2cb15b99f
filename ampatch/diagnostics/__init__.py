"""Tells the user what amp does, and by which rule.

Owns the reports and their wording. Must never change what amp does: no list, no patch, no cache, and no argument of a
call. Nothing here may run unless the user asks for it.
"""
