"""Panels: the figures of a job's page, each with its meaning, advice and alert. Begin with panel.py.

process_panels.py declares the figures of servers and workers, training_panels.py those of training. The page,
the report, Grafana's dashboard, the alert rules and docs/watch.md all follow from them.
"""
