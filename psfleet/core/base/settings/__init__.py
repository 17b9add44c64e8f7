"""Settings of psfleet. Each is declared once; flags, variables and job-file keys follow from that."""
