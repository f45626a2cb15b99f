"""`amp.what_if`: one float32 step of a copy of a model, and what each number format would do to its values.

Must never change the model, nor emulate a format in another way than a session does. Read `what_if` first.
"""
