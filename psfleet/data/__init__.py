"""Samples: readers of files and topics, and the batches of them that a fleet hands to its workers."""

from psfleet.data.line_files import Ratings, Samples, read_libsvm, read_ratings

__all__ = ["Ratings", "Samples", "read_libsvm", "read_ratings"]
