"""A recipe is data: no setting of any command opens, imports, runs or downloads what it does not document."""

import inspect
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Cli

from fedloom.applications import applications, at
from fedloom.config.schema import Choice, Record, Section, Value

SCHEMAS = {one.name: at(one.schema) for one in applications().values() if one.schema}
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
    found: dict[tuple[str, ...], str] = {}
    for command, schema in SCHEMAS.items():
        for key, section in schema.sections.items():
            for words in settings(key, section):
                found.setdefault(words, command)
    return [(command, *words) for words, command in found.items()]


class Watch:
    """What the audit events of this process say of names and files that hold ``MARK``, and of any connection."""

    def __init__(self) -> None:
        self.on, self.found = False, set[str]()
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event.startswith(("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request")):
            self.found.add("network")
        elif event in (
            "open",
            "import",
            "exec",
            "os.listdir",
            "os.scandir",
            "subprocess.Popen",
            "os.system",
            "compile",
        ):
            told = getattr(args[0], "co_filename", args[0]) if event in ("exec", "import") else args
            if MARK in repr(told):
                self.found.add("open" if event in ("os.listdir", "os.scandir") else event.partition(".")[0])


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


@pytest.mark.slow
@pytest.mark.parametrize("command", SCHEMAS)
def test_no_setting_leads_to_code_or_to_a_file_that_it_does_not_name(
    command: str, cli: Cli, watch: Watch, values: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: dict[tuple[str, ...], set[str]] = {}
    codes: dict[int, int] = {}
    for of, *before, key in all_settings():
        if of != command:
            continue
        outcomes[(*before, key)] = seen = set()
        for value in values:
            watch.found, watch.on = set(), True
            try:
                code = cli(command, *before, f"{key}='{value}'", *SMALL).code
            finally:
                watch.on = False
            codes[code] = codes.get(code, 0) + 1
            seen |= watch.found
    with capsys.disabled():
        opened = sorted(" ".join(words) for words, seen in outcomes.items() if seen)
        print(f"\n{command}: {len(outcomes)} settings x {len(values)} values, exit codes {codes}; opened by {opened}")
    wrong = {words: seen for words, seen in outcomes.items() if seen - ({"open"} if words[-1] in OPENS else set())}
    assert not wrong
