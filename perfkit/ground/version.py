"""The version of perfkit, which packaging reads from here."""

__version__ = "0.3.0"
