"""`amp.replay`: a skipped step again, from its file, at any opt level.

Must never change the user's model. Read `replay` first.
"""
