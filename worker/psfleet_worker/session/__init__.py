"""State machines of one worker, without I/O: its membership, its pushes, its data and its retries.

Start with `worker_session`, the protocol. `instructions` lists what its programs may yield.
"""
