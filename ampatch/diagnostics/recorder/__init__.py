"""Records operators: which code called each, in which module, and the largest values in and out.

Must never change a result, nor judge what it sees. Read `watch` first.
"""
