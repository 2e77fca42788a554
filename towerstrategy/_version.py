"""The version, for the package and for setup.cfg."""

__version__ = "0.1.0"
