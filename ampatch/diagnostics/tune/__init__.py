"""`amp.tune`: trainings that find a small cast list.

Must never keep a change to the process. Read `tuning` first.
"""
