"""Tables: dense arrays and rows by id, with the state that their rules keep."""
