"""Savings and costs of recompute: a perceptron of 64 layers, plain, with checkpoints, with chosen cuts.

Peak bytes are those of activations alive at once (psfleet.core.graph.program.recompute.ActivationMeter). The
runs take turns, so that changes of the machine's load affect every run. Gradients must be bit-identical.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from reporting import Report, arguments, finish

import psfleet as ps
from psfleet import layers
from psfleet.core.graph.program import names
from psfleet.core.graph.program.backward import Automatic, append_backward
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.graph.program.recompute import ActivationMeter

DEPTH, WIDTH, BATCH, STEPS = 64, 256, 256, 5


class Contender:
    """The network with one choice of activations to keep: "plain", "every 8th" or "chosen"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        with names.guard(), program_guard(Program(), Program()):
            self._program = ps.default_main_program()
            outputs = [layers.data("x", [None, WIDTH])]
            for _layer in range(DEPTH):
                outputs.append(layers.fc(outputs[-1], WIDTH, act="relu"))
            loss = layers.mean(layers.square(outputs[-1]))
            checkpoints = {"plain": None, "every 8th": outputs[8::8], "chosen": Automatic()}[name]
            self._gradients = [g for _, g in append_backward(loss, checkpoints=checkpoints)]
        self._executor = ps.Executor()

    def step(self, feed: Mapping[str, Any]) -> list[Any]:
        """Make one timed step. Returns its gradients."""
        begin = time.perf_counter()
        gradients = self._executor.run(self._program, feed, self._gradients)
        self.seconds.append(time.perf_counter() - begin)
        return gradients

    def peak(self, feed: Mapping[str, Any]) -> int:
        """Return the peak bytes of activations in a step, which is not timed."""
        self._executor.meter = ActivationMeter()
        self._executor.run(self._program, feed, self._gradients)
        peak: int = self._executor.meter.peak_bytes
        self._executor.meter = None
        return peak


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    steps = options.steps or (2 if options.short else STEPS)
    dice = np.random.default_rng(0)
    feed = {"x": dice.standard_normal((BATCH, WIDTH), np.float32)}
    contenders = [Contender(name) for name in ("plain", "every 8th", "chosen")]
    expected = contenders[0].step(feed)
    same = {c.name: all(map(np.array_equal, c.step(feed), expected)) for c in contenders}
    peaks = {c.name: c.peak(feed) for c in contenders}
    for contender in contenders:
        contender.seconds.clear()
    for _ in range(options.runs * steps):
        for contender in contenders:
            contender.step(feed)
    report = Report(
        "recompute", f"Recompute: {DEPTH} layers of {WIDTH}, batches of {BATCH}, gradients fetched"
    )
    plain = statistics.median(contenders[0].seconds)
    for contender in contenders:
        median = statistics.median(contender.seconds)
        report.rows.append(
            {
                "kept": contender.name,
                "activation MB": peaks[contender.name] / 1e6,
                "of the plain run": f"{peaks[contender.name] / peaks['plain']:.1%}",
                "ms a step": median * 1e3,
                "times plain": f"{median / plain:.2f}",
                "same bits": "yes" if same[contender.name] else "NO",
            }
        )
    finish(report, options.json)


if __name__ == "__main__":
    main()
