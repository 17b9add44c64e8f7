"""Observability of a job: the metrics of all its processes, and a page that shows them."""
