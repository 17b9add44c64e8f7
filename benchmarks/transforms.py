"""Rows per CPU second of each transform of features, in batches of 8,192, in this process.

Numbers and ids are arrays; texts are objects as Parquet gives them, with 20,000 distinct values. "look-up": a
batch without transforms, whose ids or texts are hashed.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from reporting import Report, arguments, finish

from psfleet import features as f

BATCH, DISTINCT, WORDS = 8192, 20_000, 5


def data() -> dict[str, Any]:
    """Return the columns of a batch."""
    dice = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(DISTINCT)], object)
    lengths = np.full(BATCH, WORDS)
    texts = words[dice.integers(0, DISTINCT, BATCH * WORDS)]
    lists = f.Jagged(texts, lengths)
    weighted = np.array([f"{text}:0.5" for text in texts], object)
    return {
        "number": dice.lognormal(2, 1, BATCH).astype(np.float32),
        "id": dice.integers(0, DISTINCT, BATCH),
        "text": words[dice.integers(0, DISTINCT, BATCH)],
        "list": lists,
        "other": f.Jagged(words[dice.integers(0, DISTINCT, BATCH * WORDS)], lengths),
        "sentence": np.array([" ".join(texts[i : i + WORDS]) for i in range(BATCH)], object),
        "weighted": f.Jagged(weighted, lengths),
    }


def features() -> Iterator[tuple[str, str, Any, list[str]]]:
    """Yield the lines of the table: name, content of a row, feature, and input columns."""
    table = f.Table("t", 4)
    words, numbers = [f"word{number}" for number in range(DISTINCT)], list(range(DISTINCT))
    quantiles = np.linspace(0.1, 60, 99).tolist()
    single_value, five = "a value", f"{WORDS} texts"

    def single(column: str, transform: Any, **options: Any) -> tuple[Any, list[str]]:
        return f.Feature("f", table, column=column, transform=transform, **options), [column]

    def double(left: str, right: str, transform: Any) -> tuple[Any, list[str]]:
        hashed = not isinstance(transform, f.Cross)
        inputs = [left, right]
        return f.Feature("f", table, inputs=inputs, hashed=hashed, transform=transform), inputs

    grams = [f.Split(), f.NGrams(1, 2)]
    split = {"hashed": True}
    yield "look-up, ids hashed", single_value, *single("id", [], hashed=True)
    yield "look-up, texts hashed", single_value, *single("text", [], hashed=True)
    yield (
        "Log1p, Normalize",
        single_value,
        *single("number", [f.Log1p(), f.Normalize(2, 1), np_int]),
    )
    yield "Quantiles(100)", single_value, *single("number", f.Quantiles(100, quantiles))
    yield "Vocabulary of numbers", single_value, *single("id", f.Vocabulary(numbers), dtype="int")
    yield "Vocabulary of texts", single_value, *single("text", f.Vocabulary(words))
    yield "Cross of ids", "2 values", *double("id", "id", f.Cross())
    yield "Lookup", single_value, *single("text", f.Lookup(dict(zip(words, numbers, strict=True))))
    yield "Split, NGrams(1, 2)", f"a text of {WORDS} words", *single("sentence", grams, **split)
    yield "Match", f"2 lists of {five}", *double("list", "other", f.Match())
    yield "Pad(3)", five, *single("list", f.Pad(3, ""), hashed=True)
    values = {"hashed": True, "weighted": True}
    yield "WeightedValues", five, *single("weighted", f.WeightedValues(), **values)


def np_int(values: f.Jagged) -> Any:
    """Return whole numbers, which a Feature needs."""
    return values.values.astype(np.int64)


def measured(make: Callable[[], Any], seconds: float) -> float:
    """Return the CPU seconds of a call."""
    make()
    calls, start = 0, time.process_time()
    while calls == 0 or time.process_time() - start < seconds:
        make()
        calls += 1
    return (time.process_time() - start) / calls


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("transforms", f"Transforms: rows a CPU second, batches of {BATCH}")
    columns = data()
    for name, row, feature, names in features():
        inputs = [
            f.Input(column, "int" if column == "id" else "text") for column in feature.inputs[:1]
        ]
        inputs += [f.Input(column) for column in set(feature.inputs[1:]) - set(feature.inputs[:1])]
        made = f.FeatureSet([*inputs, feature])
        batch = (
            {column: columns[column] for column in names} if inputs else {"f": columns[names[0]]}
        )
        seconds = 0.01 if options.short or options.steps else 0.5
        costs = [
            measured(lambda made=made, batch=batch: f.feed(made, batch), seconds)
            for _ in range(options.runs)
        ]
        cost = statistics.median(costs)
        spread = (max(costs) - min(costs)) / cost
        report.rows.append(
            {"transform": name, "a row": row, "rows / CPU s": BATCH / cost, "spread": spread}
        )
    finish(report, options.json)


if __name__ == "__main__":
    main()
