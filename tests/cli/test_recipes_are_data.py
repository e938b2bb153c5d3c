"""Recipes and run directories are data: neither opens, imports, runs or downloads what it does not document."""

import hashlib
import importlib
import inspect
import json
import pickle
import shutil
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import Cli
from helpers.marks import kinds

import fedloom as fl
from fedloom.applications import applications, at
from fedloom.base import yaml
from fedloom.config.sections import Choice, Record, Section, Value
from fedloom.experiment.rundir import PROVENANCE, checksums

SCHEMAS = {
    schema.command: schema for record in applications().values() if record.schema for schema in [at(record.schema)]
}
SMALL = ("--dry-run", "-q")
MARK = "fedloom_stranger"
OPENS = {"data": "a file or folder of data", "data.path": "the same", "data.root": "the folder of a published data set"}
OPENS |= {
    "teacher": "a run directory",
    "init": "a run directory, or a file of parameters",
    "model.weights": "a file of parameters",
    "model.network": "a folder of a network",
}
OPENS |= {"partition.path": "a table or JSON", "data.test": "a table", "data.validation": "a table"}
OPENS |= {"client_local": "a table", "presence": "a table"}
OPENS |= {"judge.inception": "a file of parameters"}
"""Settings that name files, which are opened as data; all others open nothing, none leads to code or the network."""


def holds_text(annotation: Any) -> bool:
    """Whether an annotation takes any text; ``Literal`` takes a few words."""
    if annotation in (str, Path, Any):
        return True
    return typing.get_origin(annotation) is not typing.Literal and any(map(holds_text, typing.get_args(annotation)))


def settings(key: str, section: Section) -> Iterator[tuple[str, ...]]:
    """Every setting of a section that takes any text, after the words that make it a setting."""
    if isinstance(section, Value) and holds_text(section.parameter.annotation):
        yield (key,)
    elif isinstance(section, Record):
        for name, parameter in inspect.signature(section.factory, eval_str=True).parameters.items():
            if holds_text(parameter.annotation):
                yield (f"{key}.{name}",)
    elif isinstance(section, Choice):
        yield (key,)
        for name in [entry.name for entry in section.registry]:
            for setting, parameter in section.parameters(name).items():
                if holds_text(parameter.annotation):
                    yield f"{key}={name}", f"{key}.{setting}"
        for slot, choice in section.slots.items():
            yield from settings(f"{key}.{slot}", choice)


def all_settings() -> list[tuple[str, ...]]:
    """Every setting once, after the first command that has it."""
    commands: dict[tuple[str, ...], str] = {}
    for command, schema in SCHEMAS.items():
        for key, section in schema.sections.items():
            for words in settings(key, section):
                commands.setdefault(words, command)
    return [(command, *words) for words, command in commands.items()]


class Watch:
    """What the audit events of this process say of names and files that hold ``MARK``, and of any connection."""

    def __init__(self) -> None:
        self.on, self.actions = False, set[str]()
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event.startswith(("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request")):
            self.actions.add("network")
        elif event in (
            "open",
            "import",
            "exec",
            "os.listdir",
            "os.scandir",
            "subprocess.Popen",
            "os.system",
            "compile",
            "pickle.find_class",
        ):
            subject = getattr(args[0], "co_filename", args[0]) if event in ("exec", "import") else args
            if MARK in repr(subject):
                self.actions.add("open" if event in ("os.listdir", "os.scandir") else event.partition(".")[0])


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """A path, the same without its suffix, a folder, a URL, and names of code: of a module that can be imported."""
    home = tmp_path / MARK
    for folder in (home, tmp_path / "code"):
        folder.mkdir()
        (folder / f"{MARK}.py").write_text("raise RuntimeError('a stranger ran code')\n")
    (home / "net.safetensors").write_bytes(b"nothing")
    (home / "config.yaml").write_text("method: fedavg\n")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    return (
        str(home / f"{MARK}.py"), str(home / "net.safetensors"), str(home), f"http://127.0.0.1:9/{MARK}",
        f"hf-hub:{MARK}/net", f"{MARK}.attack", f"{MARK}:attack",
    )  # fmt: skip


