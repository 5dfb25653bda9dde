"""The version of slipstream_tf; setup.py reads it from here."""

__version__ = "0.1.0"
