"""Numbers of texts have the bits of hashlib's BLAKE2b and of Python's int, and no release may change them."""

import hashlib
import random
import re

import pytest

from psfleet.core.engine.kernels.text_hashing import text_numbers, utf8_numbers

pytestmark = pytest.mark.quick

WHOLE = re.compile(rb"0|-?[1-9][0-9]{0,19}")


def number_of(text: bytes) -> int:
    """The twin of the kernel."""
    whole = int(text) if WHOLE.fullmatch(text) else 2**64
    if -(2**63) <= whole < 2**64:
        return whole % 2**64
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def texts() -> list[str]:
    """Texts of all lengths around those of blocks, whole numbers and what nearly is one, and random ones."""
    dice = random.Random(1)
    every = [unit * size for unit in ("x", "é", "😀", "7") for size in (*range(300), 1000)]
    for border in (0, 9, 10, 2**63, 2**64, 10**19, 10**20, 18446744073709551610):
        for near in range(border - 12, border + 13):
            every += [
                form.format(near) for form in ("{}", "-{}", "+{}", "0{}", "{}.", " {}", "{}\0")
            ]
    every += ["", "-", "--1", "00", "0x1", "1e3", "1_0", "1-1", "\0", "\uff11", "1\uff11"]
    for _ in range(2000):
        every.append("".join(dice.choice("0123456789-ab é") for _ in range(dice.randrange(24))))
    return every


def test_numbers_are_those_of_the_twin() -> None:
    """Each text has its number, alone and beside others, as text and as bytes."""
    every = texts()
    expected = [number_of(text.encode()) for text in every]
    assert text_numbers(every).tolist() == expected
    assert utf8_numbers([text.encode() for text in every]).tolist() == expected
    ascii_only = [text for text in every if text.isascii()]
    assert text_numbers(ascii_only).tolist() == [number_of(text.encode()) for text in ascii_only]
    repeated = [dice.choice(every[:400]) for dice in [random.Random(2)] for _ in range(20_000)]
    assert text_numbers(repeated).tolist() == [number_of(text.encode()) for text in repeated]
    for text in every[::50]:
        assert text_numbers([text]).tolist() == [number_of(text.encode())]
    assert text_numbers([]).size == utf8_numbers([]).size == 0
    assert utf8_numbers([b"\xff"]).tolist() == [number_of(b"\xff")]


def test_numbers_stay() -> None:
    """The numbers of some texts, written down: rows of trained models are found by them."""
    expected = [11765665226422741261, 14480122830287805011, 2**64 - 1]
    assert text_numbers(["red", "Orléans", "-1"]).tolist() == expected


def test_what_is_no_text() -> None:
    """Half a surrogate pair has no UTF-8, and a number is no text."""
    with pytest.raises(UnicodeEncodeError):
        text_numbers(["red", "\ud83d"])
    with pytest.raises(TypeError):
        text_numbers([1])  # type: ignore[list-item]
