"""JSON files of psfleet. Each has a format and a version, and is read strictly.

Every JSON file that psfleet writes goes through this module; docs/formats.md lists them. Code that writes a
document names each field explicitly, and code that reads a document takes the fields with `exact`. So
renaming an attribute in Python does not change a file. A file with an unknown field is refused, because the
field could change the meaning of the known ones.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import CheckpointError, FrameError, PsfleetError, RuleError, one_line
from psfleet.core.base.files import let_appear, read_small, reason, replace

_SMALL = 1 << 20  # longest file that `Format.read` accepts, in bytes
_ADVICE = "read it with the psfleet version that wrote it"


class Misfit(ValueError):
    """A document has an unexpected format, version or field.

    The text continues a sentence that begins with the file's name.
    """


@dataclass(frozen=True)
class Format:
    """Format of a kind of JSON document.

        _READY = Format("ready server")
        _READY.write(path, index=0, pid=4711)
        index, pid = _READY.read(path, index=int, pid=int)

    Attributes:
        name: Value of the field `format` in documents of this kind.
        versions: Versions that can be read, ascending.
    """

    name: str
    versions: tuple[int, ...] = (1,)

    @property
    def version(self) -> int:
        """Version of new documents: the oldest version that can still be read.

        Code that writes a feature of a newer version must write that version instead.
        """
        return self.versions[0]

    def document(self, **fields: Any) -> dict[str, Any]:
        """Return a document of this format with these fields, ready for `json.dumps`."""
        return {"format": self.name, "version": self.version, **fields}

    def write(self, where: Path, **fields: Any) -> None:
        """Write a small file of a running job. Readers see all of it or nothing.

        It may be lost in a power cut.
        """
        let_appear(where, self._writer(fields))

    def replace(self, where: Path, **fields: Any) -> None:
        """Replace a file durably: the new file is on the disk when this returns."""
        replace(where, self._writer(fields))

    def _writer(self, fields: dict[str, Any]) -> Callable[[Path], object]:
        text = json.dumps(self.document(**fields), indent=1)
        return lambda draft: draft.write_text(text)

    def read(self, where: Path, **kinds: Any) -> list[Any]:
        """Read a small file with exactly these fields, and return their values in order (see `exact`).

        Raises:
            FileNotFoundError: The file does not exist.
            FrameError: The file cannot be read, or has another version or other fields.
        """
        with reading(where, FrameError):
            return exact(self.parse(read_small(where, _SMALL)), self.name, **kinds)

    def parse(self, content: bytes | str) -> dict[str, Any]:
        """Return the fields of an encoded document, without `format` and `version`.

        Raises:
            Misfit: The document has another format or an unknown version.
            ValueError, RecursionError: The content is not JSON.
        """
        return self.fields(json.loads(content))

    def fields(self, document: Any) -> dict[str, Any]:
        """Return the fields of a document that is already decoded, such as a part of another document."""
        if not isinstance(document, dict) or document.get("format") != self.name:
            value = document.get("format") if isinstance(document, dict) else document
            raise Misfit(f"is damaged or no {self.name} of psfleet: its format is {value!r:.60}")
        version = document.get("version")
        if type(version) is not int or version not in self.versions:
            *earlier, last = map(str, self.versions)
            versions = f"{', '.join(earlier)} and {last}" if earlier else last
            raise Misfit(
                f"has version {version!r:.60} of the format {self.name!r}, and this psfleet reads "
                f"version {versions}; {_ADVICE}"
            )
        return {
            name: value for name, value in document.items() if name not in ("format", "version")
        }


def exact(document: Any, what: str, **kinds: Any) -> list[Any]:
    """Return the values of fields of a JSON object, after checking that it has exactly these fields.

        name, rows = exact(document, "table", name=str, rows=int)

    Args:
        document: Object of a JSON document.
        what: Name of the object, for messages.
        kinds: Type of each field, or a union of types. `object` allows any value.

    Raises:
        Misfit: A field is unknown, missing or of another type.
    """
    if not isinstance(document, dict):
        raise Misfit(f"has {document!r:.60} as its {what}, which must be an object; {_ADVICE}")
    for name in document:
        if name not in kinds:
            raise Misfit(f"has the unknown field {name!r:.60} in its {what}; {_ADVICE}")
    for name, kind in kinds.items():
        if name not in document:
            raise Misfit(f"lacks the field {name!r} in its {what}; {_ADVICE}")
        if not _fits(document[name], kind):
            words = getattr(kind, "__name__", str(kind))
            raise Misfit(
                f"has {document[name]!r:.60} as {name} in its {what}, which must be of type {words}; "
                f"{_ADVICE}"
            )
    return [document[name] for name in kinds]


def natural(value: Any, what: str) -> int:
    """Check that a value from a document is a whole number from 0 to 2**62, and return it.

    A count within this limit fits into an int64 wherever it is used.

    Raises:
        Misfit: The value is something else.
    """
    if type(value) is not int or not 0 <= value <= 2**62:
        raise Misfit(
            f"has {value!r:.60} as {what}, which must be a whole number from 0 to 2**62; {_ADVICE}"
        )
    return value


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):  # bool is a subclass of int, but 1 and true differ in JSON
        return kind in (bool, object)
    return isinstance(value, kind)


@contextlib.contextmanager
def reading(where: str | Path, kind: type[PsfleetError] = CheckpointError) -> Iterator[None]:
    """Raise any error of the block again as `kind`, with one sentence that names the file.

    A FileNotFoundError passes unchanged, unless `kind` is CheckpointError.
    """
    try:
        yield
    except Misfit as error:
        raise kind(f"{str(where)!r} {error}") from None
    except CheckpointError:
        raise
    # A user's update rule that this process lacks or defines differently.
    except RuleError as error:
        raise kind(f"{str(where)!r} cannot be loaded here: {error}") from None
    except OSError as error:
        if kind is not CheckpointError and isinstance(error, FileNotFoundError):
            raise
        raise kind(f"{str(where)!r} cannot be read: {reason(error)}") from None
    except PsfleetError as error:
        raise kind(f"{str(where)!r} is damaged: {error}") from None
    except Exception as error:  # a damaged file can cause any error
        raise kind(f"{str(where)!r} is damaged: {one_line(repr(error))}") from None
