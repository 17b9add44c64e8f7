"""The same harness under atheris, which looks for new paths through the code.

python -m tests.fuzz.guided frames -max_total_time=60     needs: pip install atheris
python -m tests.fuzz.guided files CORPUS_FOLDER           what it has found goes there
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def frames() -> Callable[[bytes], None]:
    """Attacks on one server, made again now and then."""
    from psfleet.core.net.v1 import shard_pb2
    from tests.fuzz.frame_attacks import Tally, attack
    from tests.fuzz.frames import Ground
    from tests.fuzz.mutations import Fed

    tally, modes = Tally(), (shard_pb2.MODE_SYNC, shard_pb2.MODE_ASYNC)
    grounds: list[Ground] = []

    def one(data: bytes) -> None:
        if tally.frames % 500 == 0:
            while grounds:
                grounds.pop().close()
            grounds.append(Ground(modes[tally.frames // 500 % 2]))
        attack(grounds[0], Fed(data), tally, grounds[0].state())

    return one


def files() -> Callable[[bytes], None]:
    """Attacks on the readers, which the first byte chooses."""
    from tests.fuzz.files import Tally, attack
    from tests.fuzz.mutations import Fed
    from tests.fuzz.tools import every_reader

    readers, tally = every_reader(Path.cwd() / "good"), Tally()

    def one(data: bytes) -> None:
        reader = readers[(data or b"\0")[0] % len(readers)]
        attack(Fed(data[1:]), reader, Path.cwd() / reader.name.replace(" ", "-"), tally)

    return one


def main() -> None:
    """Run libFuzzer with its own arguments after the kind."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    warnings.simplefilter("ignore", RuntimeWarning)
    kind, *arguments = sys.argv[1:]
    arguments = [str(Path(a).absolute()) if not a.startswith("-") else a for a in arguments]
    libfuzzer: Any = atheris
    with libfuzzer.instrument_imports(include=["psfleet", "psfleet_server"]):
        attack = {"frames": frames, "files": files}[kind]
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            os.chdir(folder)
            Path("checkpoint").mkdir()
            one = attack()
            libfuzzer.Setup([sys.argv[0], *arguments], one)
            libfuzzer.Fuzz()


if __name__ == "__main__":
    main()
