"""The public functions, by what users do with them; `ampatch.amp` exports them.

Each checks its arguments, then hands over to the live session. Must hold no state, and must check all arguments before
it changes anything. Read `setting_up.py` first.
"""
