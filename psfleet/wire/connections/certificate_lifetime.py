"""Lifetime of a job's new certificates; light to import, since the command line shows it."""

CERTIFICATE_DAYS = 30.0
