"""Apex's contributed modules: the few that ampatch replaces, mostly by functions of torch."""
