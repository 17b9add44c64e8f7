"""Whole tables in pages of a size that servers like, and back."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.interface import TableState
from psfleet.runtime.validation import check_ids
from psfleet.schema.table import TableSpec
from psfleet.shard.table_placement import dense_ranges, owned_rows
from psfleet.wire import segments
from psfleet.wire.segments import OutgoingSegment, PartState

Floats = NDArray[np.float32]

_PAGE_ROWS = 1 << 16
_PAGE_VALUES = 1 << 23


def page_size(spec: TableSpec) -> int:
    """Return rows (sparse) or values (dense) of a page at most."""
    return _PAGE_VALUES if spec.kind == "dense" else _PAGE_ROWS


def join_pages(spec: TableSpec, pages: Sequence[Sequence[PartState]]) -> TableState:
    """Return a table from the pages of every server; rows ordered by their ids."""
    step = max(page.step for server in pages for page in server)
    if spec.kind == "dense":
        return TableState(step, [plane.reshape(spec.shape) for plane in _join_dense(spec, pages)])
    every = [page for server in pages for page in server]
    ids = np.concatenate([page.ids for page in every if page.ids is not None])
    rows = np.concatenate([page.values for page in every])
    touched = np.concatenate([page.touched for page in every if page.touched is not None])
    scores = np.concatenate([page.scores for page in every if page.scores is not None])
    order = np.argsort(ids, kind="stable")
    planes = np.split(rows[order], 1 + len(spec.rule.slots), axis=1)
    return TableState(
        step,
        [np.ascontiguousarray(plane) for plane in planes],
        ids[order],
        touched[order],
        scores[order],
    )


def _join_dense(spec: TableSpec, pages: Sequence[Sequence[PartState]]) -> Floats:
    """Return the flattened array and its state [1 + slots, size]."""
    flat = np.empty((1 + len(spec.rule.slots), spec.size), np.float32)
    for (low, high), server in zip(dense_ranges(spec, len(pages)), pages, strict=True):
        flat[:, low:high] = np.concatenate([page.values for page in server], axis=1)
    return flat


def split_state(
    spec: TableSpec, state: TableState, servers: int
) -> Iterator[list[OutgoingSegment]]:
    """Yield pages of the state, each as one segment for every server."""
    return (_split_dense if spec.kind == "dense" else _split_rows)(spec, state, servers)


def _split_dense(
    spec: TableSpec, state: TableState, servers: int
) -> Iterator[list[OutgoingSegment]]:
    planes = np.stack([np.asarray(plane, np.float32).reshape(-1) for plane in state.values])
    ranges = dense_ranges(spec, servers)
    most = max(high - low for low, high in ranges)
    length = _PAGE_VALUES // len(planes) if spec.rule.unit == "element" else most
    for start in range(0, max(most, 1), max(length, 1)):
        yield [
            _dense_page(spec, state.step, planes[:, low:high], start, length)
            for low, high in ranges
        ]


def _split_rows(
    spec: TableSpec, state: TableState, servers: int
) -> Iterator[list[OutgoingSegment]]:
    ids = check_ids(spec, state.ids)
    rows = np.concatenate(state.values, axis=1, dtype=np.float32)
    touched = None if state.touched is None else np.asarray(state.touched, np.int64)
    scores = None if state.scores is None else np.asarray(state.scores, np.float32)
    for start in range(0, max(len(ids), 1), _PAGE_ROWS):
        page = slice(start, start + _PAGE_ROWS)
        masks = [owned_rows(spec, ids[page], server, servers) for server in range(servers)]
        yield [
            segments.write_state(
                PartState(
                    spec.key,
                    state.step,
                    rows[page][mine],
                    ids[page][mine],
                    None if touched is None else touched[page][mine],
                    None if scores is None else scores[page][mine],
                )
            )
            for mine in masks
        ]


def _dense_page(
    spec: TableSpec, step: int, planes: Floats, start: int, page: int
) -> OutgoingSegment:
    """Return values from `start` on of one server's part; none where that has ended."""
    start = min(start, planes.shape[1])
    part = planes[:, start : start + page]
    return segments.write_state(PartState(spec.key, step, part, start=start))
