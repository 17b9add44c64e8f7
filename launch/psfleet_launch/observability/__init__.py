"""Observability of a job: metrics of all processes, the history, and the page and the report that show
them."""
