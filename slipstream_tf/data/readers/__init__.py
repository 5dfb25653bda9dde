"""Readers of click data, as batches for training. `registry.open_data` finds the one for a path."""
