"""Changes to valid messages and files: fields to the edges of their types, bytes to anything.

What is drawn comes from a `random.Random`: a seed repeats a case. Hypothesis and atheris give the throws
themselves (`Fed`), so one harness serves all three.
"""

import random
import struct
from collections.abc import Sequence
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_WHOLE = [0, 1, 2, 3, 7, 8, 63, 64, 255, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53]
_WHOLE += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
_REAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-300, 3.5e38, 1e308, 2**127]
_REAL += [float("inf"), float("nan"), float("-inf")]
_TEXT = [
    "",
    *["x", "dense", "sparse", "sgd", "adam", "uniform", "constant", "sum", "float32", "int64"],
]
_TEXT += ["rows", "whole", "\0", "\n", "é" * 9, "../x", "x" * 600, "probability", "object", "<f4"]
_UNSIGNED = (
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_FIXED32,
)
_NARROW = (
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_ENUM,
)
_MANY = 40


class Fed(random.Random):
    """Dice whose throws are given, so that a fuzzer can change one of them; then a fixed sequence."""

    def __init__(self, throws: bytes) -> None:
        super().__init__(0)
        self._throws = throws
        self._at = 0

    def getrandbits(self, k: int, /) -> int:
        """The next bits that are given."""
        taken = self._throws[self._at : self._at + -(-k // 8)]
        self._at += len(taken)
        if 8 * len(taken) < k:
            return super().getrandbits(k)
        return int.from_bytes(taken, "little") & ((1 << k) - 1)


def mutated_bytes(dice: random.Random, whole: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The bytes with one to four changes: bits, runs, cuts, repeats, numbers, parts of others."""
    out = bytearray(whole)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(out) + 1)
        end = min(len(out), at + dice.choice((1, 2, 4, 8, 64)))
        match dice.randrange(9):
            case 0 | 1 if out:
                out[dice.randrange(len(out))] ^= 1 << dice.randrange(8)
            case 2 if out:
                out[dice.randrange(len(out))] = dice.choice((0, 1, 127, 128, 255, 10, 34, 44))
            case 3:
                del out[at:end]
            case 4:
                del out[at:]
            case 5:
                out[at:at] = dice.randbytes(dice.choice((1, 3, 8, 70)))
            case 6:
                out[at:at] = out[at:end] * dice.choice((1, 2, 30))
            case 7:
                kind, size = dice.choice((("<Q", 8), ("<I", 4), ("<d", 8)))
                value: Any = dice.choice(_REAL if kind == "<d" else _WHOLE)
                value = value if kind == "<d" else value % 2 ** (8 * size)
                out[at : at + size] = struct.pack(kind, value)
            case _ if others:
                other = dice.choice(others)
                start = dice.randrange(len(other) + 1)
                out[at:end] = other[start : start + dice.choice((4, 16, 200))]
    return bytes(out)


def mutated_tree(dice: random.Random, tree: Any) -> Any:
    """A value of built-in types with one change: another value somewhere, or an element less or more."""
    if isinstance(tree, dict | list) and tree and dice.randrange(8):
        copied = tree.copy()
        key = dice.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        match dice.randrange(8):
            case 0:
                del copied[key]
            case 1 if isinstance(copied, list):
                copied.append(copied[key])
            case 2 if isinstance(copied, dict):
                copied[dice.choice(_TEXT)] = copied[key]
            case _:
                copied[key] = mutated_tree(dice, copied[key])
        return copied
    if isinstance(tree, bytes) and dice.randrange(4):
        return mutated_bytes(dice, tree)
    reals = [float(each) for each in _REAL]
    others: Any = dice.choice((_WHOLE, reals, _TEXT, [None, True, [], {}, b"", -1, -(2**63)]))
    return dice.choice(others)


def mutated_message(dice: random.Random, message: Message) -> None:
    """One field of the message, or of one within it, is changed in place."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = dice.choice(fields)
    if dice.randrange(12) == 0:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _map(dice, message, field)
    elif field.is_repeated:
        _repeated(dice, getattr(message, field.name), field)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        mutated_message(dice, getattr(message, field.name))
    else:
        setattr(message, field.name, _value(dice, field, getattr(message, field.name)))


def _map(dice: random.Random, message: Message, field: FieldDescriptor) -> None:
    value = getattr(message, field.name)
    parts: Any = cast("Any", field.message_type).fields_by_name
    if value and dice.randrange(2):
        del value[dice.choice(sorted(value))]
    else:
        words: list[Any] = ["beta1", "speed", "probability", "count", ""]
        if parts["key"].type != FieldDescriptor.TYPE_STRING:
            words = [0, 1, 7, 2**32 - 1]
        key = dice.choice([*sorted(value), *words])
        value[key] = _value(dice, parts["value"], 0.5)


def _repeated(dice: random.Random, values: Any, field: FieldDescriptor) -> None:
    action = dice.randrange(4)
    if field.message_type is not None:
        if values and action == 0:
            mutated_message(dice, dice.choice(values))
        elif values and action == 1:
            del values[dice.randrange(len(values))]
        elif values and action == 2:
            values.extend([dice.choice(values)] * dice.choice((1, 2, _MANY)))
        elif values:
            mutated_message(dice, values[0])
        else:
            mutated_message(dice, values.add())
    elif values and action == 0:
        del values[dice.randrange(len(values))]
    elif values and action == 1:
        values[dice.randrange(len(values))] = _value(dice, field, values[0])
    else:
        values.extend([_value(dice, field, 1)] * dice.choice((1, 2, _MANY)))


def _value(dice: random.Random, field: FieldDescriptor, before: Any) -> Any:
    kind = field.type
    if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return dice.choice(_REAL)
    if kind == FieldDescriptor.TYPE_BOOL:
        return not before
    if kind == FieldDescriptor.TYPE_STRING:
        return dice.choice(_TEXT)
    if kind == FieldDescriptor.TYPE_BYTES:
        return mutated_bytes(dice, bytes(before))
    if kind == FieldDescriptor.TYPE_ENUM:
        return dice.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 99, 2**31 - 1, -1))
    return _whole(dice, kind, int(before))


def _whole(dice: random.Random, kind: int, before: int) -> int:
    near: int = dice.choice((before + 1, before - 1, before * 2, before ^ 1 << dice.randrange(40)))
    value: int = dice.choice((near, dice.choice(_WHOLE), -dice.choice(_WHOLE)))
    bits = 32 if kind in _NARROW else 64
    value %= 2**bits
    return value if kind in _UNSIGNED or value < 2 ** (bits - 1) else value - 2**bits
