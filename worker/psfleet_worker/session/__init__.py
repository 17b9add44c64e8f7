"""State machines of one worker, without I/O: its incarnation and its pushes, its data, its retries."""
