"""Ground floor: everything that other rooms need and that knows nothing of training.

Errors (`errors.py`, start here: one class for each kind of fault, each message one sentence), settings and
their sources (`settings/`), checks of arguments by their annotations (`validation/`), files and object
stores, threads that report their failure, logs, metrics and traces (`observability/`), JSON documents, and
the points at which tests inject faults.

Uses no other room.
"""
