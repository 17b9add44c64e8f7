"""Metrics of a job, and the panels (figures with meaning and advice) that are made of them."""
