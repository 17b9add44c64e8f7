"""One worker's stream of pushes, and the pulls between them."""