@pytest.mark.parametrize(("command", "share"), kinds(product(SCHEMAS, ("one", "all")), [*product(SCHEMAS, ["one"])]))
def test_no_setting_leads_to_code_or_to_a_file_that_it_does_not_name(
    command: str, share: str, cli: Cli, watch: Watch, values: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each setting gets all values, or one of them in turn."""
    outcomes: dict[tuple[str, ...], set[str]] = {}
    codes: dict[int, int] = {}
    for of, *before, key in all_settings():
        if of != command:
            continue
        outcomes[(*before, key)] = actions = set()
        for value in values if share == "all" else [values[len(outcomes) % len(values)]]:
            code, more = watch_command(cli, watch, (*command.split(), *before, f"{key}='{value}'", *SMALL))
            codes[code] = codes.get(code, 0) + 1
            actions |= more
    with capsys.disabled():
        openers = sorted(" ".join(words) for words, actions in outcomes.items() if actions)
        print(
            f"\n{command}: {len(outcomes)} settings, {share} of {len(values)} values, exit {codes}, opened by {openers}"
        )
    for words, actions in outcomes.items():
        assert actions <= ({"open"} if words[-1] in OPENS else set()), words


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        ("devices=table", "devices.path"),
        ("devices=table", "devices.path=fleet.csv", "devices.intervals"),
        ("selection=listed", "selection.path"),
        ("schedule=replay", "schedule.path"),
        ("method=dpsgd", "method.topology=edge_list", "method.topology.pairs"),
    ],
    ids=lambda words: words[-1],
)
def test_files_of_time_and_graphs_are_tables(
    words: tuple[str, ...], cli: Cli, watch: Watch, values: Sequence[str], tmp_path: Path
) -> None:
    """They are opened when a run begins, not by a dry run; what is no table ends it."""
    (tmp_path / "fleet.csv").write_text("speed,down,up\n1e9,1e6,1e6\n")
    *before, key = words
    for value in values:
        code, actions = watch_command(cli, watch, ("run", "-q", "rounds=1", "clients=4", *before, f"{key}='{value}'"))
        assert code == 2
        assert actions <= {"open"}


READING = {
    "predict": ("predict", "run=one", "test.npz"),
    "evaluate": ("evaluate", "run=one"),
    "export": ("export", "run=one"),
    "target": ("target", "run=one", "data=test.npz", "method=target_prior"),
    "report": ("report", "one"),
    "verify": ("verify", "one", "--replay", "1"),
    "run": ("run", "-q", "resume=one"),
    "search": ("search", "-q", "resume=one"),
    "distill": ("distill", "-q", "resume=one"),
    "deploy server": ("deploy", "server", "-q", "resume=one", "--insecure"),
    "deploy status": ("deploy", "status", "one"),
    "deploy why": ("deploy", "why", "one"),
    "deploy agree": ("deploy", "agree", "one"),
}
"""The commands that read a run directory."""


class Stranger:
    """Imports a stranger's module when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return importlib.import_module, (MARK,)


@pytest.fixture
def finished(cli: Cli, tmp_path: Path) -> Path:
    """A finished run of a method with client states, samples to predict, and an untouched copy of the run."""
    words = ("method=fedper", "clients=3", "rounds=2", "model.hidden=[8]", "checkpoint.every=1", "participation=1")
    assert cli("run", "-q", "data=digits", *words, "out=one").code == 0
    np.savez(
        tmp_path / "test.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.arange(4), x_train=np.zeros((4, 1, 8, 8))
    )
    shutil.copytree(tmp_path / "one", tmp_path / "whole")
    return tmp_path / "one"


def watch_command(cli: Cli, watch: Watch, words: Sequence[str]) -> tuple[int, set[str]]:
    """The exit code of a command, and what it did with what a stranger named."""
    watch.actions, watch.on = set(), True
    try:
        return cli(*words).code, watch.actions
    finally:
        watch.on = False


def leaves(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all texts, and of nothing, in plain data."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*at, key))
    elif tree is None or isinstance(tree, str):
        yield at


def replaced(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Plain data with another value at a place."""
    if not at:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[at[0]] = replaced(tree[at[0]], at[1:], value)
    return copy


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default:.*its numbers are not those of the run:UserWarning")
def test_no_file_of_a_run_directory_leads_to_code(
    finished: Path, cli: Cli, watch: Watch, values: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is a pickle, a torch archive, a YAML of objects, or a link's target; each command reads the run."""
    codes: dict[int, int] = {}
    torch.save(Stranger(), finished.parent / "torch")
    texts = {
        "pickle": pickle.dumps(Stranger()),
        "torch": (finished.parent / "torch").read_bytes(),
        "yaml": f"!!python/object/apply:importlib.import_module [{MARK}]\n".encode(),
        "names": json.dumps(dict.fromkeys(("model", "config", "checkpoint", "out", "run"), values[0])).encode(),
    }
    original = finished.parent / "whole"
    paths = [path.relative_to(original) for path in original.rglob("*") if path.is_file()]
    files = sorted(path for path in paths if "tables" not in path.parts)
    assert len(files) >= 12
    for command, words in READING.items():
        for name in files:
            for kind, content in texts.items():
                (finished / name).parent.mkdir(exist_ok=True)
                (finished / name).write_bytes(content)
                code, actions = watch_command(cli, watch, words)
                assert not actions, (command, str(name), kind)
                codes[code] = codes.get(code, 0) + 1
            shutil.rmtree(finished)
            shutil.copytree(original, finished)
    with capsys.disabled():
        print(f"\n{len(READING)} commands x {len(files)} files x {len(texts)} contents: exit codes {codes}")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default:.*its numbers are not those of the run:UserWarning")
@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "checkpoint/round-000002/manifest.json"])
def test_no_text_in_a_run_directory_leads_to_code_or_to_a_file_that_it_does_not_name(
    name: str, finished: Path, cli: Cli, watch: Watch, values: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every text of its settings, summary and checkpoint is a path, and the name of code that can be imported."""
    original, codes, openers = finished.parent / "whole", dict[int, int](), set[str]()
    tree = yaml.load(original / name) if name.endswith(".yaml") else json.loads((original / name).read_text())
    for place in leaves(tree):
        key = ".".join(map(str, place))
        for value in (values[0], values[5]):
            for command in ("predict", "report", "verify", "run"):
                changed = replaced(tree, place, value)
                (finished / name).write_text(yaml.dump(changed) if name.endswith(".yaml") else json.dumps(changed))
                code, actions = watch_command(cli, watch, READING[command])
                if "open" in actions:
                    openers.add(key)
                assert not actions - ({"open"} if key in OPENS else set()), (command, key, value, actions)
                codes[code] = codes.get(code, 0) + 1
        shutil.rmtree(finished)
        shutil.copytree(original, finished)
    with capsys.disabled():
        print(f"\n{name}: {len(list(leaves(tree)))} texts, exit codes {codes}; opened by {sorted(openers)}")


def test_a_checkpoint_names_no_file_elsewhere(finished: Path, cli: Cli, watch: Watch, values: Sequence[str]) -> None:
    """Its manifest has a valid checksum; clients' states likewise are files of the run's own folder."""
    path = finished / "checkpoint" / "round-000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    (finished / "summary.json").unlink()  # a run that had not ended
    for name in (values[1], f"../../../{MARK}/net.safetensors"):
        forgery = manifest | {"files": manifest["files"] | {name: manifest["files"]["server.safetensors"]}}
        seal = hashlib.sha256(json.dumps(forgery, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(forgery | {"sha256": seal}))
        for command in ("run", "predict", "evaluate", "export", "deploy status"):
            _, actions = watch_command(cli, watch, READING[command])
            assert not actions, (command, name)
    assert "names a file elsewhere" in cli("run", "-q", "resume=one").err


def test_models_are_used_without_the_tables_that_their_training_names(
    finished: Path, cli: Cli, watch: Watch, values: Sequence[str]
) -> None:
    path, table = finished / "config.yaml", values[1]
    settings = yaml.load(path)
    timed = {key: {"name": name, "path": table} for key, name in (("schedule", "replay"), ("selection", "listed"))}
    timed["evaluation"] = settings["evaluation"] | {"hours": 0.5}
    for change in (
        {"client_local": table, "presence": table},
        timed | {"devices": {"name": "table", "path": table, "intervals": table}},
    ):
        path.write_text(yaml.dump(settings | change))
        for words in (("predict", "run=one", "test.npz", "--client", "0"), READING["evaluate"]):
            assert watch_command(cli, watch, words) == (0, set())


def test_no_cluster_that_a_run_directory_names_is_joined_to_use_or_replay_it(
    finished: Path, cli: Cli, watch: Watch
) -> None:
    """Its machines would run code of a stranger, and be sent the data."""
    settings = yaml.load(path := finished / "config.yaml")
    path.write_text(yaml.dump(settings | {"engine": {"name": "ray", "address": "127.0.0.1:9"}}))
    summary = json.loads((finished / "summary.json").read_text())
    (finished / "summary.json").write_text(json.dumps(summary | {"checksums": checksums(finished)}))
    for command in ("verify", "evaluate"):
        assert watch_command(cli, watch, READING[command]) == (0, set())
    plain = {key: value for key, value in yaml.load(path).items() if key not in PROVENANCE}
    (sweep := finished.parent / "sweep").mkdir()
    (sweep / "sweep.yaml").write_text(yaml.dump({"one": {"label": "one", "config": plain}}))
    for name in ("one", "sweep"):
        first = cli("run", "-q", f"resume={name}")
        with_address = cli("run", "-q", f"resume={name}", "engine.address=127.0.0.1:9")
        asks = "if that is your cluster, add engine.address=127.0.0.1:9, and otherwise engine=serial."
        assert (first.code, asks in first.err, asks in with_address.err) == (2, True, False)
        assert cli("run", "-q", f"resume={name}", "engine=serial").code == 0


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("method=dpsgd", "model=logistic", "method.topology=edge_list", "method.topology.pairs=table"),
         ("method", "topology", "pairs")),
        (("model=several", "model.names=[logistic,logistic]", "method.personal=own_architectures",
          "method.personal.by=speed", "devices=table", "devices.path=table.csv"), ("devices", "path")),
    ],
    ids=["edges", "networks"],
)  # fmt: skip
def test_who_heard_whom_and_had_which_network_is_known_without_their_tables(
    words: tuple[str, ...], place: tuple[str, ...], cli: Cli, watch: Watch, values: Sequence[str], tmp_path: Path
) -> None:
    """A stranger's table neither is opened nor deals networks anew; the run has recorded which each client trains."""
    (tmp_path / "table").write_text("0 1\n1 2\n")
    (tmp_path / "table.csv").write_text("client,speed\n0,3e9\n1,1e9\n2,9e9\n3,2e9\n")
    assert cli("run", "-q", "data=digits", "clients=4", "rounds=1", *words, "out=one").code == 0
    clients = fl.load("one").evaluate()
    settings = yaml.load(path := tmp_path / "one" / "config.yaml")
    path.write_text(yaml.dump(replaced(settings, place, values[1])))
    watch.actions, watch.on = set(), True
    try:
        again = fl.load("one").evaluate()
    finally:
        watch.on = False
    assert (again, watch.actions) == (clients, set())


@pytest.mark.parametrize("command", [*applications(), "predict", "export", "verify", "evaluate", "data", "list"])
def test_no_word_of_a_command_leads_to_code(command: str, cli: Cli, watch: Watch, values: Sequence[str]) -> None:
    """A folder or file that is named is opened as data; code is named by --import, and by --data of a node."""
    for value in values:
        for words in ((value,), (f"run={value}",), (f"resume={value}",), ("status", value), ("why", value)):
            _, actions = watch_command(cli, watch, (command, *words, "-q"))
            assert actions <= {"open"}, words
