"""Trains scikit-learn's models on the same numbers as flights.py, as a baseline.

python examples/flights_baselines.py        # needs scikit-learn; a minute or two
"""

import time
from typing import Any

import flights_data
import numpy as np
from flights_data import FIELDS, NUMBERS, Flights
from scipy import sparse
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from psfleet import metrics

TRAIN, CHOOSE, TEST = range(1, 10), range(10, 11), range(11, 13)
SMALL = 3  # carrier, origin and destination: the fields that are categories for the trees too


def one_hot(flights: Flights, with_numbers: bool) -> Any:
    """Return a sparse matrix with a column per id, followed by the numbers if `with_numbers` is set."""
    codes = np.unique(flights.ids, return_inverse=True)[1].ravel()
    starts = np.arange(0, len(codes) + 1, len(FIELDS))
    ids = sparse.csr_matrix((np.ones(len(codes), np.float32), codes, starts))
    return sparse.hstack([ids, flights.numbers], format="csr") if with_numbers else ids


def with_codes(flights: Flights) -> Any:
    """Return the numbers, and the fields with few values as categories."""
    codes = [np.unique(column, return_inverse=True)[1] for column in flights.ids.T[:SMALL]]
    return np.column_stack([flights.numbers, *codes]).astype(np.float32)


def tell(name: str, model: Any, table: Any, flights: Flights) -> None:
    """Fit a model on January to September. Prints AUC and log loss on October and on the test months."""
    began, rows = time.perf_counter(), flights.rows(TRAIN)
    model.fit(table[rows], flights.late[rows, 0])
    line = f"{name:44}"
    for months in (CHOOSE, TEST):
        rows = flights.rows(months)
        predictions, late = model.predict_proba(table[rows])[:, 1], flights.late[rows]
        line += f"  {metrics.auc(late, predictions):.4f} {metrics.log_loss(late, predictions):.4f}"
    print(f"{line}   {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    """Fit three models, and print a line for each."""
    flights = flights_data.load().ranked(TRAIN)
    linear = LogisticRegression(C=0.1, max_iter=200)
    trees = HistGradientBoostingClassifier(
        max_iter=150,
        learning_rate=0.06,
        max_leaf_nodes=15,
        min_samples_leaf=300,
        l2_regularization=20,
        random_state=1,
        categorical_features=list(range(len(NUMBERS), len(NUMBERS) + SMALL)),
    )
    print(f"{'':44}  October        November, December")
    tell("logistic regression, ids only", linear, one_hot(flights, False), flights)
    tell("logistic regression, ids and numbers", linear, one_hot(flights, True), flights)
    tell("gradient boosting, numbers and categories", trees, with_codes(flights), flights)


if __name__ == "__main__":
    main()
