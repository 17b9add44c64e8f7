"""Bad input: one clear sentence, exit code 2, and nothing started."""

import re
import socket
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from psfleet.core.base.settings.server_endpoints import TENSOR_OFFSET
from psfleet_launch.commands import psfleet_cli
from psfleet_launch.commands.checkpoint_commands import ckpt, log
from psfleet_launch.commands.launch_command import launch, main
from tests.launch.conftest import ROOT
from tests.refusals import cases

SCRIPT = str(Path(__file__).with_name("stand_in.py"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which the command refuses."""
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


WRONG = f"""
--servers 0 SCRIPT  # --servers is 0; it must be a number from 1 to 1024, or
--workers -1 SCRIPT  # --workers is -1; it must be at least 1; to train
--workers 65537 SCRIPT  # --workers is 65537; it must be at least 1; to train without
--workers 1_0 SCRIPT  # --workers is '1_0'; it must be a whole number
--workers \uff19 SCRIPT  # --workers is '\uff19'; it must be a whole number
--chaos-pace inf SCRIPT  # --chaos-pace is 'inf'; it must be a number
--start-timeout 99999999h SCRIPT  # '99999999h'; it must be like 30s or 5min
--workers two SCRIPT  # --workers is 'two'; it must be a whole number
missing.py  # script 'missing.py' does not exist; name a Python file
.  # script '.' is a folder; name a Python file
  # Missing argument 'SCRIPT'
--port 65535 --servers 2 SCRIPT  # end above 65535
--port 63535 --servers 2 SCRIPT  # as many ports for tensors 2000 above, end above 65535
--job a/b SCRIPT  # --job is 'a/b'
--job .. SCRIPT  # --job is '..'
--strategy no.toml SCRIPT  # strategy file 'no.toml' cannot be read
--resume nowhere SCRIPT  # no complete snapshot
--replicas 1 --hung-after 40s SCRIPT  # --hung-after is 40 s; name 1s to 30s
--restart-hung SCRIPT  # --restart-hung goes with --durability log or log+fsync and without
--engine slrum SCRIPT  # is 'slrum'; it must be one of join, kubernetes, local, ray, slurm, ssh
--hosts alpha SCRIPT  # --hosts is of --engine ssh, and this job is for --engine local; use
--engine ray --nodes 2 SCRIPT  # --nodes is of --engine slurm, and this job
--listen 10.0.0.1 SCRIPT  # --listen is for engines with agents, and this job is for
--sync --async SCRIPT  # --sync and --async are different modes; name one
--mode ssp --sync SCRIPT  # --sync and --mode ssp are different modes
--start-timeout 0 SCRIPT  # --start-timeout is 0; it must be above 0; servers
--start-timeout nan SCRIPT  # 'nan'; it must be like 30s or 5min
--dead-after -1s SCRIPT  # --dead-after is '-1s'; it must be like 30s or 5min
--hung-after 1min SCRIPT  # --hung-after is 60 s; name 1s to 30s
--wrokers 2 SCRIPT  # No such option '--wrokers'. (Did you mean one of: '--wire', '--worker-cores', \
'--workers'?) An option of the script goes after it: psfleet-launch {SCRIPT} --wrokers"""


@pytest.mark.parametrize(("line", "sentence"), cases(WRONG))
def test_bad_input_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    sentence: str,
) -> None:
    """Each mistake is told in one sentence that quotes it, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(capsys, *line.replace("SCRIPT", SCRIPT).split())
    assert not list(tmp_path.iterdir())


MISSING = """
opentelemetry.sdk.trace --trace http://h:4318  # --trace http://h:4318 needs OpenTelemetry, which is not \
installed; run: pip install
ray --engine ray  # --engine ray needs Ray, which is not installed; run: pip install '.[ray]'"""


@pytest.mark.parametrize(("line", "sentence"), cases(MISSING))
def test_what_is_not_installed_is_missed_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    sentence: str,
) -> None:
    """Before there is a folder of the job or a process, the sentence says what to install."""
    monkeypatch.chdir(tmp_path)
    missing, *arguments = line.split()
    monkeypatch.setitem(sys.modules, missing, None)
    assert sentence in refused(capsys, *arguments, SCRIPT)
    assert not list(tmp_path.iterdir())


