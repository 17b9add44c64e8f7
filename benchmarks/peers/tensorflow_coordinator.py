"""TensorFlow's coordinator for one workload, which schedules steps on the workers.

Arguments: workload (w1, w2, w3), rule (sgd, adagrad, adam), the cluster as JSON. TensorFlow's Adam updates
every row of a table in each step, so its users train large tables with Adagrad.
"""

import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from data import FIELDS, W1_BATCH, W1_IDS, W3_DENSE, W3_IDS, batches_w1, batches_w3
from processes import hushed, keep_output, obey

with hushed():
    import tensorflow as tf

DIM, HIDDEN, BATCHES = 16, 400, 40
Replica = Callable[[Any], Any]


def optimizer(rule: str, variables: list[Any]) -> Any:
    """Return an optimizer whose state is stored with the variables, on the servers."""
    legacy = tf.keras.optimizers.legacy
    made = {"sgd": legacy.SGD, "adagrad": legacy.Adagrad, "adam": legacy.Adam}[rule](1e-3)
    made._create_all_weights(variables)
    return made


def embedding(rows: int) -> Any:
    """Return a table, half of it on each server."""

    def initial(shape: Any = None, dtype: Any = None) -> Any:
        return tf.random.normal(shape if shape is not None else (rows, DIM), stddev=0.01)

    return tf.Variable(initial, shape=(rows, DIM), dtype=tf.float32, name="rows")


def parts(variable: Any) -> list[Any]:
    """Return the parts of a variable on the servers, or only the variable if it is not split."""
    return list(getattr(variable, "variables", [variable]))


def w1(rule: str) -> tuple[Replica, Any]:
    """Return the step of W1 and a function that returns its batches."""
    table = embedding(W1_IDS)
    rows = parts(table)
    descent = optimizer(rule, rows)

    def replica(ids: Any) -> Any:
        unique, inverse = tf.unique(ids)
        with tf.GradientTape() as tape:
            vectors = tf.gather(tf.nn.embedding_lookup(table, unique), inverse)
            loss = 0.01 * tf.reduce_sum(vectors)
        descent.apply_gradients(zip(tape.gradient(loss, rows), rows, strict=True))
        return loss

    batches = np.stack(batches_w1(BATCHES, 10))
    assert batches.shape[1] == W1_BATCH
    return replica, lambda: tf.data.Dataset.from_tensor_slices(batches).repeat().prefetch(2)


def w2(rule: str) -> tuple[Replica, Any]:
    """Return the step of W2 and a function that returns its batches.

    Workers read 16 arrays of a million values and scale them to get gradients.
    """
    arrays = [tf.Variable(tf.fill([1_000_000], 0.01), name=f"w{i}") for i in range(16)]
    descent = optimizer(rule, arrays)

    def replica(_: Any) -> Any:
        descent.apply_gradients([(0.1 * array, array) for array in arrays])
        return 0.0

    return replica, lambda: tf.data.Dataset.from_tensors(0).repeat()


def w3(rule: str) -> tuple[Replica, Any]:
    """Return the step of W3 and a function that returns its batches."""
    table = embedding(W3_IDS)
    sizes = [FIELDS * DIM + W3_DENSE, HIDDEN, HIDDEN, 1]
    layers = [
        (
            tf.Variable(tf.random.normal((rows, columns), stddev=(2 / rows) ** 0.5)),
            tf.Variable(tf.zeros((columns,))),
        )
        for rows, columns in itertools.pairwise(sizes)
    ]
    variables = [part for variable in (table, *sum(layers, ())) for part in parts(variable)]
    descent = optimizer(rule, variables)

    def replica(batch: Any) -> Any:
        ids, wind, labels = batch
        unique, inverse = tf.unique(tf.reshape(ids, [-1]))
        with tf.GradientTape() as tape:
            vectors = tf.gather(tf.nn.embedding_lookup(table, unique), inverse)
            hidden = tf.concat([tf.reshape(vectors, [-1, FIELDS * DIM]), wind], 1)
            for layer, (weight, bias) in enumerate(layers):
                hidden = tf.matmul(hidden, weight) + bias
                if layer < 2:
                    hidden = tf.nn.relu(hidden)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, hidden)
            loss = tf.reduce_mean(losses)
        descent.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    batches = tuple(np.stack(column) for column in zip(*batches_w3(BATCHES, 5), strict=True))
    return replica, lambda: tf.data.Dataset.from_tensor_slices(batches).repeat().prefetch(2)


def main() -> None:
    replies = keep_output()
    workload, rule, cluster = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc"
        ),
        # Splits tables in two. W2's arrays and W3's layers are smaller than the limit and stay whole.
        tf.distribute.experimental.partitioners.MinSizePartitioner(8 << 20, max_shards=2),
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        replica, batches = {"w1": w1, "w2": w2, "w3": w3}[workload](rule)
    feed = iter(coordinator.create_per_worker_dataset(batches))

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.run(replica, args=(next(batch),))

    def schedule(_: int) -> None:
        for _ in cluster["worker"]:
            coordinator.schedule(step, args=(feed,))

    obey(schedule, coordinator.join, replies)
    os._exit(0)  # what is left of the strategy would wait for servers that end now


if __name__ == "__main__":
    main()
