"""Samples in batches, each dispatched to one worker; how far its script is, and what it remembers."""