REFUSED_BY_A_PROCESS = """
broken.py  # script 'broken.py' has a syntax error in line 2: ...; correct it
latin.py  # script 'latin.py' has a syntax error: invalid or missing encoding declaration; correct it
null.py  # script 'null.py' ...null bytes...
--rules broken SCRIPT  # --rules is 'broken', and '.../broken.py' has a syntax error in line 2
--staleness 4 SCRIPT  # --staleness is 4, a setting of the consistency mode ssp; name the mode
--k-steps 4 --stages 2 SCRIPT  # --k-steps is 4, a setting of the consistency mode geo
--device cuda SCRIPT  # --device is 'cuda', but ...; use --device auto or cpu
--device disk SCRIPT  # --device is 'disk', which needs a folder; name it with --server-disk
--server-disk null.py SCRIPT  # --server-disk is 'null.py', where no file can be made (File exists)
PSFLEET_LIMITS=tables SCRIPT  # PSFLEET_LIMITS says 'tables'; it must be name=number
PSFLEET_LANE=shared SCRIPT  # PSFLEET_LANE is 'shared'; it must be auto or inline
PSFLEET_STRATEGY=ssp SCRIPT  # PSFLEET_STRATEGY is 'ssp', which is not JSON
PSFLEET_STRATEGY={"ssp":{}} SCRIPT  # a strategy has no part 'ssp'
PSFLEET_LANE_MEMORY=much SCRIPT  # PSFLEET_LANE_MEMORY is 'much'; it must be a number and K, M"""


def test_what_a_process_would_refuse_is_refused_before_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts that cannot be compiled, strategies, memory of servers and variables that the launcher passes
    on are judged by the launcher itself, which has made no folder for the job by then.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # no GPU, wherever this runs
    sources = {"broken.py": b"import os\ndef f(:\n", "latin.py": b"# caf\xe9\n", "null.py": b"a\0"}
    for name, source in sources.items():
        Path(name).write_bytes(source)
    wrong = []
    for line, sentence in cases(REFUSED_BY_A_PROCESS):
        name, equals, value = line.split()[0].partition("=")
        arguments = line.replace("SCRIPT", SCRIPT).split()
        with monkeypatch.context() as variables:
            if equals:
                variables.setenv(name, value)
                del arguments[0]
            message = refused(capsys, *arguments)
        if not re.search(".*".join(map(re.escape, sentence.split("..."))), message):
            wrong.append(f"{line}: {message}")
    assert not wrong, "\n".join(wrong)
    assert {path.name for path in tmp_path.iterdir()} == set(sources)


def test_archives_and_scripts_with_an_encoding_are_taken(tmp_path: Path) -> None:
    """What Python runs is no syntax error: a zip archive, and a source that says it is Latin-1."""
    with zipfile.ZipFile(tmp_path / "job.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nname = 'caf\xe9'\n")
    for script in ("job.pyz", "latin.py"):
        words = ["--dry-run", "--log-dir", str(tmp_path), str(tmp_path / script)]
        assert main(words) == 0, script


def test_a_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A port that is taken, for control or for tensors, is named before anything starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for first in (port, port - TENSOR_OFFSET):
            sentence = refused(capsys, "--port", str(first), "--log-dir", str(tmp_path), SCRIPT)
            assert f"port {port} on 127.0.0.1 cannot be used (Address already in use)" in sentence


