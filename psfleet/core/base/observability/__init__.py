"""Metrics, traces and logged values as a process exposes them; `panels/` beside it says what a page shows."""
