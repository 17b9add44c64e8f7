"""Files that psfleet writes as JSON documents, each with a format and a version.

Every JSON file that psfleet writes goes through here; docs/formats.md lists them. An encoder names each
field in its code, and a decoder takes them with `exact`, so that no name of a Python attribute gets
into a file, and nothing in a file is passed over.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import CheckpointError, FrameError, PsfleetError, RuleError
from psfleet.core.base.files import let_appear, read_small, reason, replace

_SMALL = 1 << 20  # bytes
_ADVICE = "read it with the psfleet version that wrote it"


class Misfit(ValueError):
    """A document is not of the format and version that the reader knows; the text goes on after its name."""


@dataclass(frozen=True)
class Format:
    """A kind of document.

    Attributes:
        name: Value of its field `format`.
        versions: Those that are read, ascending. A document has the first one unless it needs a later one.
    """

    name: str
    versions: tuple[int, ...] = (1,)

    @property
    def version(self) -> int:
        """Oldest version of the format, which a document has unless it uses something newer."""
        return self.versions[0]

    def document(self, **fields: Any) -> dict[str, Any]:
        """A document with these fields, for `json.dumps`."""
        return {"format": self.name, "version": self.version, **fields}

    def write(self, where: Path, **fields: Any) -> None:
        """Let a small file of a running job appear, whole. It need not outlive the machine."""
        let_appear(where, self._writer(fields))

    def replace(self, where: Path, **fields: Any) -> None:
        """Write it so that it is on the disk when this returns."""
        replace(where, self._writer(fields))

    def _writer(self, fields: dict[str, Any]) -> Callable[[Path], object]:
        text = json.dumps(self.document(**fields), indent=1)
        return lambda draft: draft.write_text(text)

    def read(self, where: Path, **kinds: Any) -> list[Any]:
        """The values of the fields of a small file; see `exact`.

        Raises:
            FileNotFoundError: It is not there.
            FrameError: It cannot be read, or has another version or other fields.
        """
        with reading(where, FrameError):
            return exact(self.parse(read_small(where, _SMALL)), self.name, **kinds)

    def parse(self, content: bytes | str) -> dict[str, Any]:
        """The fields of a document, without those that say what it is.

        Raises:
            Misfit: It is of another format or of an unknown version.
            ValueError, RecursionError: It is no JSON.
        """
        return self.fields(json.loads(content))

    def fields(self, document: Any) -> dict[str, Any]:
        """Parse fields as `parse` does, of a document that is a part of another one."""
        if not isinstance(document, dict) or document.get("format") != self.name:
            value = document.get("format") if isinstance(document, dict) else document
            raise Misfit(f"is damaged or no {self.name} of psfleet: its format is {value!r:.60}")
        version = document.get("version")
        if type(version) is not int or version not in self.versions:
            *others, last = map(str, self.versions)
            versions = f"{', '.join(others)} and {last}" if others else last
            raise Misfit(
                f"has version {version!r:.60} of the format {self.name!r}, and this psfleet reads "
                f"version {versions}; {_ADVICE}"
            )
        return {
            name: value for name, value in document.items() if name not in ("format", "version")
        }


def exact(document: Any, what: str, **kinds: Any) -> list[Any]:
    """The values of exactly these fields, in their order.

    Args:
        said: An object of a document.
        what: Subject of the document, for messages.
        kinds: The type of each field, or a union of types; `object` for any value.

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
    """A count in a document, if it is a whole number from 0 to 2**62: then it fits wherever it goes.

    Raises:
        Misfit: It is something else.
    """
    if type(value) is not int or not 0 <= value <= 2**62:
        raise Misfit(
            f"has {value!r:.60} as {what}, which must be a whole number from 0 to 2**62; {_ADVICE}"
        )
    return value


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):  # which is an int to Python
        return kind in (bool, object)
    return isinstance(value, kind)


@contextlib.contextmanager
def reading(where: str | Path, kind: type[PsfleetError] = CheckpointError) -> Iterator[None]:
    """Turn every fault of reading a file within the block into one sentence that names the file.

    A missing file stays a FileNotFoundError, unless it is a checkpoint's.
    """
    try:
        yield
    except Misfit as error:
        raise kind(f"{str(where)!r} {error}") from None
    except CheckpointError:
        raise
    except RuleError as error:  # of a user, which this process does not have as the writer had it
        raise kind(f"{str(where)!r} cannot be loaded here: {error}") from None
    except OSError as error:
        if kind is not CheckpointError and isinstance(error, FileNotFoundError):
            raise
        raise kind(f"{str(where)!r} cannot be read: {reason(error)}") from None
    except PsfleetError as error:
        raise kind(f"{str(where)!r} is damaged: {error}") from None
    except Exception as error:  # there is no end to what a file can hold
        raise kind(f"{str(where)!r} is damaged: {' '.join(repr(error).split())}") from None
