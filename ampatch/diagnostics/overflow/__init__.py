"""Says why a step was skipped: runs its forward passes again, and finds the first operator that made inf or NaN.

Must never change what a training computes. Read `tracer` first.
"""
