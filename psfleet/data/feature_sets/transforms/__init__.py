"""Transforms of the values of features, see docs/features.md."""
