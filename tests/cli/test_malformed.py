"""Malformed input ends in one sentence and exit code 2: nothing is written or executed, and there is no traceback.

Settings, arrays, recipes, plans, checkpoints and run directories, each spoilt in many ways under a fixed seed. The
command line is called in this process, so that a traceback fails the test. Input that is still usable may be used.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import Cli
from safetensors.numpy import load, save

from fedloom.base.yaml import Loader
from fedloom.cli import main
from fedloom.experiment.rundir import PROVENANCE

SMALL = ("clients=4", "model.hidden=[4]", "local.batch_size=100", "partition=iid", "evaluation.batch_size=2000")


def snapshot(folder: Path) -> dict[str, Any]:
    """All files below a folder and what is in them."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def refused(cli: Cli, folder: Path, *words: str, may_do: bool = False, may_write: bool = False) -> bool:
    """Whether a command is refused properly; with ``may_do`` it may also be carried out, in whole or in part."""
    before = snapshot(folder)
    code, out, err = cli(*words)
    case = f"fedloom {' '.join(words)!r} ended with {code}, {out[-300:]!r} and {err[-300:]!r}"
    if may_do and code == 0:
        return False
    assert (code, out, err.count("\n")) == (2, "", 1), case
    assert err.startswith("fedloom: "), case
    assert may_write or snapshot(folder) == before, f"{case}, and wrote something"
    return True


# --- settings ----------------------------------------

KEYS = """
    rounds seed clients participation cohort sampling drop_rate dtype device client_state local.lr local.epochs
    local.steps local.batch_size local.lr_decay local.decay_every local.momentum local.clip local.weight_decay local
    evaluation.what evaluation.every evaluation.target evaluation.metric evaluation.patience evaluation.batch_size
    evaluation.metrics evaluation.padding evaluation engine.workers engine compute augment views teacher partition.alpha
    partition model model.hidden data data.root method method.alpha method.drift method.mixing method.objective
    method.server checkpoint.every checkpoint.keep trackers held_out validation noise target unseen resume a.b.c"""
VALUES = """
    1e30 -1 0 nan inf -inf 1e308 -1e308 99999999999999999999 '' null [] {} [1,2] true abc 1e-320 {a:1} [[1]] ../../x
    ${seed} ${nix} ${oc.env:HOME} ${local} -0.0 [nan] {name:nix} [{name:crop}] name ~ [null] 1.5 0x10 __class__ [ '
    1,2 range(0,1e9) glob(*) choice(1)"""
STRANGE = ("'\x00'", "\u202e", "x" * 5000, "[" * 100)


@pytest.mark.exhaustive
def test_settings(cli: Cli, tmp_path: Path) -> None:
    draw, refusals = np.random.default_rng(0), 0
    cases = [(key, value) for key in KEYS.split() for value in (*VALUES.split(), *STRANGE)]
    for number in draw.permutation(len(cases))[:400]:
        key, value = cases[number]
        method = "method=feddyn" if key == "method.alpha" else "method=fedavg"
        words = [] if key == "method" else [method]
        refusals += refused(cli, tmp_path, "run", "--dry-run", *words, f"{key}={value}", may_do=True)
    assert refusals > 250


# --- arrays ----------------------------------------


