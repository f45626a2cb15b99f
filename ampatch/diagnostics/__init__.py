"""Tells users what amp does, where a number left its range, and what would mend it.

Only watches: must never change what a cast, a scale or a step does. Start reading at `watch`, which sees every operator
of a forward and a backward pass; `causes` finds the first one that produced inf or NaN.
"""
