"""What the launcher does without a flag, what must be said aloud, and credentials made by hand."""

import dataclasses
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.net.connections.certificates import ends, make_credentials
from psfleet.core.net.connections.credentials import FILES, Credentials
from psfleet_launch.commands.machine_commands import usable
from psfleet_launch.job.job_plan import Job, Told, child_environment
from psfleet_launch.job.job_request import JobRequest
from tests.launch.conftest import Launch, launch
from tests.programs import ended

__all__ = ["launch"]  # the fixture

TRAINER = str(Path(__file__).parents[1] / "launch" / "trainer.py")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Credentials of each role."""
    return make_credentials(tmp_path_factory.mktemp("job") / "tls")


def a_job(folder: Path, port: int | None, insecure: bool, credentials: dict[str, Path]) -> Job:
    """A job of one server and one worker."""
    request = JobRequest(TRAINER, port=port, insecure=insecure)
    return Job(request, "name", "mark", folder, folder, credentials)


def test_a_job_on_tcp_is_encrypted_without_a_flag(launch: Launch) -> None:
    """`--tcp` alone: the screen says TLS, the job trains, and no key is left behind."""
    launcher = launch("--tcp", "--no-progress", TRAINER, "3")
    _, err = launcher.ends_with(0)
    assert "tcp with TLS" in err
    log = launcher.log("serverlog.0")
    assert re.search(r"ready at 127\.0\.0\.1:\d+", log), log
    assert not list(launcher.folder.rglob("*.pem"))


def test_in_the_clear_it_must_be_said(launch: Launch) -> None:
    """`--tcp --insecure` works and says so; `--insecure` with unix sockets is a mistake."""
    _, err = launch("--tcp", "--insecure", "--no-progress", TRAINER, "3").ends_with(0)
    assert "tcp, insecure" in err
    code, _, err = launch("--insecure", TRAINER, "3").ends()
    assert code == 2
    assert "--insecure is for TCP (--tcp or --port)" in err


def test_each_role_gets_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    """What the launcher itself was told of credentials does not reach the job."""
    base = {"PSFLEET_TLS": "/of/another/job", "PSFLEET_INSECURE": "1"}
    secured = a_job(tmp_path, 0, False, folders)
    for member in (*secured.servers, *secured.workers):
        actual = child_environment(secured, member, Told(["127.0.0.1:1"]), base)
        assert actual["PSFLEET_TLS"] == str(folders[member.role])
        assert "PSFLEET_INSECURE" not in actual
    plain = a_job(tmp_path, 0, True, {})
    actual = child_environment(plain, plain.workers[0], Told(["127.0.0.1:1"]), base)
    assert (actual.get("PSFLEET_TLS"), actual["PSFLEET_INSECURE"]) == (None, "1")


def test_files_are_for_their_owner(folders: dict[str, Path]) -> None:
    """Folders 0700, files 0600, and the authority's key is nowhere."""
    for folder in folders.values():
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        for path in folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server, worker = (Credentials.read(folders[role]) for role in ("server", "worker"))
    assert (server.ca, server.token) == (worker.ca, worker.token)
    assert server.key != worker.key
    assert server.token not in repr(server)
    assert Credentials.read(folders["reader"]).token not in ("", server.token)


def test_what_a_certificate_is_good_for(folders: dict[str, Path]) -> None:
    """A server's for both ends, a worker's for a client's only; neither signs others."""
    uses = {}
    for role, folder in folders.items():
        certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
        actual = certificate.extensions.get_extension_for_oid(ExtensionOID.EXTENDED_KEY_USAGE)
        uses[role] = sorted(oid._name for oid in actual.value)  # type: ignore[attr-defined]
        basic = certificate.extensions.get_extension_for_oid(ExtensionOID.BASIC_CONSTRAINTS)
        assert not basic.value.ca  # type: ignore[attr-defined]
    client = ["clientAuth"]
    assert uses == {"server": ["clientAuth", "serverAuth"], "worker": client, "reader": client}


def certs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`psfleet certs`."""
    command = [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli", "certs", *arguments]
    return ended(command)


def test_certificates_by_hand(tmp_path: Path) -> None:
    """`psfleet certs` makes them; with --keep it leaves those alone that last."""
    folder = certs("--days", "10", str(tmp_path / "job"))
    assert folder.returncode == 0, folder.stderr
    assert f"for workers: PSFLEET_TLS={tmp_path}/job/worker" in folder.stdout
    before = (tmp_path / "job/server/token").read_bytes()
    assert "still good" in certs("--days", "10", "--keep", str(tmp_path / "job")).stdout
    assert (tmp_path / "job/server/token").read_bytes() == before
    assert not usable(tmp_path / "job", 11)
    # 10 days are less than half of 30.
    assert certs("--keep", str(tmp_path / "job")).returncode == 0
    assert (tmp_path / "job/server/token").read_bytes() != before
    refused = certs("--days", "0", str(tmp_path / "job"))
    assert (refused.returncode, refused.stderr) == (
        2,
        "psfleet: days is 0; certificates can last up to 3650 days\n",
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda at: (at / "token").unlink(), "token' cannot be read"),
        (lambda at: (at / "key.pem").chmod(0o604), "has mode 604: every user can get at it"),
        (lambda at: (at / "key.pem").chmod(0o640), "has mode 640: its group can get at it"),
        (lambda at: (at / "token").chmod(0o620), "has mode 620: its group can get at it"),
        (lambda at: (at / "ca.pem").write_text(""), "is empty"),
        (lambda at: (at / "token").write_text("short"), "holds no token of at least 16"),
    ],
)
def test_credentials_that_cannot_be_used(tmp_path: Path, change: object, text: str) -> None:
    """One sentence that names the file."""
    place = make_credentials(tmp_path)["worker"]
    change(place)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=re.escape(text)):
        Credentials.read(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_that_is_mounted_for_a_group(tmp_path: Path) -> None:
    """A secret of another user is read through its group, as in Kubernetes; its group may not change it."""
    place = make_credentials(tmp_path)["worker"]
    for name in ("key.pem", "token"):
        (place / name).chmod(0o440)
        os.chown(place / name, 65534, os.getegid())
    Credentials.read(place)
    (place / "token").chmod(0o460)
    with pytest.raises(ConfigError, match="its group can get at it"):
        Credentials.read(place)


def test_what_the_environment_says(folders: dict[str, Path]) -> None:
    """Both at once contradict each other; a switch is 1 or nothing; a certificate is one."""
    good = Environment("worker", 0, ("h:1",), tls=str(folders["worker"]))
    with pytest.raises(ConfigError, match="unset one of them"):
        dataclasses.replace(good, insecure=True)
    with pytest.raises(ConfigError, match="PSFLEET_INSECURE is 'yes'; it must be 1 or nothing"):
        read_environment(
            {"PSFLEET_ROLE": "server", "PSFLEET_SERVERS": "h:1", "PSFLEET_INSECURE": "yes"}
        )
    with pytest.raises(ConfigError, match="the certificate is damaged"):
        ends(b"nonsense")
