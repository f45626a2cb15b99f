"""The cast lists as data: YAML files read, checked, merged and edited.

Owns the rules (`rules`), the lists in force (`lists`), and what must be known of torch's functions to check them: their
paths, spellings, and the places of their arguments. Must not call or patch a function. Begin with `rules` and `lists`.
"""
