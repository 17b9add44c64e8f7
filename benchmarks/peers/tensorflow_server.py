"""A server or worker of TensorFlow's ParameterServerStrategy. Arguments: ps or worker, rank, cluster."""

import json
import os
import sys

from processes import hushed, keep_output

with hushed():
    import tensorflow as tf


def main() -> None:
    replies = keep_output()
    kind, rank, cluster = sys.argv[1:]
    options = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
    tf.distribute.Server(
        json.loads(cluster), job_name=kind, task_index=int(rank), protocol="grpc", config=options
    )
    print("READY", file=replies, flush=True)
    sys.stdin.read()
    os._exit(0)  # a server of TensorFlow cannot be stopped


if __name__ == "__main__":
    main()
