"""Internal helpers that every part of the package may import."""
