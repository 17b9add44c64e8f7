"""What must hold of the rows of servers whose number has changed."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.shard.shard import Shard
from tests.protocol.fleet.checks import check_weights, in_effect, rounds_of, shares_of
from tests.protocol.fleet.job import COUNTS, Job, Phase
from tests.protocol.fleet.pushes import Pushes
from tests.protocol.scheduler import Broken


def check_rows(job: Job, pushes: Pushes, shards: Sequence[Shard], history: Any, torn: Any) -> None:
    """Every sample is there once, and in sync mode the weights are those of a job that never moved.

    Server 0, which gets all pushes, says which there were. Missing are only samples of torn steps.
    """
    totals = _totals(shards, job.samples)
    if job.phases == (Phase("sync"),) and not job.mode_requests:
        rounds = rounds_of(job, [history], pushes)
        check_weights(shards, rounds)
        expected = {sample: round(share, 5) for sample, share in shares_of(rounds).items()}
        if totals != [expected.get(sample, 0.0) for sample in range(job.samples)]:
            raise Broken(f"servers count {totals}, where {expected} were used")
        return
    used = Counter(int(s) for push in in_effect(job, history) for s in pushes[push])
    declared = {(step.worker, step.incarnation) for step in torn}
    excused = {int(s) for push in pushes if push[:2] in declared for s in pushes[push]}
    for sample, total in enumerate(totals):
        once = total == 1.0 or (job.mode_requests and 0 < total < 1)
        if used[sample] > 1 or total > 1 or (not once and sample not in excused):
            raise Broken(f"sample {sample} was used {used[sample]} times, and counts {total}")


def _totals(shards: Sequence[Shard], samples: int) -> list[float]:
    """How often each sample was used, over all servers."""
    ids = np.arange(samples)
    found = [shard.tables.read([Read(COUNTS.key, ids)])[0][:, 0] for shard in shards]
    return [round(float(total), 5) for total in np.sum(found, axis=0)]
