"""Tells users what amp does and by which rule, where a number left its range, and what would mend it.

Owns these reports and their wording. Must never change what amp does, and must run only if the user asks. Start reading
at `recorder`, which sees every operator of a forward and a backward pass; each other folder is one function of `amp`.
"""
