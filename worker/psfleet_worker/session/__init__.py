"""State machines of one worker, without I/O: its incarnation and its pushes, its data, its retries.

Start with `worker_session`, the protocol; `instructions` lists what its programs may yield.
"""
