"""Where data files lie, and one sentence when they don't."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import DataError


def roots(root: str | Path | None = None) -> list[Path]:
    """The folders to look in: ``root`` alone if given, otherwise $FEDLOOM_DATA and then ~/.cache/fedloom."""
    if root:
        return [Path(root).expanduser()]
    named = os.environ.get("FEDLOOM_DATA")
    return [*([Path(named).expanduser()] if named else []), Path.home() / ".cache" / "fedloom"]


def locate(files: Sequence[str], folder: Path) -> list[Path | None]:
    """Each of ``files`` in ``folder``, plain or gzipped; None for one that is not there."""
    return [next((p for p in (folder / f, folder / f"{f}.gz") if p.is_file()), None) for f in files]


def find(files: Sequence[str], root: str | Path | None = None) -> list[Path] | None:
    """All of ``files`` in one folder; None if no folder has them all."""
    for folder in roots(root):
        paths = [path for path in locate(files, folder) if path]
        if len(paths) == len(files):
            return paths
    return None


def obtain(
    title: str,
    *layouts: Sequence[str],
    root: str | Path | None = None,
    download: bool = False,
    torchvision: str = "",
    **options: Any,
) -> list[Path]:
    """The files of the first layout that is complete.

    Args:
        title: what the data set is called.
        *layouts: alternatives, each a list of files relative to the data folder.
        root: the data folder, instead of the usual places.
        download: let torchvision fetch what is missing.
        torchvision: the name of its data set class, if it has one.
        **options: what that class needs besides ``root``.

    Raises:
        DataError: which files are expected where, and how to get them.
    """
    for layout in layouts:
        if paths := find(layout, root):
            return paths
    if download and torchvision:
        fetch(title, torchvision, roots(root)[0], **options)
        return obtain(title, *layouts, root=root)
    wanted = ", or ".join(" and ".join(shorten(layout)) for layout in layouts)
    here = " or ".join(map(str, roots(root)))
    for folder, layout in ((folder, layout) for folder in roots(root) for layout in layouts):
        lost = [file for file, path in zip(layout, locate(layout, folder), strict=True) if path is None]
        if len(lost) < len(layout):
            wanted, here = " and ".join(shorten(lost)), f"{folder}, beside the others of its kind"
            break
    advice = "put what is missing there, or name the folder that holds it with root=... or FEDLOOM_DATA"
    if torchvision:
        advice += ", or let torchvision fetch it with download=true"
    raise DataError(f"{title} is not here: expected {wanted} in {here}; {advice}.")


def shorten(layout: Sequence[str]) -> list[str]:
    """File names without repeating their common folder.

    >>> shorten(["A/raw/x", "A/raw/y"]), shorten(["a.npz"])
    (['A/raw/x', 'y'], ['a.npz'])
    """
    first = Path(layout[0])
    return [layout[0], *(Path(f).name if Path(f).parent == first.parent else f for f in layout[1:])]


def fetch(title: str, kind: str, folder: Path, **options: Any) -> None:
    """Download with torchvision into ``folder``.

    Raises:
        DataError: if torchvision cannot be imported, or the download fails.
    """
    try:
        from torchvision import datasets  # an extra, and it refuses to load beside another build of torch
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise DataError(
            f'{title} can only be downloaded with torchvision (pip install "fedloom[vision]"): {reason}.'
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        getattr(datasets, kind)(root=str(folder), download=True, **options)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise DataError(f"{title} could not be downloaded into {folder} ({reason}).") from error
