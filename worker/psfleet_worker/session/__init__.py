"""What one worker decides, without I/O: its life, its stream of pushes, its data, its retries."""
