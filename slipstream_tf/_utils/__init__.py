"""Modules that every part of the package may import and that users do not need."""
