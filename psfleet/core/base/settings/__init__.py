"""Settings: each is declared once, in the group that it belongs to."""
