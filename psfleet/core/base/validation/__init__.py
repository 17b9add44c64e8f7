"""Checks of arguments against their annotations."""
