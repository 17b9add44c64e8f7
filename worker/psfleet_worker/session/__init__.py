"""State machines of one worker, without I/O: its incarnation, its stream of pushes, its data, its retries."""
