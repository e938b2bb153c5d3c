"""Where data files lie, and one sentence when they don't."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from fedloom.core.errors import DataError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Files:
    """What a source reads: which files, and where a person gets them.

    Args:
        title: what the data set is called.
        layouts: alternatives, each a list of files relative to the data folder; a name that ends in ``/`` is a folder.
        origin: where the files are published.
        checksums: of the published files, as ``{"name.zip": "md5 ..."}``.
        torchvision: the name of the torchvision data set that can download them, if there is one.
        options: what that class needs besides ``root``.
    """

    title: str
    layouts: tuple[tuple[str, ...], ...]
    origin: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)
    torchvision: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def look(self, root: str | Path | None = None) -> list[Path] | None:
        """The files of the first layout that is complete, if one is."""
        return next((paths for layout in self.layouts if (paths := find(layout, root))), None)

    def obtain(self, root: str | Path | None = None, download: bool = False) -> list[Path]:
        """The files of the first layout that is complete.

        Args:
            root: the data folder, instead of the usual places.
            download: let torchvision fetch what is missing.

        Raises:
            DataError: which files are expected where, and how to get them.
        """
        if paths := self.look(root):
            return paths
        if download and self.torchvision:
            fetch(self.title, self.torchvision, roots(root)[0], **self.options)
            return self.obtain(root)
        raise DataError(self.missing(root))

    def expected(self) -> str:
        """The layouts in words."""
        return ", or ".join(" and ".join(shorten(layout)) for layout in self.layouts)

    def missing(self, root: str | Path | None = None) -> str:
        """The sentence that says what is not there, where it was looked for, and how to get it."""
        wanted, here = self.expected(), " or ".join(map(str, roots(root)))
        for folder, layout in ((folder, layout) for folder in roots(root) for layout in self.layouts):
            lost = [file for file, path in zip(layout, locate(layout, folder), strict=True) if path is None]
            if len(lost) < len(layout):
                wanted, here = " and ".join(shorten(lost)), f"{folder}, beside the others of its kind"
                break
        advice = "put what is missing there, or name the folder that holds it with root=... or FEDLOOM_DATA"
        if self.origin:
            sums = ", ".join(f"{name}: {checksum}" for name, checksum in self.checksums.items())
            advice = f"get it from {self.origin}{f' ({sums})' if sums else ''}, and {advice}"
        if self.torchvision:
            advice += ", or let torchvision fetch it with download=true"
        return f"{self.title} is not here: expected {wanted} in {here}; {advice}."


PLACES: dict[str, Files] = {}
"""What each source reads by default, by the source's name; sources that need no files are not in it."""


def reads(files: Files) -> Callable[[F], F]:
    """Decorator of a source: remember what it reads, for those who want to know without reading it."""

    def note(factory: F) -> F:
        PLACES[factory.__name__] = files
        return factory

    return note


def roots(root: str | Path | None = None) -> list[Path]:
    """The folders to look in: ``root`` alone if given, otherwise $FEDLOOM_DATA and then ~/.cache/fedloom."""
    if root:
        return [Path(root).expanduser()]
    named = os.environ.get("FEDLOOM_DATA")
    return [*([Path(named).expanduser()] if named else []), Path.home() / ".cache" / "fedloom"]


def locate(files: Sequence[str], folder: Path) -> list[Path | None]:
    """Each of ``files`` in ``folder``, plain or gzipped; None for one that is not there."""
    return [
        (folder / f if (folder / f).is_dir() else None)
        if f.endswith("/")
        else next((p for p in (folder / f, folder / f"{f}.gz") if p.is_file()), None)
        for f in files
    ]


def find(files: Sequence[str], root: str | Path | None = None) -> list[Path] | None:
    """All of ``files`` in one folder; None if no folder has them all."""
    for folder in roots(root):
        paths = [path for path in locate(files, folder) if path]
        if len(paths) == len(files):
            return paths
    return None


def shorten(layout: Sequence[str]) -> list[str]:
    """File names without repeating their common folder.

    >>> shorten(["A/raw/x", "A/raw/y"]), shorten(["a.npz"]), shorten(["A/train/", "A/test/"])
    (['A/raw/x', 'y'], ['a.npz'], ['A/train/', 'test/'])
    """
    common = f"{Path(layout[0]).parent}/"
    return [layout[0], *(f.removeprefix(common) for f in layout[1:])]


def fetch(title: str, kind: str, folder: Path, **options: Any) -> None:
    """Download with torchvision into ``folder``; files appear there whole, after all of them have come.

    Raises:
        DataError: if torchvision cannot be imported, or the download fails.
    """
    try:
        datasets = import_module("torchvision").datasets  # an extra; it refuses to load beside another build of torch
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise DataError(
            f'{title} can only be downloaded with torchvision (pip install "fedloom[vision]"): {reason}.'
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
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise DataError(f"{title} could not be downloaded into {folder} ({reason}).") from error
