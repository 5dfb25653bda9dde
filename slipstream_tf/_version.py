"""The version of slipstream_tf, which pyproject.toml reads from here."""

__version__ = "0.3.0.dev0"
