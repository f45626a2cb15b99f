"""`amp.preflight`: steps of copies of a model at all opt levels, and what each level needs.

Must never change the model, nor a generator of random numbers. Read `preflight` first.
"""
