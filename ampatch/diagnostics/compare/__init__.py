"""`amp.compare`: two steps, or two saved reports, side by side.

Must never change the model. Read `comparison` first.
"""
