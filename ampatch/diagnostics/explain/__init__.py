"""`amp.explain`: what amp does to one function, and by which rule.

Must never change a session. Read `explanation` first.
"""
