"""`amp.report`: what amp did in a block, as data, as text and as a page.

Must never change what amp does, nor wait for a device before it is asked for numbers. Read `report` first.
"""
