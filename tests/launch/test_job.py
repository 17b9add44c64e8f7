"""Jobs with the real server program: what a user sees."""

import os
import pty
import re
import signal
from io import FileIO
from pathlib import Path

from tests.launch.conftest import Launch

TRAINER = str(Path(__file__).with_name("trainer.py"))


def test_a_crash_leaves_a_trace(launch: Launch) -> None:
    """A server that crashes in machine code is named, and its log has the stacks of its threads.

    It is the server that every worker needs most: it has the coordinator.
    """
    launcher = launch("--servers", "2", "--workers", "1", TRAINER, "100000", "0.01")
    launcher.until_logged("workerlog.0", "step 9")
    os.kill(launcher.pid_of("server", 0), signal.SIGSEGV)
    code, _, err = launcher.ends()
    assert code == 128 + signal.SIGSEGV
    assert "server 0 failed first: killed by SIGSEGV" in err
    log = launcher.log("serverlog.0")
    assert "Fatal Python error: Segmentation fault" in log
    assert "process.py" in log


def test_servers_that_run_the_script(launch: Launch) -> None:
    """A script that branches on fleet.is_server() serves and trains under --server-script."""
    script = str(Path(TRAINER).with_name("branching.py"))
    launcher = launch("--servers", "2", "--workers", "2", "--server-script", script)
    launcher.ends_with(0)
    assert "server 1 has served" in launcher.log("serverlog.1")
    assert "worker 1 of 2 has trained" in launcher.log("workerlog.1")


def test_the_progress_is_shown_on_a_terminal(launch: Launch, tmp_path: Path) -> None:
    """On a terminal one line tells steps and rows and is drawn again below what the script prints."""
    ours, terminal = pty.openpty()
    with FileIO(ours) as screen:
        try:
            how = {"terminal": terminal, "TERM": "xterm", "COLUMNS": "120"}
            launcher = launch("--workers", "2", TRAINER, "200", "0.04", **how)
        finally:
            os.close(terminal)
        shown = _read_all(screen)
        assert launcher.ends()[0] == 0
    assert re.search(
        r"[1-9][\d,]* steps · [1-9][\d.]*( k)? steps/s · .*[1-9][\d,]* rows · [\d.]+ [KM]iB/s",
        shown,
    )
    assert len(re.findall(r"digest [0-9a-f]{64}\s", shown)) == 1
    assert shown.rstrip().splitlines()[-1].startswith("finished  in ")


def _read_all(screen: FileIO) -> str:
    """Everything that is shown until the last process has closed the terminal, without colours."""
    shown = b""
    try:
        while data := screen.read(4096):
            shown += data
    except OSError:  # Linux says EIO when nobody has the other end open any more
        pass
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