class Bomb:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
Y = np.arange(40) % 3
TEXT, OBJECTS, BOMB = np.array(["a"] * 40), np.array([{}] * 40, object), np.array([Bomb()] * 40, object)
STRUCT, DATES, VOID = np.zeros(40, [("a", "f4")]), np.zeros(40, "M8[s]"), np.zeros(40, "V4")
ARRAYS: list[dict[str, Any]] = [
    *({"x_train": x} for x in (TEXT, OBJECTS, BOMB, STRUCT, DATES, VOID, X.astype(complex), X[0, 0], X[0], X[:30])),
    *({"x_train": x} for x in (np.full((40, 4), 2**63, "u8"), np.full((40, 4), 1e300), np.where(X > 2, np.nan, X))),
    *({"x_train": x} for x in (X[:, :0], np.zeros((40, 0, 0), "u1"), np.zeros(40, "f4"), None)),
    *({"y_train": y} for y in (TEXT, OBJECTS, BOMB, STRUCT, DATES, VOID, Y.astype(complex), np.array(1), Y[:30], None)),
    *({"y_train": y} for y in (Y - 1, Y * 10**12, Y * 10**7, np.full(40, 2**64 - 1, "u8"), Y.reshape(20, 2))),
    *({"y_train": y} for y in (np.stack([Y, Y], 1), np.zeros((40, 2, 2), int), Y.astype("f4"), np.where(Y, 1, np.nan))),
    *({"x_test": x, "y_test": Y[:5]} for x in (X[:5, :3], X[:4], TEXT[:5], X[:5].astype(int), np.array(1.0), None)),
    *({"x_test": X[:5], "y_test": y} for y in (Y[:5] - 1, Y[:4], TEXT[:5], Y[:5].astype("f4"), Y[:5] * 10**12, None)),
    *({"client_train": c} for c in (np.full(40, np.nan), Y[:3], np.zeros((40, 2)), OBJECTS)),
    *({"client_train": Y, "client_test": c} for c in (Y[:3], OBJECTS)),
    *({"names": names} for names in (np.array(["a"]), np.array(3), OBJECTS)),
    {"x_train": X[:0], "y_train": Y[:0]},
    {"x_train": X[:1], "y_train": Y[:1]},
]  # fmt: skip


def test_arrays(cli: Cli, tmp_path: Path) -> None:
    words = ("run", "-q", "method=fedavg", "data=npz", "data.path=mine.npz", "rounds=1", "clients=2", "partition=iid")
    for changed in ARRAYS:
        arrays = {"x_train": X, "y_train": Y} | changed
        np.savez(tmp_path / "mine.npz", **{name: array for name, array in arrays.items() if array is not None})
        assert refused(cli, tmp_path, *words), changed
    assert not (tmp_path / "executed").exists()


