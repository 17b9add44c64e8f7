"""Files of other programs, as `psfleet ckpt import` reads them: each row gets its own id, or the file is
refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.checkpoint import export, import_rows, read_rows
from psfleet.core.base.errors import PsfleetError
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.features import hashed
from tests.refusals import cases

VALUE: NDArray[np.float32] = np.linspace(0, 1, 6, dtype=np.float32).reshape(3, 2)
IDS = [5, -3, 2**60]
TABLE = TableSpec("t", "sparse", (2,), Adam())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parquet(**columns: Any) -> str:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), "a.parquet", row_group_size=2)
    return "a.parquet"


def parquet_of(kind: str, value: Any) -> str:
    """A file with IDS and a column of this type of Arrow."""
    pa = pytest.importorskip("pyarrow")
    types = {
        "list": pa.list_(pa.float32()),
        "large": pa.large_list(pa.float64()),
        "fixed": pa.list_(pa.float32(), 2),
        "half": pa.list_(pa.float16()),
    }
    value = np.asarray(value, np.float16).tolist() if kind == "half" else value
    return parquet(ids=IDS, value=pa.array(value, types[kind]))


def text(content: str, name: str = "a.vec") -> str:
    Path(name).write_bytes(content.encode())
    return name


def saved(thing: Any) -> str:
    pytest.importorskip("torch").save(thing, "a.pt")
    return "a.pt"


def tensor(*, dtype: str = "float32", **more: bool) -> Any:
    torch = pytest.importorskip("torch")
    value = torch.tensor(VALUE, dtype=getattr(torch, dtype))
    return torch.nn.Parameter(value) if more else value


def safetensors(dtype: str) -> str:
    pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"other": tensor().T.contiguous(), "emb": tensor(dtype=dtype)}, "a.safetensors")
    return "a.safetensors"


def npz(**arrays: Any) -> str:
    np.savez("a.npz", **arrays)
    return "a.npz"


ROWS = VALUE.tolist()
COARSE = np.array([[0, 0.2001953125], [0.400390625, 0.6015625], [0.80078125, 1]], np.float32)
NESTED = {"epoch": 3, "state_dict": {"emb.weight": 0}, "optimizer": {"state": {0: {"step": 1}}}}


@pytest.mark.parametrize(
    ("write", "name", "value"),
    [
        (lambda: parquet_of("list", ROWS), "", VALUE),
        (lambda: parquet_of("large", ROWS), "", VALUE),
        (lambda: parquet_of("fixed", ROWS), "", VALUE),
        (lambda: parquet_of("half", COARSE), "", COARSE),
        (
            lambda: parquet(ids=IDS, emb=ROWS, tags=[["a"], None, ["b", "c"]], age=[1, None, 3]),
            "",
            VALUE,
        ),
        (lambda: parquet(ids=IDS, emb=ROWS, history=[[1.0], None, [2.0, 3.0]]), "emb", VALUE),
        (lambda: npz(ids=np.array(IDS, ">i8"), emb=VALUE.astype(">f8")), "", VALUE),
        (lambda: npz(ids=np.array([5, 7, 9], ">u2"), emb=np.asfortranarray(VALUE)), "", VALUE),
        (lambda: safetensors("float64"), "emb", VALUE),
        (lambda: safetensors("float16"), "emb", VALUE.astype(np.float16).astype(np.float32)),
        (lambda: saved(tensor()), "", VALUE),
        (lambda: saved(tensor(is_parameter=True)), "", VALUE),
        (lambda: saved({"emb.weight": tensor(is_parameter=True)}), "", VALUE),
        (lambda: saved({**NESTED, "state_dict": {"emb.weight": tensor()}}), "", VALUE),
        (
            lambda: saved({"model": {"emb.weight": tensor()}, "exp_avg": tensor() + 1}),
            "emb.weight",
            VALUE,
        ),
    ],
)
def test_files_of_arrays(write: Callable[[], str], name: str, value: NDArray[np.float32]) -> None:
    """Whatever the type of the numbers and however they are nested, each row has its bits and its id."""
    rows = read_rows(write(), name)
    assert rows.value.dtype == np.float32
    assert rows.value.tobytes() == value.tobytes()
    assert rows.ids.dtype == np.int64
    assert rows.ids.tolist() in (IDS, [5, 7, 9], [0, 1, 2])


@pytest.mark.parametrize("write", [safetensors, lambda dtype: saved({"emb": tensor(dtype=dtype)})])
def test_bfloat16(write: Callable[[str], str]) -> None:
    """Weights in bfloat16 come as torch reads them. An unknown number format spoils no other array."""
    value = tensor(dtype="bfloat16").float().numpy()
    assert read_rows(write("bfloat16"), "emb").value.tobytes() == value.tobytes()
    if write is safetensors:
        assert read_rows(write("float8_e4m3fn"), "other").value.shape == (2, 3)
        with pytest.raises(PsfleetError, match=r"'a.safetensors': 'emb' cannot be read: .*float8"):
            read_rows("a.safetensors", "emb")


def test_nested_ids() -> None:
    """Rows in a dict have the ids beside them."""
    torch = pytest.importorskip("torch")
    path = saved({"state_dict": {"emb.weight": tensor(), "emb.ids": torch.tensor(IDS)}})
    assert read_rows(path).ids.tolist() == IDS


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("the\t0 0.2\nof\t0.4 0.6\n3\t0.8 1\n", ["the", "of", "3"]),
        ("the\t0\t0.2\nof\t0.4\t0.6\na b\t0.8\t1\n", ["the", "of", "a b"]),
        ("3\t2\nthe\t0\t0.2\nof\t0.4\t0.6\n3\t0.8\t1\n", ["the", "of", "3"]),
        (
            "the 0 0.2\r\n. . . 0.4 0.6\r\nat me@x.com 0.8 1\r\n\r\n",
            ["the", ". . .", "at me@x.com"],
        ),
        (". . 0 0.2\nof .4 6e-1\n3 0.8 +1", [". .", "of", "3"]),
        ("3 2\n. . 0 0.2\nof 0.4 0.6\n3 0.8 1\n", [". .", "of", "3"]),
        ("\ufeffthe 0 0.2\n\x85 0.4 0.6\nx\x0by 0.8 1 \n", ["the", "\x85", "x\x0by"]),
        ("nan 0 0.2\n12_34 0.4 0.6\n\u0661 0.8 1\n", ["nan", "12_34", "\u0661"]),
    ],
)
def test_texts_of_words(lines: str, words: list[str]) -> None:
    """Blanks or tabs, with counts or without; words may have blanks and signs that end lines elsewhere."""
    rows = read_rows(text(lines), buckets=1 << 40)
    assert rows.ids.tolist() == hashed(words, 1 << 40).tolist()
    assert np.allclose(rows.value, VALUE)


def test_a_first_word_is_no_count() -> None:
    """`7 0.5`, and `7 3` before rows of one number, are rows; `3 1` before three words of one are counts."""
    assert read_rows(text("7 0.5\nx 0.25\n")).value.tolist() == [[0.5], [0.25]]
    assert read_rows(text("7 3\nx 0.25\n")).value.tolist() == [[3], [0.25]]
    assert read_rows(text("3 1\nx 0.25\ny 1\nz 2\n")).value.tolist() == [[0.25], [1], [2]]


REFUSED = r"""
parquet_of("list", [[1, 2], None, [3, 4]])  # 'value' cannot be read: row 1 is null
parquet_of("fixed", [[1, 2], None, [3, 4]])  # 'value' cannot be read: row 1 is null
parquet_of("list", [[1, 2], [3], [4, 5, 6]])  # row 1 has 1 numbers, the rows before it 2
parquet_of("large", [[1, 2], [], [4, 5]])  # row 1 has 0 numbers, the rows before it 2
parquet_of("list", [[1, 2], [3, 4], [5, None]])  # row 2 has a null
parquet_of("fixed", [[1, 2], [3, 4], [None, 5]])  # row 2 has a null
parquet(emb=[[1.0, 2.0], None])  # 'emb' cannot be read: row 1 is null
parquet(ids=[1, None, 3], value=ROWS)  # 'ids': id nan is not a whole number
parquet(ids=[1.0, 2.0**53, 3.0], value=ROWS)  # 'ids': id 9007199254740992.0 is a float that may
parquet(ids=["a", "b", "c"], value=ROWS)  # 'ids': ids have dtype object
npz(ids=np.array([1, 2, 2**63], ">u8"), value=VALUE)  # id 9223372036854775808 is beyond int64
npz(ids=np.ones((3, 1), np.int64), value=VALUE)  # 3 rows and ids of shape \(3, 1\)
npz(ids=[4, 1, 4], value=VALUE)  # two rows of the id 4
npz(ids=IDS, x=VALUE, y=VALUE)  # several arrays, or none, .* of float.*: x, y
npz(value=np.array([[1.0, 1e39]]))  # the row of id 0 is not finite
npz(value=VALUE.astype(np.complex64))  # name one of float.*there is none
npz(value=np.ones((2, 2), object))  # cannot be read
saved({"a": {"w": tensor()}, "b": {"w": tensor()}})  # name one of float .*: a.w, b.w
saved({"n": 1})  # name one of float .*there is none
saved(pytest.importorskip("torch").nn.Embedding(3, 2))  # save the state_dict\(\)
pytest.importorskip("torch") and text("not a pickle", "a.pt")  # is no file of torch
text("the\t1\t2\nof\t1\n")  # line 2: 'of' has 1 numbers, the words before it 2
text("the 1 2\nof 1 2 3\n")  # line 2: 'of' has 3 numbers, the words before it 2
text("3 2\nthe 1 2\nof 1 2\n")  # begins with the line '3 2', and 2 words follow
text("3 2\n")  # begins with the line '3 2', and 0 words follow
text("the,1,2\n")  # line 1: 'the,1,2' must be a word, a blank or tab, and numbers
text("the\n")  # line 1: 'the' must be a word
text("the 1 2\n\t1\t2\n")  # line 2: .* must be a word
text("the 1 1_0\n")  # line 1: 'the 1 1_0' must be a word
text("the 1 2\nof 1 1_0\n")  # line 2: '1_0' is no number
text("the 1 2\nof 1 \uff12\n")  # line 2: '\uff12' is no number
text("the 1 2\nof 1 x\n")  # line 2: could not convert string to float: 'x'
text("the 1 2\nof 1 nan\n")  # the row of 'of' is not finite
text("the 1 nan\n")  # the row of 'the' is not finite
text("the 1 1e39\n")  # the row of 'the' is not finite
text("of 1 2\nthe 1 2\nof 3 4\n")  # two rows of the id .*, of 'of' and 'of'
text("")  # has no words
"a.h5"  # the ending '.h5'; use .npy
"a.npy"  # No such file
"""


@pytest.mark.parametrize(("line", "message"), cases(REFUSED))
def test_no_row_gets_anothers_id(line: str, message: str) -> None:
    """What is missing, ragged, repeated or no number is refused in a sentence that names its place."""
    file = eval(line)
    with pytest.raises(PsfleetError, match=message) as error:
        read_rows(file)
    assert "'a." in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moment1": VALUE[:2]}, r"the state 'moment1' of table 't', which has the shape \(2, 2\)"),
        (
            {"moment2": np.full((3, 2), np.nan)},
            "the state 'moment2' of the row of id 5 is not finite",
        ),
    ],
)
def test_state_that_does_not_fit(change: dict[str, Any], message: str) -> None:
    """State slots of the file that cannot be the rows' are refused; state does not begin again silently."""
    runtime = EmbeddedRuntime()
    runtime.create(TABLE)
    runtime.push([Gradient(TABLE.key, np.ones((1, 2), np.float32), np.array([1]), 0.1)])
    runtime.save("model")
    rows = read_rows(npz(**{**dict.fromkeys(TABLE.slot_names, VALUE), "ids": IDS, **change}))
    with pytest.raises(PsfleetError, match=message):
        import_rows("model", "new", "t", rows)


def test_an_empty_table_comes_back() -> None:
    """The export of a table without rows is rows of its width, also in Parquet."""
    pytest.importorskip("pyarrow")
    runtime = EmbeddedRuntime()
    runtime.create(TABLE)
    runtime.save("model")
    export("model", "out", "parquet")
    assert read_rows("out/t.parquet").value.shape == (0, 2)
