"""``fedloom deploy`` on the command line."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers.deploying import InProcess, config, in_process, small
from pyarrow import parquet

from fedloom.base.errors import ConfigError
from fedloom.cli import main
from fedloom_apps.deploy.certificates import read_authority
from fedloom_apps.deploy.recipe import Roster
from fedloom_apps.deploy.server import Recipe, run


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["serve"], "unknown command 'deploy serve'; did you mean 'server'?"),
        (["node", "--data", "x.npz", "--state", "s"], "fedloom deploy node needs --server"),
        (["node", "--data", "x", "--state", "s", "--server", "h:1", "lr=1"], "its settings are the server's"),
        *(
            (["node", "--data", "x", "--state", "s", "--server", at, "--insecure"], f"--server is {at!r}, but it must")
            for at in ("h", "h:one", "h:99999", "http://h:1", "::1:9440")
        ),
        (["certificates"], "needs one folder"),
        (["certificates", "keys", "--hosts", "münchen.example"], "'münchen.example' is not a host name"),
        (["status"], "needs one run directory"),
        (["status", "nowhere"], "nowhere is not a run directory"),
        (["local", "--nodes", "none"], "--nodes is 'none', but it must be a whole number"),
        (["server", "method=centralised", "--dry-run"], "trains on the pooled data of all clients"),
        (["server", "deploy.deadlines=3"], "deploy has no setting 'deadlines'; did you mean 'deadline'?"),
    ],
)
def test_mistakes_end_in_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["method=afl", "participation=0.5"], "the cohort holds 1 of 2; set participation=1."),
        (
            ["method=q_ffl", "method.mixing.response=validation"],
            "some clients have none; set some aside, with validation=",
        ),
        (["attack=sign_flip"], "attack is for simulations"),
    ],
)
def test_a_local_deployment_is_refused_before_anything_is_written(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "local", "rounds=1", *words, "--nodes", "2", f"out={tmp_path / 'run'}"]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_server_records_its_nodes_instead_of_what_a_simulation_would_deal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, out = in_process(config("rounds=1"), tmp_path / "nodes"), tmp_path / "run"

    @contextmanager
    def hosting(*_: object) -> Iterator[tuple[InProcess, int]]:
        yield transport, 4

    monkeypatch.setattr("fedloom_apps.deploy.flower.host.hosting", hosting)
    assert main(["deploy", "server", *small("rounds=1", "clients=20"), f"out={out}", "-q"]) == 0
    transport.close()
    recorded = (out / "config.yaml").read_text()
    assert "\nclients: 4\n" in recorded
    assert "dirichlet" not in recorded + (out / "report.html").read_text()
    assert main(["deploy", "server", f"resume={out}", "-q"]) == 0


def test_a_local_deployment_writes_nothing_without_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def require() -> None:
        raise ConfigError("there is no Flower.")

    monkeypatch.setattr("fedloom_apps.deploy.flower.require", require)
    assert main(["deploy", "local", "rounds=1", "method=fedavg", "--nodes", "2", f"out={tmp_path / 'run'}"]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("always:partition")
@pytest.mark.parametrize("standardised", ["false", "true"])
def test_a_note_on_the_partition_of_a_local_deployment_is_told_once(
    standardised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hosting(*_: object) -> None:
        raise ConfigError("the data are dealt.")

    x, y = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32), np.arange(90) % 3
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    monkeypatch.setattr("fedloom_apps.deploy.flower.require", lambda: None)
    monkeypatch.setattr("fedloom_apps.deploy.certificates.make", lambda *_: None)
    monkeypatch.setattr("fedloom_apps.deploy.flower.host.hosting", hosting)
    words = [f"data=npz:{tmp_path / 'mine.npz'}", f"data.standardise={standardised}", "held_out=common"]
    words += ["partition=acid", "partition.classes=2", "partition.samples=10", "partition.test_samples=10"]
    assert main(["deploy", "local", "method=fedavg", *words, "--nodes", "2", f"out={tmp_path / 'run'}"]) == 2
    output = "".join(capsys.readouterr())
    assert "the data are dealt." in output
    assert output.count("leaves out 70 of 90 samples") == 1


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("zero.csv", b"", "cannot be read as a table"),
        ("head.csv", b"a,label\n", "has no training samples"),
        ("nan.csv", b"a,label\n1,0\n,1\n", "in the samples for training, NaN or infinity in 1 of 2 samples"),
        ("cut.npz", b"PK\x03\x04", "is truncated or not an npz file"),
        ("no_such_module:f", None, "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_node_looks_at_its_data_before_it_contacts_the_server(
    name: str, content: bytes | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    data = name if content is None else str(tmp_path / name)
    words = ["--data", data, "--state", str(tmp_path / "state"), "--server", "127.0.0.1:9", "--insecure"]
    assert main(["deploy", "node", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_help_and_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy"]) == main(["deploy", "--help"]) == 0
    assert main(["deploy", "server", "method=feddyn", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "fedloom deploy node --data DATA" in output
    assert "deadline: 600.0" in output


def test_nodes_that_are_started_here_import_the_users_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without them they would refuse its parts."""
    from fedloom_apps.deploy.flower import host

    started: list[list[str]] = []
    monkeypatch.setattr(host.subprocess, "Popen", lambda words, **_: started.append(words[3:]))
    host.start_node("a", tmp_path / "a.npz", tmp_path, "127.0.0.1:1", None, ["nowhere"])
    assert main(started[0]) == 2
    assert capsys.readouterr().err.startswith("fedloom: --import nowhere: No module named 'nowhere'")


