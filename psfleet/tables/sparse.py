"""A server's part of one sparse table: rows of weights and optimizer state by 64-bit id.

For snapshots: `rows`, `candidates` and `clock` hand out everything, `write`, `write_candidates` and
`set_clock` take it back. What has changed meanwhile:

    mark = table.mark()                     # from now on the table remembers what it removes
    whole = table.rows(table.ids())
    ...                                     # pushes, evictions, shrinks
    changes = table.changed_since(mark)     # ids to write again, ids to delete
    delta = table.rows(changes.ids)
    table.release(mark)
"""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError, UsageError
from psfleet.kernels.generate import sparse_kernels
from psfleet.kernels.hashing import drawn
from psfleet.kernels.initial import address_of, initializer_arguments
from psfleet.kernels.rule_text import RuleText, scalars_of, scratch_for
from psfleet.tables import ageing
from psfleet.tables.budget import Budget
from psfleet.tables.candidates import Waiting
from psfleet.tables.content import Candidates, Changes, Clock, Mark, Rows
from psfleet.tables.entry import (
    CapacityEntry,
    CountFilterEntry,
    ProbabilityEntry,
    ShowClickEntry,
    TTLEntry,
    part_of,
)
from psfleet.tables.freezing import SECTIONS, FrozenRows
from psfleet.tables.frozen import FrozenSparse
from psfleet.tables.history import History
from psfleet.tables.index import EVERY, ROW_BYTES, Index
from psfleet.tables.spec import TableSpec

