"""Thread pools of servers that several tests share."""

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads have all started, so that no test is blamed for one of them."""
    pool, all_here = ThreadPoolExecutor(threads), threading.Barrier(threads)
    list(pool.map(lambda _: all_here.wait(60), range(threads)))
    return pool
