"""Helpers that all other packages need and that know nothing about training.

Errors (`errors.py`, start here: a class for each kind of fault, each message one sentence), settings and
their sources (`settings/`), checks of arguments against their annotations (`validation/`), files and object
stores, threads that report their failure, logs, metrics and traces (`observability/`), the figures of a job's
page (`panels/`), JSON documents, and the points where tests inject faults.

Uses no other room.
"""