def test_a_job_that_this_machine_has_no_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before anything starts; a dry run refuses it too, and else says what is needed."""
    words = ["--log-dir", str(tmp_path), "--workers", "2"]
    assert main(["--dry-run", *words, "--worker-memory", "512M", SCRIPT]) == 0
    placed = "local: server 0, worker 0, worker 1"
    assert capsys.readouterr().out == f"{placed} (1.0 GiB)\n"
    said = "the job needs 2001 cores, and this machine has "
    for dry in ((), ("--dry-run",)):
        needs = ("--worker-cores", "1000", "--server-cores", "1")
        assert said in refused(capsys, *dry, *words, *needs, SCRIPT)


def test_a_log_folder_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One below a file, or that the system refuses, to root too, is named."""
    (tmp_path / "taken").touch()
    sentence = refused(capsys, "--log-dir", str(tmp_path / "taken"), "--job", "x", SCRIPT)
    assert "cannot be used (Not a directory); choose another with --log-dir" in sentence
    sentence = refused(capsys, "--log-dir", "/proc/logs", "--job", "x", SCRIPT)
    assert "log folder '/proc/logs/x' cannot be used" in sentence


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--help says what the exit code means and has twenty options in less than 100 lines; --help-all has
    every option under the heading where it belongs."""
    assert main(["--help"]) == 0
    usual = capsys.readouterr().out
    assert "exit code" in usual
    assert len(usual.splitlines()) < 100
    assert main(["--help-all"]) == 0
    output = capsys.readouterr().out
    shown = {*re.findall(r"^  (--[\w-]+)", usual, re.MULTILINE)}
    assert len(shown - {"--version", "--help-all"}) == 20
    assert shown < {*re.findall(r"^  (--[\w-]+)", output, re.MULTILINE)}
    for heading in ("Servers", "Workers", "The job", "Machines", "Strategy", "Examples"):
        assert f"\n{heading}:\n" in usual
    assert "Chaos" not in usual
    assert re.search(r"^  --no-progress +`--no-progress` hides the line", output, re.MULTILINE)
    sections = dict(re.findall(r"^(\w[\w ]+):\n((?:  .*\n|\n)+)", output, re.MULTILINE))
    for heading, option in (
        ("Servers", "--replicas"),
        ("Workers", "--restart-workers"),
        ("The job", "--watch"),
        ("Network", "--tcp"),
        ("Machines", "--hosts"),
        ("Chaos", "--chaos-pace"),
        ("Strategy", "--sync"),
        ("Other options", "-h, --help"),
        ("Examples", "psfleet-launch --watch 9100 train.py"),
    ):
        assert f"  {option}" in sections[heading], heading
    options = {
        option.opts[0] for option in launch.complete().params if isinstance(option, click.Option)
    }
    assert all(
        len(re.findall(rf"^  {option}(?![\w-])", output, re.MULTILINE)) == 1 for option in options
    )


def test_help_of_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    """`psfleet --help` has every command under a heading, and of each the whole first sentence; so have the
    commands below `ckpt` and `log`."""
    groups = {"": psfleet_cli.psfleet, "ckpt": ckpt, "log": log}
    for name, group in groups.items():
        assert psfleet_cli.main([*filter(None, [name]), "--help"]) == 0
        output = capsys.readouterr().out
        assert "..." not in output.partition("\n\n")[2]
        assert ("\nCommands:\n" in output) == bool(name)
        lines = " ".join(output.split())
        for word, command in group.commands.items():
            sentence = (command.help or "").split("\n\n")[0].split(". ")[0]
            assert f" {word} {' '.join(sentence.split()).rstrip('.')}." in lines, word


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        (psfleet_cli.main, "psfleet rep", "plain,report\n"),
        (psfleet_cli.main, "psfleet top --on", "plain,--once\n"),
        (main, "psfleet-launch --no-prog", "plain,--no-progress\n"),
        (main, "psfleet-launch --durability log+", "plain,log+fsync\n"),
    ],
)
def test_shells_complete(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: Callable[[list[str]], int],
    words: str,
    expected: str,
) -> None:
    """What a shell asks for after the line of docs/install.md: commands, options and their choices."""
    name, *rest = words.split()
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    assert f"{variable}=bash_source {name}" in (ROOT / "docs" / "install.md").read_text()
    monkeypatch.setenv(variable, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(rest)))
    with pytest.raises(SystemExit) as ended:
        program([])
    assert not ended.value.code
    assert capsys.readouterr().out == expected
