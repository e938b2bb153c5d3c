"""Locating the files of a data set, and the error sentence if they are missing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from fedloom.core.errors import DataError, with_type
from fedloom.core.registry import Entry

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Files:
    """The files of a data set and their origin.

    Args:
        title: name of the data set.
        layouts: alternative lists of files relative to the data folder; a name that ends in ``/`` is a folder.
        origin: where the files are published.
        checksums: of the published files, as ``{"name.zip": "md5 ..."}``.
        torchvision: name of the torchvision data set that can download them, if any.
        options: further arguments of that class.
    """

    title: str
    layouts: tuple[tuple[str, ...], ...]
    origin: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    torchvision: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def look(self, root: str | Path | None = None) -> list[Path] | None:
        """Paths of the first layout that is complete, or None."""
        return next((paths for layout in self.layouts if (paths := find(layout, root))), None)

    def obtain(self, root: str | Path | None = None, download: bool = False) -> list[Path]:
        """Paths of the first layout that is complete.

        Args:
            root: the data folder, instead of the default ones.
            download: whether torchvision may download missing files.

        Raises:
            DataError: with the expected files, where they were looked for, and how to get them.
        """
        if paths := self.look(root):
            return paths
        if download and self.torchvision:
            fetch(self.title, self.torchvision, roots(root)[0], **self.options)
            return self.obtain(root)
        raise DataError(self.missing(root))

    def expected(self) -> str:
        """The layouts as text."""
        return ", or ".join(" and ".join(shorten(layout)) for layout in self.layouts)

    def missing(self, root: str | Path | None = None) -> str:
        """The sentence about missing files."""
        wanted, here = self.expected(), " or ".join(map(str, roots(root)))
        for folder, layout in ((folder, layout) for folder in roots(root) for layout in self.layouts):
            lost = [file for file, path in zip(layout, locate(layout, folder), strict=True) if path is None]
            if len(lost) < len(layout):
                wanted, here = " and ".join(shorten(lost)), f"{folder}, where its other files are"
                break
        named = "root=… (data.root=… on the command line) or FEDLOOM_DATA"
        advice = f"put what is missing there, or name the folder that holds it with {named}"
        if self.origin:
            sums = ", ".join(f"{name}: {checksum}" for name, checksum in self.checksums.items())
            advice = f"get it from {self.origin}{f' ({sums})' if sums else ''}, and {advice}"
        if self.torchvision:
            advice += ", or let torchvision fetch it with download=true"
        return f"{self.title} is not here: expected {wanted} in {here}; {advice}."


_FILES: dict[str, Files] = {}


def reads(files: Files) -> Callable[[F], F]:
    """Decorator that says which files a source reads by default."""

    def note(factory: F) -> F:
        _FILES[factory.__name__] = files
        return factory

    return note


def files_of(source: Entry[Any]) -> Files | None:
    """The files that a source reads by default; None if it needs none, or those of its user."""
    return _FILES.get(source.factory.__name__)  # the factory is imported first, and with it what it reads


def roots(root: str | Path | None = None) -> list[Path]:
    """The data folders: ``root`` alone if given, otherwise $FEDLOOM_DATA and then ~/.cache/fedloom."""
    if root:
        return [Path(root).expanduser()]
    named = os.environ.get("FEDLOOM_DATA")
    return [*([Path(named).expanduser()] if named else []), Path.home() / ".cache" / "fedloom"]


def locate(files: Sequence[str], folder: Path) -> list[Path | None]:
    """The path of each file in ``folder``, plain or gzipped; None if missing."""
    return [
        (folder / f if (folder / f).is_dir() else None)
        if f.endswith("/")
        else next((p for p in (folder / f, folder / f"{f}.gz") if p.is_file()), None)
        for f in files
    ]


def find(files: Sequence[str], root: str | Path | None = None) -> list[Path] | None:
    """The paths of all ``files`` in the first data folder that has them all, or None."""
    for folder in roots(root):
        paths = [path for path in locate(files, folder) if path]
        if len(paths) == len(files):
            return paths
    return None


def shorten(layout: Sequence[str]) -> list[str]:
    """File names with their common folder in the first one only.

    >>> shorten(["A/raw/x", "A/raw/y"]), shorten(["a.npz"]), shorten(["A/train/", "A/test/"])
    (['A/raw/x', 'y'], ['a.npz'], ['A/train/', 'test/'])
    """
    common = f"{Path(layout[0]).parent}/"
    return [layout[0], *(f.removeprefix(common) for f in layout[1:])]


def fetch(title: str, kind: str, folder: Path, **options: Any) -> None:
    """Download with torchvision; files appear in ``folder`` only after the download is complete.

    Raises:
        DataError: if torchvision cannot be imported, or the download fails.
    """
    try:
        datasets = import_module("torchvision").datasets  # optional; fails to load beside another build of torch
    except Exception as error:
        raise DataError(
            f'{title} can only be downloaded with torchvision (pip install "fedloom[vision]"): {with_type(error)}.'
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as part:
            getattr(datasets, kind)(root=part, download=True, **options)
            for path in sorted(path for path in Path(part).rglob("*") if path.is_file()):
                target = folder / path.relative_to(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
    except Exception as error:
        raise DataError(f"{title} could not be downloaded into {folder} ({with_type(error)}).") from error


def with_progress(items: Sequence[T], title: str, few: int = 2000) -> Iterator[T]:
    """Iterate with a progress bar on standard error, if it is a terminal and there are more than ``few`` items.

    >>> list(with_progress([1, 2], "counting"))
    [1, 2]
    """
    console = Console(stderr=True)
    if len(items) <= few or not console.is_terminal:
        yield from items
    else:
        yield from track(items, title, console=console, transient=True)
