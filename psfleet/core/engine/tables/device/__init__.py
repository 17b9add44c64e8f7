"""Tables in the memory of a GPU, and rows that move between it and the host."""