def test_damaged_arrays(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", x_train=X, y_train=Y)
    good = (tmp_path / "good.npz").read_bytes()
    directory = bytearray(good)
    directory[good.rindex(b"PK\x01\x02") + 6] = 255  # an entry that needs version 25.5 of zip
    words = ("run", "--dry-run", "method=fedavg", "data=npz", "data.path=mine.npz", "clients=2", "partition=iid")
    refusals = 0
    for blob in (*damaged(good, 60), bytes(directory), pickle.dumps(Bomb()), b"", b"PK\x03\x04", b"\x93NUMPY"):
        (tmp_path / "mine.npz").write_bytes(blob)
        refusals += refused(cli, tmp_path, *words, may_do=True)
    assert refusals > 40
    assert not (tmp_path / "executed").exists()


def damaged(blob: bytes, count: int) -> Iterator[bytes]:
    """Copies that are cut off, changed in some bytes, have a stretch removed, doubled, or put in another place."""
    draw = np.random.default_rng(len(blob))
    for _ in range(count):
        a, b = sorted(int(i) for i in draw.integers(0, len(blob), 2))
        spoilt = bytearray(blob)
        for at in draw.integers(0, len(blob), 3):
            spoilt[int(at)] = int(draw.integers(256))
        kinds = (blob[:a], bytes(spoilt), blob[:a] + blob[b:], blob[:b] + blob[a:], blob[b:] + blob[a:b] + blob[:a])
        yield kinds[int(draw.integers(len(kinds)))]


# --- recipes and plans ----------------------------------------

RECIPE = """\
method: {name: feddyn, alpha: 0.1, mixing: {name: by_samples}}
data: digits
clients: 4
rounds: 3
model: {name: mlp, hidden: [4]}
local: {lr: 0.1, epochs: 1}
evaluation:
  what: [global]
seed: ${rounds}
"""
RECIPES = [
    "!!python/object/apply:os.mkdir [executed]", "method: !!python/name:os.system", "method: [", "- 1\n- 2", "3", "abc",
    "? {a: 1}\n: 2", "{1: 2}", "{null: 1}", "method: {name: [fedavg]}", "method: {drift: {name: {}}}", "method: null",
    "method: {objective: {cross_entropy: 3}}", "method: {objective: [1]}", "method: {objective: [{lr: 1}]}", "local: 3",
    "local: [1]", "local: {lr: {}}", "local: {lr: 2001-01-01}", "model: {hidden: {a: 1}}", "evaluation: {what: {a: b}}",
    "data: {name: npz, path: {}}", "data: {name: npz, path: /dev/null}", "data: {name: npz, path: .}", "teacher: .",
    "rounds: .inf", "rounds: .nan", "rounds: 2001-01-01", "rounds: !!binary aGVsbG8=", "rounds: !!set {a}", "resume: x",
    "seed: ${seed}", "seed: ${method}", "seed: ${oc.env:HOME}", "seed: ${", "seed: ${a}${b}", "method: ${data}",
    "a: &a [*a]", "<<: 3", "<<: {method: 1}", "\x00", "\ufeff\x01", "%YAML 9.9\n---\nrounds: 1", "--- 1\n--- 2",
    "rounds: 1\nrounds: 2", "method: fedavg\n\tdata: x", "x: " + "[" * 500, "x: " + "{a: " * 60, "\"\\ud800\": 1",
]  # fmt: skip


def test_recipes(cli: Cli, tmp_path: Path) -> None:
    recipe, refusals = tmp_path / "recipe.yaml", 0
    for text in RECIPES:
        recipe.write_text(text, encoding="utf-8", errors="surrogatepass")
        assert refused(cli, tmp_path, "run", "--dry-run", "recipe.yaml"), text
    for blob in damaged(RECIPE.encode(), 100):
        recipe.write_bytes(blob)
        refusals += refused(cli, tmp_path, "run", "--dry-run", "recipe.yaml", may_do=True)
    assert refusals > 50
    assert not (tmp_path / "executed").exists()


def test_plans(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    for text in (*RECIPES, *(f"{name}: {{label: a, config: {{method: fedavg}}}}" for name in ("../a", "/a", "a/b"))):
        (tmp_path / "sweep" / "sweep.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        assert refused(cli, tmp_path, "run", "resume=sweep"), text
    assert not (tmp_path / "executed").exists()


# --- run directories ----------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds with a checkpoint after each."""
    out = tmp_path_factory.mktemp("runs") / "there"
    words = ("method=scaffold", "rounds=2", "checkpoint.every=1", f"out={out}", "participation=0.5", *SMALL)
    assert main(["run", "-q", *words]) == 0
    shutil.rmtree(out / "tables")
    return out


JUNK: list[Any] = [None, -1, 3, 1e30, "x", "", [], {}, [1], {"a": 1}, True, "../x", [[]], 2**70]


def changed(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The tree with each of its values replaced by each kind of junk, or omitted."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        for junk in (*JUNK, changed):
            copy = json.loads(json.dumps(tree))
            if junk is changed:
                del copy[key]
            else:
                copy[key] = junk
            if copy != tree:
                yield (*path, key, junk), copy
        for inner, below in changed(tree[key], (*path, key)):
            copy = json.loads(json.dumps(tree))
            copy[key] = below
            yield inner, copy


def sealed(manifest: dict[str, Any]) -> str:
    """The manifest with a correct checksum, as written by somebody who knows the format."""
    manifest = {key: value for key, value in manifest.items() if key != "sha256"}
    seal = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps(manifest | {"sha256": seal})


@pytest.mark.exhaustive
def test_manifests_that_somebody_sealed_again(cli: Cli, tmp_path: Path, finished: Path) -> None:
    there = Path(shutil.copytree(finished, tmp_path / "there"))
    path, draw = there / "checkpoint" / "round-000002" / "manifest.json", np.random.default_rng(1)
    cases, good = list(changed(json.loads(path.read_text()))), path.read_text()
    refusals = 0
    for number in draw.permutation(len(cases))[:60]:
        path.write_text(sealed(cases[number][1]))
        if refused(cli, tmp_path, "run", "-q", "resume=there", "rounds=3", may_do=True):
            refusals += 1
        else:
            shutil.rmtree(there)
            shutil.copytree(finished, there)
    path.write_text(good)
    assert refusals > 30


def test_a_manifest_of_something_else_is_named(cli: Cli, tmp_path: Path, finished: Path) -> None:
    there = Path(shutil.copytree(finished, tmp_path / "there"))
    for text in ("{}", "5", '"a"', "[1]"):
        (there / "checkpoint" / "round-000002" / "manifest.json").write_text(text)
        assert "manifest.json lacks entries of a checkpoint" in cli("run", "-q", "resume=there", "rounds=3").err


@pytest.mark.exhaustive
def test_damaged_checkpoints(cli: Cli, tmp_path: Path, finished: Path) -> None:
    there = Path(shutil.copytree(finished, tmp_path / "there"))
    for file in sorted((there / "checkpoint" / "round-000002").iterdir()):
        good = file.read_bytes()
        for blob in damaged(good, 15):
            if blob != good:
                file.write_bytes(blob)
                assert refused(cli, tmp_path, "run", "-q", "resume=there", "rounds=3"), file
        file.write_bytes(good)


@pytest.mark.exhaustive
def test_tensors_that_somebody_sealed_again(cli: Cli, tmp_path: Path, finished: Path) -> None:
    """Complete files with correct checksums and wrong contents."""
    there = Path(shutil.copytree(finished, tmp_path / "there"))
    folder, refusals = there / "checkpoint" / "round-000002", 0
    for file in sorted(folder.glob("*.safetensors")):
        manifest, tensors = (folder / "manifest.json").read_text(), load(file.read_bytes())
        for name, value in tensors.items():
            spoilt = [value[:1], value.astype("i8"), value.reshape(1, -1), value[:0], np.zeros((), "f4")]
            spoilt += [value.astype("f8"), np.concatenate([value, value])]
            for content in ({**tensors, name: wrong} for wrong in spoilt):
                blob = save(content)
                about = json.loads(manifest)
                about["files"][file.name] = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
                file.write_bytes(blob)
                (folder / "manifest.json").write_text(sealed(about))
                refusals += refused(cli, tmp_path, "run", "-q", "resume=there", "rounds=3", may_do=True, may_write=True)
                shutil.rmtree(there)
                shutil.copytree(finished, there)
    assert refusals > 10


LINES = ["", "x", "{}", "[]", "null", "3", '{"round": null}', '{"round": "x"}', '{"round": 1e400}', '{"round": -1}',
         '{"round": []}', '{"round": 1}', '{"round": 99999999999999999999}', '{"round": true, "seconds": {}}',
         '{"round": 1, "seconds": "x"}', "[" * 5000, '{"round": 1, "a": ' + "[" * 5000, "\x00", "\xff", "NaN",
         '{"round": 1, "cohort": "x"}', '{"round": 1, "global/accuracy": "x", "global/loss": [1]}',
         '{"round": 1, "global/accuracy": 1e999, "comm/params": {}, "failures": []}']  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default:.*its numbers are not those of the run:UserWarning")
@pytest.mark.parametrize("command", ["resume", "report"])
def test_run_directories(command: str, cli: Cli, tmp_path: Path, finished: Path) -> None:
    words = ("run", "-q", "resume=there", "rounds=3") if command == "resume" else ("report", "there", "--out", "page")
    draw, there = np.random.default_rng(2), tmp_path / "there"

    def spoilt() -> Iterator[tuple[str, bytes]]:
        for line in LINES:
            yield "metrics.jsonl", f"{line}\n".encode("latin-1")
            yield "metrics.jsonl", f"{good['metrics.jsonl'].decode()}{line}\n".encode("latin-1")
        for name in ("metrics.jsonl", "config.yaml", "summary.json", "mixing.parquet", "clients.parquet"):
            for blob in damaged(good[name], 5):
                yield name, blob
        for name in ("summary.json", "config.yaml"):
            tree = json.loads(good["summary.json"]) if name == "summary.json" else dict(yaml(good[name]))
            cases = [case for case in changed(tree) if case[0][0] not in PROVENANCE]  # which nothing depends on
            for number in draw.permutation(len(cases))[:18]:
                yield name, json.dumps(cases[number][1]).encode()

    good = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    ended, total = Counter[str](), 0
    for name, blob in spoilt():
        shutil.copytree(finished, there)
        (there / name).write_bytes(blob)
        total += 1
        ended[name] += refused(cli, tmp_path, *words, may_do=True)
        shutil.rmtree(there)
        shutil.rmtree(tmp_path / "page", ignore_errors=True)
    assert total > 90
    assert not ended["summary.json"], "it is derived from the records"
    if command == "resume":  # a report leaves out what it cannot read
        assert min(ended[name] for name in ("mixing.parquet", "clients.parquet")) >= 4
        assert ended["metrics.jsonl"] >= 30
        assert ended["config.yaml"] >= 14
    assert list(tmp_path.iterdir()) == []


def yaml(blob: bytes) -> Any:
    from yaml import load

    return load(blob, Loader)
