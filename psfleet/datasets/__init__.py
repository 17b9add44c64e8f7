"""Readers of users' own files: ratings as CSV, and sparse samples as libsvm lines."""

from psfleet.datasets.libsvm import Samples, read_libsvm
from psfleet.datasets.ratings import Ratings, read_ratings

__all__ = ["Ratings", "Samples", "read_libsvm", "read_ratings"]
