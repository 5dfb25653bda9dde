"""Readers of click data. `registry.open_data` selects the reader for a path."""
