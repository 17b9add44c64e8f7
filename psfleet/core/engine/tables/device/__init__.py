"""Tables in the memory of a GPU, and rows that move between GPU and host. Read device_rows.py first."""
