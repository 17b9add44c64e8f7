"""Collectives of all workers, as one of them comes to them: barriers, reductions, changes of the mode.

Pure, on top of session and stream: who comes to a collective has flushed its stream before.
"""

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from psfleet.consistency import ConsistencyMode
from psfleet.errors import ConfigError
from psfleet.wire.membership_messages import read_change, write_change
from psfleet_worker.session.instructions import CollectiveResult, Program
from psfleet_worker.session.push_stream import Stream
from psfleet_worker.session.worker_session import Session


class Collectives:
    """The collectives of one incarnation.

    Args:
        position: Position of the incarnation in its data: leases used up, and samples of the next one.
    """

    def __init__(
        self, session: Session, stream: Stream, position: Callable[[], tuple[int, int]]
    ) -> None:
        self._session = session
        self._stream = stream
        self._position = position

    def gather(
        self, mode: str = "", value: NDArray[Any] | None = None
    ) -> Program[CollectiveResult]:
        """Meet all workers. Rounds of the others go on without this one meanwhile.

        Args:
            mode: Reduction of the values: sum, max or min.
            value: Value of this worker; None: it is a barrier.
        """
        passes = self._session.passes
        result = yield from self._meet(mode, value)
        yield from self._come_back(passes)
        return result

    def set_mode(self, mode: ConsistencyMode) -> Program[None]:
        """Go on in another mode; every worker must come here between two of its steps.

        Raises:
            ConfigError: The workers want different things; nothing was changed.
        """
        yield from self._stream.flush()
        session = self._session
        passes = session.passes
        change = write_change(mode, session.sequence)
        common, last = read_change((yield from self._meet("switch", change)).value)
        if common is None:
            yield from self._come_back(passes)
            raise ConfigError(
                f"worker {session.worker} asks for {_words(mode)} and another worker for something else; "
                "let all of them ask for the same"
            )
        yield from session.change_mode(common, last)

    def _meet(self, mode: str, value: NDArray[Any] | None) -> Program[CollectiveResult]:
        yield from self._stream.flush()
        return (yield from self._session.meet(mode, value, self._position()))

    def _come_back(self, passes: bool) -> Program[None]:
        """Be a member of rounds again, unless the collective was over before this incarnation began."""
        if self._session.declared.has_rounds and not passes:
            yield from self._session.join()


def _words(mode: ConsistencyMode) -> str:
    settings = "".join(f" with {name} {value}" for name, value in mode.agreed_settings.items())
    return f"mode {mode.name!r}{settings}"
