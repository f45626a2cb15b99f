"""The command line: `ampatch run`, `ampatch demo` and all other commands.

Turns arguments into calls of the public API, and results into text and exit statuses. Must not decide what amp casts,
scales or converts. Other folders of ampatch must not import from this one. Read `main` first.
"""
