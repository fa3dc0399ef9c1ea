"""The version of padfree, for modules that must not import the whole package."""

__version__ = "0.2.0"
