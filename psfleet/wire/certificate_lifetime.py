"""How long a job's new certificates are good for; light to import, since the command line shows it."""

__all__ = ["CERTIFICATE_DAYS"]

CERTIFICATE_DAYS = 30.0
