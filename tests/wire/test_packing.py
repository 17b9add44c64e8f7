"""Packed values in frames: sizes, what comes back, and what a reader refuses."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psfleet.core.base.errors import FrameError, PsfleetError, UsageError
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import ShowClickEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net import frame, segments
from psfleet.core.net.gradient_compressor import GradientCompressor, repacked, value_format
from psfleet.core.net.v1.frame_pb2 import Header, Precision, Segment
from psfleet.core.net.value_formats import FORMATS, NUMBERED, SCALE_BLOCK, CompressedValues

pytestmark = pytest.mark.quick

DENSE = TableSpec("packed/dense", "dense", (600,), make_rule("sgd", {}))
ROWS = TableSpec("packed/rows", "sparse", (6,), make_rule("sgd", {}))
SHORT = TableSpec("packed/short", "sparse", (3,), make_rule("sgd", {}))
SPECS = {spec.key: spec for spec in (DENSE, ROWS, SHORT)}
IDS = np.array([3, -9, 2**62])
FORMS: list[Format] = ["bfloat16", "int8"]


def space(form: Format, *shape: int) -> CompressedValues:
    """Space for values of this shape."""
    return CompressedValues.over(
        np.empty(CompressedValues.size_of(form, shape), np.uint8), form, shape
    )


def rows_of(count: int = 3) -> Any:
    return np.random.default_rng(1).standard_normal((count, 6)).astype(np.float32)


def push_of(form: Format) -> tuple[Header, bytes]:
    """A push of rows and of a dense gradient in this form: its header and its payload."""
    compressor, header, parts = GradientCompressor(0, form), Header(), []
    rows, dense = rows_of(), np.linspace(-1, 1, 600, dtype=np.float32)
    for spec, ids, values in ((ROWS, IDS, rows), (DENSE, None, dense)):
        size = CompressedValues.size_of(form, values.shape)
        room = np.zeros(size + -size % 8, np.uint8)
        packed = CompressedValues.over(room[:size], form, values.shape)
        if ids is None:
            compressor.part(spec, 1, 0, values, packed)
        else:
            compressor.rows(spec, 1, ids, values, packed)
            parts.append(ids.tobytes())
        parts.append(room.tobytes())
        content = segments.VALUES if ids is None else segments.ID_ROWS
        precision = segments.PRECISIONS[form]
        header.segments.add(table=spec.key, content=content, count=len(values), precision=precision)
    return header, b"".join(parts)


def read(header: Header, payload: Any) -> list[Gradient]:
    return segments.read_request(header, memoryview(payload), SPECS.__getitem__).gradients


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_a_push_comes_back(form: Format, shift: int) -> None:
    """A reader finds ids and values to within a step, wherever the payload lies in memory."""
    header, payload = push_of(form)
    rows, dense = read(header, memoryview(bytes(shift) + payload)[shift:])
    assert rows.ids is not None
    assert rows.ids.tolist() == IDS.tolist()
    np.testing.assert_allclose(rows.values, rows_of(), atol=0.03)
    np.testing.assert_allclose(dense.values, np.linspace(-1, 1, 600), atol=0.01)
    whole = segments.read_request(header, memoryview(payload), SPECS.__getitem__)
    assert whole.gradient_bytes == {"int8": 666, "bfloat16": 1260}[form]


def test_sizes() -> None:
    """8 bits take a byte for a value and 4 for a row, or for 256 values of a dense array."""
    assert CompressedValues.size_of("int8", (10, 16)) == 10 * (16 + 4)
    assert CompressedValues.size_of("int8", (SCALE_BLOCK + 1,)) == SCALE_BLOCK + 1 + 2 * 4
    assert CompressedValues.size_of("bfloat16", (10, 16)) == 320
    assert CompressedValues.size_of("float32", (10, 16)) == 640


def test_which_form_a_table_takes() -> None:
    """Rows of up to 4 go in 16 bits; shows and clicks, elements and what amp rounds stay as they are."""
    assert value_format(ROWS, "int8") == "int8"
    assert value_format(SHORT, "int8") == "bfloat16"
    counted = TableSpec(
        "counted", "sparse", (6,), make_rule("sgd", {}), entry=ShowClickEntry("show", "click")
    )
    compressor, ids = GradientCompressor(0, "int8"), np.arange(3)
    assert compressor.form_of(ROWS, Gradient(ROWS.key, rows_of(), ids)) == "int8"
    assert compressor.form_of(counted, Gradient(counted.key, rows_of(), ids)) == "float32"
    assert compressor.form_of(DENSE, Gradient(DENSE.key, rows_of()[0], ids)) == "float32"
    rounded = Gradient(DENSE.key, rows_of()[0], None, precision="float16")
    assert compressor.form_of(DENSE, rounded) == "float32"


def test_every_precision_of_messages_is_a_format() -> None:
    """Each number of a message has one class, and comes back as exactly as it says."""
    assert {*NUMBERED} == {*Precision.values()}
    assert len(FORMATS) == len(NUMBERED)
    rows = np.array([[1.0, -0.5, 127 / 128, 0.0, 0.25, -1.0]], np.float32)
    errors: dict[Any, float] = {"float32": 0, "bfloat16": 2**-9, "float16": 0, "int8": 0.5 / 127}
    for name, bound in errors.items():
        packed = space(name, *rows.shape)
        packed.pack(rows)
        assert abs(packed.unpack() - rows).max() <= bound
        assert abs(packed.format.decode_gradient(packed, 1.0, "table") - rows).max() <= bound


@pytest.mark.parametrize("form", FORMS)
def test_a_value_that_was_packed_is_packed_to_itself(form: Format) -> None:
    """Rounding twice is rounding once; zeros stay zeros."""
    rows = rows_of(50)
    once = repacked(rows, form)
    np.testing.assert_allclose(repacked(once, form), once, rtol=1e-6)
    assert not repacked(np.zeros((4, 6), np.float32), form).any()


def test_two_workers_and_two_pushes_draw_differently() -> None:
    """What is drawn depends on table, worker and number of the push, and on nothing else."""

    def drawn(seat: int, number: int, spec: TableSpec = ROWS) -> bytes:
        packed = space("int8", 3, 6)
        GradientCompressor(seat, "int8").rows(spec, number, IDS, rows_of(), packed)
        return packed.unpack().tobytes()

    other = TableSpec("packed/other", "sparse", (6,), make_rule("sgd", {}))
    assert drawn(0, 1) == drawn(0, 1)
    assert len({drawn(0, 1), drawn(0, 2), drawn(1, 1), drawn(0, 1, other)}) == 4


@pytest.mark.parametrize("feeds", [True, False])
def test_small_values_beside_a_large_one_arrive_in_the_end(feeds: bool) -> None:
    """A thousandth of the largest value is below a step: the rest brings it later, or chance does. Cut
    into parts at a multiple of 256 an array is packed to the same values."""
    whole, cut = GradientCompressor(0, "int8", feeds), GradientCompressor(0, "int8", feeds)
    values, total = np.full(600, 0.001, np.float32), np.zeros(600)
    values[[0, 300, 599]] = 1
    for number in range(400):
        frames = []
        for compressor, ranges in ((whole, [(0, 600)]), (cut, [(0, 512), (512, 600)])):
            for low, high in ranges:
                packed = space("int8", high - low)
                compressor.part(DENSE, number, low, values[low:high], packed)
                frames.append(packed.unpack())
        np.testing.assert_array_equal(frames[0], np.concatenate(frames[1:]))
        total += frames[0]
    small = np.delete(total, [0, 300, 599])
    assert abs(small.mean() - 0.4) < 0.02
    if feeds:
        np.testing.assert_allclose(small, 0.4, atol=0.5 / 127 + 1e-3)
        whole.forget()
        zeros = space("int8", 600)
        whole.part(DENSE, 0, 0, np.zeros(600, np.float32), zeros)
        assert not zeros.unpack().any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_no_number_is_refused(bad: float) -> None:
    """The error quotes value and table; large finite gradients pass, whatever their sum."""
    compressor, values = GradientCompressor(0, "int8"), np.full(600, 3e38, np.float32)
    compressor.check(DENSE, values)
    values[7] = bad
    with pytest.raises(UsageError, match=f"packed/dense.*{bad}"):
        compressor.check(DENSE, values)


def test_a_sum_that_is_no_number_is_refused() -> None:
    """Rows whose gradients are finite and whose sum is not."""
    rows = np.full((1, 6), np.inf, np.float32)
    with pytest.raises(UsageError, match=r"packed/rows.*inf"):
        GradientCompressor(0, "int8").rows(ROWS, 1, np.array([1]), rows, space("int8", 1, 6))


@pytest.mark.parametrize("step", [np.nan, np.inf, -1.0])
def test_a_step_that_cannot_be_meant_is_refused(step: float) -> None:
    """Of a gradient: a negative step, an infinity, NaN."""
    header, payload = push_of("int8")
    broken = bytearray(payload)
    broken[24:28] = np.float32(step).tobytes()
    with pytest.raises(FrameError, match=r"packed/rows.*step"):
        read(header, broken)


def test_forms_that_do_not_go_together_are_refused() -> None:
    """Elements in 8 bits, values in float16, a precision that nobody knows."""
    elements = Segment(
        table=DENSE.key, content=segments.ELEMENTS, count=1, precision=segments.PRECISIONS["int8"]
    )
    with pytest.raises(FrameError, match="precision 3"):
        read(Header(segments=[elements]), bytes(8))
    for number in (2, 9):
        whole: Any = Segment(table=DENSE.key, content=segments.WHOLE)
        whole.precision = number
        with pytest.raises(FrameError, match=f"precision {number}"):
            segments.read_request(Header(segments=[whole]), memoryview(b""), SPECS.__getitem__)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
    st.integers(-20, 20),
    st.sampled_from([None, 0, 1, 5, 2**31, 2**62]),
)
def test_changed_pushes_give_values_or_a_sentence(
    form: Format, changes: list[tuple[int, int]], longer: int, count: int | None
) -> None:
    """Changed bytes, lengths and counts: gradients of the right shape, or an error of psfleet."""
    header, payload = push_of(form)
    broken = bytearray(payload)
    for place, byte in changes:
        broken[place % len(broken)] = byte
    broken = broken[: len(broken) + longer] if longer < 0 else broken + bytes(longer)
    if count is not None:
        header.segments[0].count = count
    again, view = frame.decode(frame.encode(header, [bytes(broken)]))
    actual: list[Gradient] = []
    with contextlib.suppress(PsfleetError):
        actual = read(again, view)
    for gradient in actual:
        spec = SPECS[gradient.table]
        assert gradient.values.dtype == np.float32
        assert gradient.values.shape[1:] == (() if spec.kind == "dense" else (6,))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 9), st.sampled_from([0, 1, 3]))
def test_changed_replies_give_values_or_a_sentence(body: bytes, count: int, number: int) -> None:
    """What a worker makes of an answer's bytes: rows of the table's width, or an error of psfleet."""
    segment: Any = Segment(table=ROWS.key, content=segments.ROWS, count=count)
    segment.precision = number
    message = frame.encode(Header(segments=[segment]), [body])
    try:
        [value] = segments.read_values(*frame.decode(message), SPECS.__getitem__)
    except PsfleetError:
        return
    rows = value.unpack() if isinstance(value, CompressedValues) else value
    assert rows.shape == (count, 6)


def test_pack_writes_nothing_beside_its_room() -> None:
    """Every byte of the buffer is written, none around it."""
    for form in FORMS:
        size = CompressedValues.size_of(form, (3, 6))
        around = np.full(size + 16, 0xAB, np.uint8)
        CompressedValues.over(around[8:-8], form, (3, 6)).pack(rows_of())
        assert (around[:8] == 0xAB).all()
        assert (around[-8:] == 0xAB).all()
