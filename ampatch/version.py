"""The version of ampatch. Must not import anything, as the build reads it."""

__version__ = "0.2.0"
