"""Predictions for files, by processes of this machine."""
