"""The version of slipstream_tf; pyproject.toml takes it from here."""

__version__ = "0.3.0.dev0"