__all__ = ["SparseTable"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_NONE = np.zeros(0, np.int64)
_SHRINKS = 1024  # that are remembered


class SparseTable:
    """Rows that appear when they are first updated, and go as the table's entry says.

    Attributes:
        spec: The table's definition.
        step: How many updates the table has had.
    """

    def __init__(
        self, spec: TableSpec, max_rows: int = 2**28, servers: int = 1, budget: Budget | None = None
    ) -> None:
        """An empty table.

        Args:
            spec: Its definition.
            max_rows: The most rows this part can hold, whatever the entry says.
            servers: How many parts the table has; limits of the entry are dealt to them.
            budget: The memory that this table shares with others; None: it takes what there is.

        Raises:
            UsageError: There is no memory for it.
        """
        rule, decay = spec.rule, spec.decay
        self.spec = spec
        self.step = 0
        self._worth = part_of(spec.entry, ShowClickEntry)
        self._ttl = part_of(spec.entry, TTLEntry)
        self._chance = part_of(spec.entry, ProbabilityEntry)
        capacity = part_of(spec.entry, CapacityEntry)
        self._evicts = capacity is not None and capacity.evicts
        self._width = RuleText(rule, False, False, spec.dim).row_width()
        width = self._width + spec.scores
        if capacity is not None:
            max_rows = min(max_rows, _limit(capacity, 4 * width + ROW_BYTES, servers))
        self._index = Index(width, max_rows, marks=spec.every_row)
        filter_ = part_of(spec.entry, CountFilterEntry)
        self._waiting = Waiting(filter_, servers) if filter_ is not None else None
        self._kernels = sparse_kernels(
            rule, bool(decay.l1), bool(decay.l2), spec.dim, spec.every_row, spec.scores
        )
        self._initial = initializer_arguments(spec.initializer, spec.seed, spec.name)
        self._ring = np.empty(128, np.int64)
        self._scratch = scratch_for(rule)
        self._zeros = np.zeros(spec.dim, np.float32)
        self._entries: tuple[Ids, Ids] | None = None
        self._shrinks: tuple[int, ...] = ()
        self._ticks: tuple[tuple[float, int], ...] = ()
        self._history = History()
        self._budget = Budget() if budget is None else budget
        self._budget.check(spec.name, self._taken(0), "be made")
        self._budget.take(spec.name, self._taken(0))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Memory of rows, state and index, and of the ids that wait for a row."""
        return self._index.bytes + (0 if self._waiting is None else self._waiting.index.bytes)

    def pull_into(self, ids: Ids, out: Floats) -> None:
        """Write the weights of ids to `out`; of an unknown id its first values. Adds no row.

        Args:
            ids: int64 [n], repeats allowed, any alignment.
            out: float32 [n, dim], any alignment.
        """
        ids = self._checked(ids, out, self.spec.dim)
        if not out.flags.c_contiguous:
            raise ShapeError(f"table {self.spec.name!r}: the rows of `out` must lie side by side")
        with self._lock:
            self._kernels.pull(
                self._index.address,
                address_of(ids),
                len(ids),
                address_of(out),
                *self._initial,
                address_of(self._ring),
            )

    def push(self, ids: Ids, gradients: Floats, learning_rate: float) -> None:
        """Update rows, adding those of unknown ids (that the entry admits) with their first values.

        Args:
            ids: int64 [n], no id twice, any alignment.
            gradients: float32 [n, dim], any alignment; in a table that counts shows and clicks
                [n, dim + 2], with those behind each gradient.
            learning_rate: Of this push.

        Raises:
            UsageError: The table is full; nothing was changed.
        """
        ids = self._checked(ids, gradients, self.spec.push_width)
        gradients = np.ascontiguousarray(gradients)
        with self._lock:
            if self.spec.entry is None:
                self._check_room([ids])
            else:
                ids, gradients = self._admitted(ids, gradients)
            self._update(ids, gradients, learning_rate)
            self._age()

    def _update(self, ids: Ids, gradients: Floats, learning_rate: float) -> None:
        rule = self.spec.rule
        if self.spec.every_row:
            self._index.keep_sections(0, SECTIONS)
        else:
            self._index.keep(ids)
        scalars = scalars_of(rule, self.spec.decay, learning_rate, self.step + 1)
        turn = self.step % rule.turns if rule.turns else 0
        self.step += 1
        self._kernels.push(
            self._index.address,
            address_of(ids),
            len(ids),
            address_of(gradients),
            address_of(scalars),
            turn,
            self.step,
            *self._initial,
            address_of(self._ring),
            address_of(self._scratch),
        )
        self._account()
        if self.spec.every_row:
            self._kernels.rest(
                self._index.address,
                address_of(scalars),
                turn,
                self.step,
                address_of(self._zeros),
                address_of(self._scratch),
            )

    # -- who gets a row ------------------------------------------------------------------------

    def check_room(self, parts: Sequence[Ids]) -> None:
        """Refuse ids that the table cannot all take with its next update.

        Each counts once; those with a row do not count, nor those that the entry does not admit.

        Raises:
            UsageError: The table would be full.
        """
        if not self._surely_fit(sum(map(len, parts))):  # else there is no need to wait for a pull
            with self._lock:
                self._check_room(parts)

    def reserve(self, rows: int) -> None:
        """Have memory for so many rows in all made now, so that no push waits for it.

        Raises:
            UsageError: There is not so much memory for the table.
        """
        with self._lock:
            more = max(rows - len(self._index), 0)
            self._budget.check(self.spec.name, self._taken(more), f"reserve {rows} rows")
            self._index.reserve(rows)
            self._budget.take(self.spec.name, self._taken(0))

    def _surely_fit(self, count: int) -> bool:
        fits = count <= self._index.spare and self._index.has_lines(count)
        return fits and self._budget.fits(self.spec.name, self._taken(count))

    def _taken(self, more: int) -> int:
        """Memory that the table takes at most once `more` unknown ids have been pushed."""
        rows = max(
            min(more, self._index.max_rows - len(self._index)), 0
        )  # others take their places
        return self._index.taken(rows) + (
            0 if self._waiting is None else self._waiting.index.taken(min(more, self._waiting.room))
        )

    def _account(self) -> None:
        """Say what the table takes now, and have some of what is left made ready for it."""
        if self._budget.limit is None:
            self._index.keep_ahead()
        else:
            self._budget.take(self.spec.name, self._taken(0))
            self._index.keep_ahead(self._budget.room())

    def surplus(self, parts: Sequence[Ids]) -> Ids:
        """Rows that have to go so that memory suffices for the next update, which names these ids.

        Ids of the rows pushed the longest time ago, a sixteenth of the table at least, none of `parts`. Empty
        if memory suffices, if the table does not let rows go, or if letting all others go were not enough.
        """
        if not self._evicts or self._surely_fit(sum(map(len, parts))):
            return _NONE
        with self._lock:
            ids = np.unique(np.concatenate(parts))
            slots, _ = self._index.locate(ids)
            kept = self._rowed(ids, slots)
            new = int(np.count_nonzero(kept & (slots == 0)))
            short = new - self._affordable(new)
            if not 0 < short <= len(self._index) - int(np.count_nonzero(slots)):
                return _NONE
            count = max(short, len(self._index) // 16)
            oldest = self._index.oldest(self.step, count + len(ids), 0)
            return oldest[~np.isin(oldest, ids)][:count]

    def _affordable(self, most: int) -> int:
        """How many rows, `most` at most, may be added within the memory that there is."""
        low, high = -1, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._budget.fits(self.spec.name, self._taken(middle)):
                low = middle
            else:
                high = middle - 1
        return max(low, min(most, self._index.free))

    def _check_room(self, parts: Sequence[Ids]) -> None:
        if self._surely_fit(sum(map(len, parts))):
            return
        ids = np.unique(np.concatenate(parts))
        slots, _ = self._index.locate(ids)
        kept = self._rowed(ids, slots)
        new = ids[kept & (slots == 0)]
        self._refuse_beyond(int(np.count_nonzero(kept)), new, int(np.count_nonzero(slots == 0)))

    def _refuse_beyond(self, named: int, new: Ids, unknown: int) -> None:
        """Refuse an update of `named` rows, of which these are new, if there is no room for it.

        unknown: how many ids there are for which a row or a place to wait is needed.
        """
        most, there = self._index.max_rows, len(self._index)
        if self._evicts and named > most:
            raise UsageError(
                f"table {self.spec.name!r} holds at most {most} rows on this server and was asked "
                f"to set {named} at once; push fewer at a time or give it more room"
            )
        if not self._evicts and len(new) > most - there:
            raise UsageError(
                f"table {self.spec.name!r} is full: it holds {there} rows of "
                f"at most {most} and was asked to add {len(new)}"
            )
        if not (self._index.has_lines(len(new)) or self._index.can_hold(new)):
            raise UsageError(
                f"table {self.spec.name!r} cannot add {len(new)} ids whose hashes are so much "
                "alike that its index would outgrow its place; renumber them"
            )
        more = len(new) if self._waiting is None else unknown
        self._budget.check(self.spec.name, self._taken(more), f"add {len(new)} rows")

    def _admitted(self, ids: Ids, gradients: Floats) -> tuple[Ids, Floats]:
        """What is left of a push without the unknown ids that get no row; there is room for the rest."""
        admits_all = self._chance is None and self._waiting is None
        if admits_all and self._surely_fit(len(ids)):
            return ids, gradients
        slots, unknown = self._index.locate(ids)
        kept = self._rowed(ids, slots) if unknown else np.ones(len(ids), np.bool_)
        new = ids[kept & (slots == 0)]
        self._refuse_beyond(int(np.count_nonzero(kept)), new, unknown)
        if self._waiting is not None and unknown:
            self._waiting.count(np.ascontiguousarray(ids[slots == 0]), self.step + 1)
        if not kept.all():
            ids, gradients = ids[kept], gradients[kept]
        if self._evicts and len(new) > self._index.max_rows - len(self._index):
            self._index.touch(ids, self.step + 1)
            self._drop(ageing.leaving(self._index, self.step + 1, len(new), self._index.max_rows))
        return ids, gradients

    def _rowed(self, ids: Ids, slots: Ids) -> NDArray[np.bool_]:
        """Which ids have a row after the next update, if that names them."""
        kept: NDArray[np.bool_] = slots != 0
        if self._chance is not None:
            stream = int(self._initial[3])
            return kept | drawn(ids, self._chance.probability, stream, self.step + 1)
        if self._waiting is None:
            return np.ones(len(ids), np.bool_)
        unknown = np.flatnonzero(~kept)
        kept[unknown] = self._waiting.passing(np.ascontiguousarray(ids[unknown]))
        return kept

    # -- who loses it --------------------------------------------------------------------------

    def remove(self, ids: Ids) -> int:
        """Forget rows; returns how many were there. Their ids start anew when next updated."""
        ids = np.ascontiguousarray(ids)
        with self._lock:
            if self._waiting is not None:
                self._waiting.index.remove(ids)
            slots, _ = self._index.locate(ids)
            return self._drop(np.unique(ids[slots != 0]))

    def evict(self, count: int) -> int:
        """Remove the `count` rows that were pushed the longest time ago; returns how many went."""
        with self._lock:
            return self._drop(self._index.oldest(self.step, count, 0))

    @property
    def tick_every(self) -> float:
        """How many seconds should lie between calls of `tick`; 0: the table knows no time."""
        return 0.0 if self._ttl is None else self._ttl.seconds / 16

    def tick(self, seconds: float) -> int:
        """So much time has passed; returns how many rows went because of that."""
        ttl = 0.0 if self._ttl is None else self._ttl.seconds
        if not ttl:
            return 0
        with self._lock:
            now = (self._ticks[-1][0] if self._ticks else 0.0) + seconds
            ticks = (*self._ticks, (now, self.step))
            over = [step for time, step in ticks if time <= now - ttl]
            self._ticks = ticks[max(len(over) - 1, 0) :]
            return self._sweep(EVERY, self.step - over[-1]) if over else 0

    def shrink(self, threshold: float | None = None, unseen: int | None = None) -> int:
        """Remove rows that are worth little or not in use; returns how many went.

        Args:
            threshold: A table that counts shows and clicks: the least score of a row that stays; None:
                its entry's. Other tables: as `unseen`.
            unseen: Rows that no push has named since the unseen-th shrink before this one go. None:
                the entry's delete_after_unseen; in other tables none go.
        """
        with self._lock:
            gone = 0
            if self._worth is not None:
                gone = self._decay(self._worth, threshold)
                unseen = self._worth.delete_after_unseen if unseen is None else unseen
            elif unseen is None and threshold is not None:
                unseen = int(threshold)
            if unseen is not None and 0 < unseen <= len(self._shrinks):
                gone += self._sweep(EVERY, self.step - self._shrinks[-unseen])
            self._shrinks = (*self._shrinks, self.step)[-_SHRINKS:]
            return gone

    def _decay(self, worth: ShowClickEntry, threshold: float | None) -> int:
        least = worth.delete_threshold if threshold is None else threshold
        factors = (worth.decay_rate, worth.nonclk_coeff, worth.click_coeff)
        return self._drop(self._index.decay(self._width, factors, least))

    def _age(self) -> None:
        """After an update: let rows go whose time has come, and keep stamps in range."""
        if self._ttl is not None and self._ttl.steps:
            first, last = ageing.due(self.step, self._ttl.steps)
            if first < last:
                self._sweep((first, last), self._ttl.steps)
        if self.step % ageing.SETTLED == 0:
            self._restamp(self.step, self.step)

    def _restamp(self, old: int, new: int) -> None:
        self._index.restamp(old, new)
        if self._waiting is not None:
            self._waiting.index.restamp(old, new)

    def _sweep(self, segments: tuple[int, int], least: int) -> int:
        """Forget rows and waiting ids of these segments that are at least so many steps old."""
        if self._waiting is not None:
            waiting = self._waiting.index
            waiting.remove(waiting.aged(self.step, least, segments)[0])
        return self._drop(self._index.aged(self.step, least, segments)[0])

    def _drop(self, ids: Ids) -> int:
        """Remove rows that are there; the one place where any goes."""
        if not len(ids):
            return 0
        self._entries = None
        self._history.add(removed=ids)
        return self._index.remove(ids)

    # -- reading and writing -------------------------------------------------------------------

    def ids(self) -> Ids:
        """Of every row, ascending: int64 [n]."""
        with self._lock:
            return self._ascending()[0].copy()

    def rows(self, ids: Ids) -> Rows:
        """The rows of these ids with all that is known of them; ids without a row are left out."""
        ids = np.ascontiguousarray(ids, np.int64)
        with self._lock:
            slots, _ = self._index.locate(ids)
            ids, slots = ids[slots != 0], slots[slots != 0]
            rows = self._index.gather(slots)
            touched = self._index.touched(ids, self.step)
        return self._as_rows(ids, rows, touched)

    def write(self, rows: Rows) -> None:
        """Set rows from what `rows` gave, adding unknown ids and leaving other rows alone.

        Set the clock first, so that a table that evicts knows how old rows are.

        Raises:
            UsageError: The table is full; nothing was changed.
        """
        ids, packed = np.ascontiguousarray(rows.ids, np.int64), self._packed(rows)
        touched = np.ascontiguousarray(rows.touched, np.int64)
        with self._lock:
            slots, _ = self._index.locate(ids)
            new = ids[slots == 0]
            self._refuse_beyond(len(ids), new, len(new))
            if self._evicts:
                later = max(self.step, int(touched.max(initial=0))) + 1
                self._drop(ageing.leaving(self._index, later, len(ids), self._index.max_rows))
            slots = self._index.place(ids, touched)
            self._index.scatter(slots, packed)
            self._history.add(written=ids)
            self._account()

    def candidates(self) -> Candidates:
        """The ids that have been pushed too seldom for a row."""
        with self._lock:
            return Candidates() if self._waiting is None else self._waiting.read(self.step)

    def write_candidates(self, candidates: Candidates) -> None:
        """Set what `candidates` gave, leaving others alone; of too many the latest."""
        if self._waiting is None:
            if len(candidates):
                raise UsageError(
                    f"table {self.spec.name!r} gives every id a row; it has no place for "
                    f"{len(candidates)} that wait for one"
                )
            return
        with self._lock:
            self._waiting.write(candidates, self.step)

    @property
    def clock(self) -> Clock:
        """What the table knows of time."""
        return Clock(self.step, self._shrinks, self._ticks)

    def set_clock(self, clock: Clock) -> None:
        """Set it to what `clock` was; rows keep the steps at which they were pushed."""
        with self._lock:
            if clock.step != self.step:
                self._restamp(self.step, clock.step)
                self._history.era += 1
            self.step = clock.step
            self._shrinks, self._ticks = clock.shrinks, clock.ticks

    def page(self, offset: int, limit: int) -> Rows:
        """Some of `rows`, in ascending order of id."""
        with self._lock:
            ids = self._ascending()[0][offset : offset + limit].copy()
        return self.rows(ids)

    def state(self, offset: int, limit: int) -> tuple[Ids, Floats]:
        """A page of ids and `Rows.values`, in ascending order of id."""
        with self._lock:
            ids, slots = (array[offset : offset + limit] for array in self._ascending())
            rows = self._index.gather(slots)[:, : self._width]
        return ids.copy(), self._spread(rows)

    def restore(
        self, ids: Ids, values: Floats, touched: Ids | None = None, scores: Floats | None = None
    ) -> None:
        """`write` for rows of which less may be known: then as if the last update had named them."""
        if touched is None:
            touched = np.full(len(ids), self.step)
        if scores is None:
            scores = np.zeros((len(ids), self.spec.scores), np.float32)
        self.write(Rows(ids, values, touched, scores))

    def restore_step(self, step: int) -> None:
        """Set how many updates the table has had, and nothing else of its clock."""
        self.set_clock(Clock(step, self._shrinks, self._ticks))

    def freeze(self, only: Ids | None = None, removed: Ids | None = None) -> FrozenSparse:
        """The rows as they are now (of the ids `only`), to be read while the table goes on.

        Costs one byte a row now; see psfleet.tables.freezing. Close it when it is read.
        """
        with self._lock:
            waiting = Candidates() if self._waiting is None else self._waiting.read(self.step)
            rows = FrozenRows(self._index, self._lock, lambda: self.step, only)
            self._index.views.append(rows)
            clock, forget = self.clock, self._index.views.remove
        return FrozenSparse(self.spec, clock, rows, waiting, removed, self._as_rows, forget)

    def _as_rows(self, ids: Ids, stored: Floats, touched: Ids) -> Rows:
        scores = np.ascontiguousarray(stored[:, self._width :])
        return Rows(ids, self._spread(stored[:, : self._width]), touched, scores)

    # -- what has changed ----------------------------------------------------------------------

    def mark(self) -> Mark:
        """A point to which `changed_since` looks back; until its release, removed ids are kept."""
        with self._lock:
            return Mark(self._history.era, self.step, self._history.mark())

    def changed_since(self, mark: Mark) -> Changes:
        """Which rows are new or may differ since the mark, and which are there no more.

        Costs one look at the index (13 ns a row, measured on a busy machine), and nothing while the table
        trains. Candidates and the clock are not part of it: they are small, and written whole.
        """
        with self._lock:
            removed, written = self._history.since(mark.event)
            everything = mark.era != self._history.era or (
                self.spec.every_row and self.step > mark.step
            )
            # A row whose stamp is the mark's own step was pushed before the mark.
            most = 2**32 if everything else self.step - mark.step - 1
            changed = self._index.aged(self.step, most=most)[0]
            back = self._index.locate(written)[0] != 0
            gone = self._index.locate(removed)[0] == 0
        return Changes(np.union1d(changed, written[back]), removed[gone])

    def release(self, mark: Mark) -> None:
        """Nobody will ask for changes since this mark again."""
        with self._lock:
            self._history.release(mark.event)

    # -- helpers -------------------------------------------------------------------------------

    def _checked(self, ids: Ids, rows: Floats, width: int) -> Ids:
        if ids.ndim != 1 or ids.dtype != np.int64:
            raise ShapeError(
                f"table {self.spec.name!r}: ids are {ids.dtype} {ids.shape}, they must be int64 [n]"
            )
        if rows.shape != (len(ids), width) or rows.dtype != np.float32:
            raise ShapeError(
                f"table {self.spec.name!r}: rows are {rows.dtype} {rows.shape}, they must "
                f"be float32 {(len(ids), width)}"
            )
        return np.ascontiguousarray(ids)

    def _ascending(self) -> tuple[Ids, Ids]:
        """Every id in order, and its slot; kept for the next page."""
        if self._entries is None or len(self._entries[0]) != len(self._index):
            self._entries = self._index.entries()
        return self._entries

    def _columns(self) -> list[tuple[int, int]]:
        """(start, width) of weights and each slot within a stored row."""
        dim, start, columns = self.spec.dim, 0, []
        for width in [dim, *(1 if slot.per_unit else dim for slot in self.spec.rule.slots)]:
            columns.append((start, width))
            start += width
        return columns

    def _spread(self, rows: Floats) -> Floats:
        """Stored rows -> rows in which every slot has dim columns."""
        dim = self.spec.dim
        if all(width == dim for _, width in self._columns()):
            return np.ascontiguousarray(rows)
        parts = [
            np.broadcast_to(rows[:, start : start + width], (len(rows), dim))
            for start, width in self._columns()
        ]
        return np.concatenate(parts, axis=1)

    def _packed(self, rows: Rows) -> Floats:
        """The opposite of `_spread`, with the scores behind."""
        dim, count, scores = self.spec.dim, len(rows.ids), self.spec.scores
        width = dim * (1 + len(self.spec.rule.slots))
        self._checked(rows.ids, rows.values, width)
        if rows.touched.shape != (count,) or rows.scores.shape != (count, scores):
            raise ShapeError(
                f"table {self.spec.name!r}: {count} rows come with touched {rows.touched.shape} "
                f"and scores {rows.scores.shape}; they must be {(count,)} and {(count, scores)}"
            )
        columns = enumerate(self._columns())
        parts = [rows.values[:, i * dim : i * dim + width] for i, (_, width) in columns]
        packed = np.concatenate([*parts, rows.scores.astype(np.float32)], axis=1)
        return np.ascontiguousarray(packed)


def _limit(capacity: CapacityEntry, row: int, servers: int) -> int:
    """How many rows of so many bytes one of the servers may hold."""
    limits = [capacity.rows, capacity.bytes // row if capacity.bytes else 0]
    return min([max(-(-limit // servers), 1) for limit in limits if limit], default=2**32)
