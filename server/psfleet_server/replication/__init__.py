"""Standbys: they follow a primary, and take its place."""
