"""What a job shows of itself: metrics, and the panels that are made of them."""