def test_status_says_when_each_node_answered_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config("method=fedavg", "rounds=2")
    transport = in_process(settings, tmp_path)
    transport.route = lambda name, number, blob: [] if (name, number) == ("node-1", 2) else [blob]
    run(Recipe.of(settings), transport, 4, tmp_path / "run")
    transport.close()
    assert main(["deploy", "status", str(tmp_path / "run")]) == 0
    lines = {line.split()[1]: line.split()[-2] for line in capsys.readouterr().out.splitlines() if "node-" in line}
    assert lines == {"node-0": "2", "node-1": "1", "node-2": "2", "node-3": "2"}
    roster = Roster("a1", {"[/node]\x1b[2J": (1, 0, 0)})  # the names in a stranger's checkpoint
    monkeypatch.setattr(Roster, "load", lambda directory, resume: roster)
    assert main(["deploy", "status", str(tmp_path / "run")]) == 0
    assert "[/node] [2J" in capsys.readouterr().out
    table = pa.table({"round": [1.0, math.nan], "client": [0, 1], "p": ["a", "b"]})  # and his records
    parquet.write_table(table, tmp_path / "run" / "mixing.parquet")
    assert main(["deploy", "status", str(tmp_path / "run")]) == 0


@pytest.mark.extra("cryptography")
def test_certificates_are_made_once_and_private_keys_are_the_owners(tmp_path: Path) -> None:
    words = ["deploy", "certificates", str(tmp_path / "keys"), "--nodes", "clinic-a"]
    assert main(words) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "keys").rglob("*.*")}
    assert main([*words[:-1], "clinic-a,clinic-b"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "keys" / "nodes" / "clinic-b.pub").is_file()
    for path in (tmp_path / "keys").glob("*.key"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.extra("cryptography")
def test_a_server_that_runs_sees_no_half_of_a_new_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for the public keys of nodes several times a second, and a file that is none ends its run."""
    sizes, replace = dict[str, int](), os.replace

    def replaced(part: Path, path: Path) -> None:
        assert not path.exists()
        sizes[path.name] = part.stat().st_size
        replace(part, path)

    monkeypatch.setattr(os, "replace", replaced)
    assert main(["deploy", "certificates", str(tmp_path), "--nodes", "clinic-a"]) == 0
    assert [*sizes] == ["ca.pem", "server.pem", "clinic-a.pub"]
    assert min(sizes.values()) > 0


def test_the_secret_of_a_superlink_is_new_and_the_servers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom_apps.deploy.flower import superlink

    started: list[list[str]] = []
    monkeypatch.setattr(superlink.subprocess, "Popen", lambda words, **_: started.append(words))
    (path := tmp_path / "secret").write_text("of the run before")
    path.chmod(0o644)
    superlink.start(tmp_path, "127.0.0.1", 1, "of this run", tmp_path)
    assert path.read_text() == "of this run"
    assert path.stat().st_mode & 0o077 == 0
    assert "--enable-supernode-auth" in started[0]
    assert "of this run" not in started[0]  # which other users see


@pytest.mark.parametrize("name", ["server", "ca", "../clinic", "a/b"])
def test_no_node_gets_the_keys_of_the_server(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "certificates", str(tmp_path / "keys"), "--nodes", name]) == 2
    assert f"no node can be called {name!r}" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


@pytest.mark.extra("cryptography")
def test_another_host_needs_another_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deploy", "certificates", str(tmp_path), "--hosts"]
    assert main([*words, "fed.example.org"]) == 0
    assert main([*words, "fed.example.org"]) == 0
    assert main([*words, "other.example.org"]) == 2
    assert "is not for other.example.org; remove server.pem" in capsys.readouterr().err


@pytest.mark.extra("cryptography")
def test_a_certificate_covers_the_machine_that_serves_beside_the_hosts(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    assert main(["deploy", "certificates", str(tmp_path), "--hosts", "fed.example.org,localhost"]) == 0
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["fed.example.org", "localhost", "127.0.0.1"]


@pytest.mark.extra("cryptography")
def test_files_that_hold_no_certificate_or_key_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "certificates", str(tmp_path)]) == 0
    for name in ("server.pem", "ca.key"):
        (tmp_path / name).write_text("damaged")
        assert main(["deploy", "certificates", str(tmp_path)]) == 2
        assert f"{tmp_path} holds a key or certificate that cannot be read" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"server\.pem holds no certificate; use the ca\.pem"):
        read_authority(tmp_path / "server.pem")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_authority(tmp_path / "other.pem")
    assert read_authority(tmp_path / "ca.pem") == (tmp_path / "ca.pem").read_bytes()


@pytest.mark.extra("flwr")
def test_a_key_that_needs_a_password_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supernode = import_module("fedloom_apps.deploy.flower.supernode")

    def locked(blob: bytes, password: bytes | None) -> None:
        raise TypeError("Key is password-protected, but password was not provided.")

    monkeypatch.setattr(supernode, "load_ssh_private_key", locked)
    (tmp_path / "node.key").write_bytes(b"locked")
    with pytest.raises(ConfigError, match=r"is not the private key of a node \(Key is password-protected"):
        supernode.read_private_key(tmp_path / "node.key")
