"""One step of copies of a user's model at any opt level: what replay, compare and preflight run.

Must never touch the user's model, nor judge a step. Read `subject` first.
"""
