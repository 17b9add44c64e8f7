"""Samples in batches, each dispatched to one worker."""
