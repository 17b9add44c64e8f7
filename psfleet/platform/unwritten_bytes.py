"""Bytes whose content is written after they are made: what CPython itself does in bytes.join()."""

import ctypes
from typing import Any

__all__ = ["unwritten_bytes"]

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_HEAD = bytes.__basicsize__ - 1  # bytes of the object before its content


def unwritten_bytes(length: int) -> tuple[bytes, "ctypes.Array[Any]"]:
    """A bytes object and its content, to be written before anybody else sees the object.

    The content is valid for as long as the object is.
    """
    made: bytes = _new_bytes(None, length)
    return made, (ctypes.c_uint8 * length).from_address(id(made) + _HEAD)
