"""Mistakes of a script that is run by hand: its lines, and the error that ends it."""

from dataclasses import dataclass

__all__ = ["BY_HAND", "MODEL", "TABLE", "Mistake"]


@dataclass(frozen=True)
class Mistake:
    """A script with one mistake.

    Attributes:
        script: Its lines, below the imports and, where `model` is set, below a small model.
        sentence: A pattern of the last line that it writes.
        code: Its exit code.
    """

    script: str
    sentence: str
    model: bool = False
    code: int = 1
    variables: tuple[tuple[str, str], ...] = ()


TABLE = """
ps = psfleet.connect()
t = ps.sparse_table("users", dim=4, optimizer=optimizer.Adam(0.1))
ids = np.arange(3)
"""
MODEL = """
fleet.init()
x = layers.data("x", [None, 2])
y = layers.data("y", [None, 1])
out = layers.fc(x, 1)
loss = layers.mean(layers.square_error_cost(out, y))
opt = fleet.distributed_optimizer(optimizer.Adam(0.1))
opt.minimize(loss)
exe = psfleet.Executor()
X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
"""

BY_HAND = {
    "gradients of another width": Mistake(
        TABLE + "t.push(ids, np.ones((3, 5)))",
        r"ShapeError: table 'users' has rows of 4; .*\(3, 5\)",
    ),
    "ids that are fractions": Mistake(TABLE + "t.pull([0.5])", r"IdError: .*0\.5 is not a whole"),
    "ids None": Mistake(TABLE + "t.pull(None)", r"IdError: .*object"),
    "ids as texts": Mistake(TABLE + "t.pull(['anna'])", r"IdError: .*"),
    "gradients None": Mistake(TABLE + "t.push(ids, None)", r"ShapeError: .*None"),
    "an array of objects": Mistake(
        TABLE + "t.push(ids, np.array([[1, 'a', 2, 3]] * 3, object))", r"ShapeError: .*object"
    ),
    "a torch tensor with a graph": Mistake(
        "import torch\n" + TABLE + "t.push(ids, torch.ones(3, 4, requires_grad=True))",
        r"ShapeError: .*detach",
    ),
    "a table of two widths": Mistake(
        TABLE + "ps.sparse_table('users', dim=8, optimizer=optimizer.Adam(0.1))",
        r"TableConflict: .*users.*",
    ),
    "a dim that is a text": Mistake(
        TABLE + "ps.sparse_table('items', dim='8', optimizer=optimizer.Adam(0.1))",
        r"WrongType: .*'8'",
    ),
    "an optimizer by its name": Mistake(
        TABLE + "ps.sparse_table('items', dim=8, optimizer='adam')", r"WrongType: .*'adam'"
    ),
    "a table after close": Mistake(
        TABLE + "ps.close()\nt.pull(ids)", r"UsageError: this client is closed"
    ),
    "a mode that there is not": Mistake("psfleet.connect(mode='synch')", r"ConfigError: .*'synch'"),
    "saving without a table": Mistake(
        "psfleet.connect().save('model')", r"CheckpointError: there is nothing to save into 'model'"
    ),
    "loading what is not there": Mistake(TABLE + "ps.load('modle')", r"CheckpointError: .*modle"),
    # Parameters that other tests of the process have left count as the script's; none has this name.
    "loading another model": Mistake(
        TABLE.replace("users", "buyers")
        + "t.push(ids, np.ones((3, 4)))\nps.save('model')\nps.close()\nwith psfleet.connect() as ps:\n"
        "    ps.sparse_table('items', dim=4, optimizer=optimizer.Adam(0.1))\n    ps.load('model')",
        r"CheckpointError: 'model' has table buyers and the script tables? .*: none of them",
    ),
    "a folder that takes nothing": Mistake(
        TABLE + "ps.save('/proc/model')", r"CheckpointError: .*/proc/model.*"
    ),
    "a rate that is a text": Mistake("optimizer.SGD('0.1')", r"WrongType: .*'0.1'"),
    "a missing feed": Mistake("exe.run(feed={'x': X})", r"UsageError: .*'?y'?", model=True),
    "a feed of another name": Mistake(
        "exe.run(feed={'x': X, 'label': Y})", r"UsageError: .*", model=True
    ),
    "a label of another shape": Mistake(
        "exe.run(feed={'x': X, 'y': Y[:, 0]})", r"ShapeError: .*'?y'?.*\(8,\)", model=True
    ),
    "batches of two sizes": Mistake(
        "exe.run(feed={'x': X, 'y': Y[:5]})", r"ShapeError: .*", model=True
    ),
    "a feed of objects": Mistake(
        "exe.run(feed={'x': X.astype(object), 'y': Y})", r"ShapeError: .*object", model=True
    ),
    "labels as texts": Mistake(
        "exe.run(feed={'x': X, 'y': np.array([['1']] * 8)})", r"ShapeError: .*", model=True
    ),
    "an empty batch": Mistake(
        "print(exe.run(feed={'x': X[:0], 'y': Y[:0]}, fetch_list=[loss]))",
        r"psfleet: worker 0, step 1: the loss is nan",
        model=True,
        code=0,
    ),
    "a fetch that is not there": Mistake(
        "exe.run(feed={'x': X, 'y': Y}, fetch_list=['los'])",
        r"UsageError: fetch 'los' is not",
        model=True,
    ),
    "minimize twice": Mistake(
        "opt.minimize(loss)",
        r"UsageError: this optimizer minimizes the loss '.*' already",
        model=True,
    ),
    "a loss that is no number": Mistake(
        "optimizer.SGD(0.1).minimize(out)",
        r"ShapeError: the loss '.*' has shape \(None, 1\); it must be a single",
        model=True,
    ),
    "NaN in the features": Mistake(
        "X[3, 1] = np.nan\nfor _ in range(3):\n    exe.run(feed={'x': X, 'y': Y}, fetch_list=[loss])",
        r"psfleet: worker 0, step 1: the loss is nan.*",
        model=True,
        code=0,
    ),
    "NaN that is to stop": Mistake(
        "X[3, 1] = np.nan\nexe.run(feed={'x': X, 'y': Y})",
        r"UsageError: worker 0, step 1: the loss is nan; it was not pushed",
        model=True,
        variables=(("PSFLEET_ON_NAN", "stop"),),
    ),
    "an id beyond the rows": Mistake(
        "ids = layers.data('ids', [None, 1], dtype='int64')\ne = layers.embedding(ids, size=[10, 4])\n"
        "l = layers.mean(e)\noptimizer.SGD(0.1).minimize(l)\n"
        "psfleet.Executor().run(feed={'ids': np.array([[10]])})",
        r"IdError: .*rows 0 to 9; an id is 10",
    ),
    "ids that were never made whole": Mistake(
        "ids = layers.data('ids', [None, 1], dtype='int64')\ne = layers.embedding(ids, size=[10, 4])\n"
        "l = layers.mean(e)\noptimizer.SGD(0.1).minimize(l)\n"
        "psfleet.Executor().run(feed={'ids': np.array([[0.5]])})",
        r"IdError: .*0\.5",
    ),
    "no minimize": Mistake(
        "fleet.init()\nx = layers.data('x', [None, 2])\nloss = layers.mean(layers.fc(x, 1))\n"
        "exe = psfleet.Executor()\n"
        "for batch in fleet.shard([np.ones((4, 2), np.float32)] * 5):\n"
        "    exe.run(feed={'x': batch}, fetch_list=[loss])",
        r"UsageError: a program with parameters was run 5 times and never trained",
    ),
    "no minimize in a loop of one's own": Mistake(
        "x = layers.data('x', [None, 2])\nloss = layers.mean(layers.fc(x, 1))\n"
        "for _ in range(3):\n"
        "    psfleet.Executor().run(feed={'x': np.ones((4, 2), np.float32)}, fetch_list=[loss])",
        r"psfleet: a program with parameters was run 3 times and never trained: no optimizer .*",
        code=0,
    ),
    "a number in place of batches": Mistake(
        "fleet.init()\nlist(fleet.shard(100))",
        r"WrongType: Fleet\.shard: batches is 100, it must be a list or another iterable",
    ),
    "a strategy by its name": Mistake(
        "fleet.init(strategy='sync')\nfleet.distributed_optimizer(optimizer.SGD(0.1))",
        r"WrongType: Fleet\.init: strategy is 'sync', it must be a DistributedStrategy",
    ),
    "an optimizer of torch": Mistake(
        "import torch\nfleet.distributed_optimizer(torch.optim.SGD([torch.zeros(1)], 0.1))",
        r"WrongType: .*psfleet\.torch\.convert",
    ),
    "a setting that there is not": Mistake(
        "fleet.DistributedStrategy(async_mode=True)", r"\w+Error: .*async_mode"
    ),
    "collective training": Mistake(
        "fleet.init(is_collective=True)", r"ConfigError: is_collective is True"
    ),
    "a role that there is not": Mistake(
        "fleet.init()",
        r"ConfigError: PSFLEET_ROLE is 'wrker'",
        variables=(("PSFLEET_ROLE", "wrker"),),
    ),
    "servers without a role": Mistake(
        "fleet.init()",
        r"ConfigError: PSFLEET_SERVERS is 'h:1' but PSFLEET_ROLE is not set",
        variables=(("PSFLEET_SERVERS", "h:1"),),
    ),
    "torchrun in place of the launcher": Mistake(
        "fleet.init()",
        r"ConfigError: WORLD_SIZE is '2', .*psfleet-launch --workers 2,",
        variables=(("WORLD_SIZE", "2"),),
    ),
    "torchrun, and no fleet.init()": Mistake(
        MODEL.replace("fleet.init()", "") + "exe.run(feed={'x': X, 'y': Y})",
        r"ConfigError: WORLD_SIZE is '2', .*psfleet-launch --workers 2,",
        variables=(("WORLD_SIZE", "2"),),
    ),
    "an endpoint without a port": Mistake(
        "psfleet.connect()",
        r"ConfigError: endpoint 'localhost' is neither",
        variables=(("PSFLEET_ROLE", "worker"), ("PSFLEET_SERVERS", "localhost")),
    ),
    "a rank beyond the workers": Mistake(
        "fleet.init()",
        r"ConfigError: PSFLEET_RANK is 2, but the fleet has workers 0 to 1",
        variables=(
            ("PSFLEET_ROLE", "worker"),
            ("PSFLEET_SERVERS", "h:1"),
            ("PSFLEET_WORKERS", "2"),
            ("PSFLEET_RANK", "2"),
        ),
    ),
    "a worker that serves": Mistake("fleet.init()\nfleet.run_server()", r"ConfigError: run_server"),
}
