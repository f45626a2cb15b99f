"""Records what runs: functions, operators and modules, the code that called them, and the largest values in and out.

Must never change a result, nor judge what it sees. Read `recorder` first, then `watch`; reports have a consumer of
their own.
"""
