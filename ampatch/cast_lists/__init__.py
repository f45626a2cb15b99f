"""The cast lists as data: YAML files are read, checked, merged and edited here.

Owns the rules (`rules`), the lists in force (`lists`), and the facts about torch's functions that the checks need:
paths, spellings, and positions of arguments. Must not call or patch a function. Begin with `rules` and `lists`.
"""
