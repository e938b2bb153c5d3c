"""Files of data sets: where published ones are, the sentence if they are missing, and arrays in npz and npy files."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track

from fedloom.base.errors import DataError, import_extra, in_one_line, with_type
from fedloom.base.files import check_memory, readable_path, whole_file
from fedloom.base.registry import Entry

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
        layout_text, place = self.expected(), " or ".join(map(str, roots(root)))
        for folder, layout in ((folder, layout) for folder in roots(root) for layout in self.layouts):
            lost = [file for file, path in zip(layout, locate(layout, folder), strict=True) if path is None]
            if len(lost) < len(layout):
                layout_text, place = " and ".join(shorten(lost)), f"{folder}, where its other files are"
                break
        setting = "root=… (data.root=… on the command line) or FEDLOOM_DATA"
        advice = f"put the missing files there, or name their folder with {setting}"
        if self.origin:
            sums = ", ".join(f"{name}: {checksum}" for name, checksum in self.checksums.items())
            advice = f"get it from {self.origin}{f' ({sums})' if sums else ''}, and {advice}"
        if self.torchvision:
            advice += ", or let torchvision fetch it with download=true"
        return f"{self.title} is missing: expected {layout_text} in {place}; {advice}."


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
    folder = os.environ.get("FEDLOOM_DATA")
    return [*([Path(folder).expanduser()] if folder else []), Path.home() / ".cache" / "fedloom"]


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
    """Download with torchvision; files appear in ``folder`` only after the download is complete."""
    datasets = import_extra("vision", "torchvision", f"a download of {title}").datasets
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


@contextmanager
def reading(path: Path, failure: str) -> Iterator[None]:
    """Raise a ``DataError`` for whatever fails in the block: the path, and ``failure`` in words.

    Decoders, decompressors and parsers each fail in their own ways.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; name one of its files.") from error
    except Exception as error:
        reason = "" if "allow_pickle" in str(error) else f" ({in_one_line(error)})"  # which may run code
        raise DataError(f"{path} {failure}{reason}.") from error


def read_npz(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Arrays of an npz file by name, without unpickling."""
    failure = "is truncated or not an npz file of plain arrays"
    with reading(path, failure), np.load(readable_path(path), allow_pickle=False) as file:
        names = list(getattr(file, "files", ()))
        if missing := [key for key in keys if key not in names]:
            raise DataError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(names) or 'no named arrays'}.")
        present = [key for key in (*keys, *optional) if key in names]
        sizes = {info.filename: info.file_size for info in file.zip.infolist()}
        check_memory(f"{path} unpacked", sum(sizes.get(f"{key}.npy", 0) for key in present))
        return {key: sound(file[key]) for key in present}


def sound(array: np.ndarray) -> np.ndarray:
    """The same array; a ``ValueError`` if its rows hold no bytes, or its texts are no Unicode.

    Rows without bytes may be any number that a header claims.
    """
    if array.ndim and len(array) and not array.nbytes:
        raise ValueError(f"{len(array):,} rows hold nothing")
    if array.dtype.kind == "U" and array.size:
        codes = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).view(np.uint32)
        if bool(((codes > sys.maxunicode) | (codes >> 11 == 0xD800 >> 11)).any()):
            raise ValueError("its texts are no Unicode")
    return array


def read_npy_folder(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Arrays of a folder's npy files by name, memory-mapped: only what is used is read."""
    files = {file.stem: file for file in path.glob("*.npy")}
    if missing := [key for key in keys if key not in files]:
        raise DataError(
            f"{path} lacks {', '.join(f'{key}.npy' for key in missing)}; it holds {', '.join(files) or 'no npy files'}."
        )
    return {key: read_npy(files[key]) for key in (*keys, *optional) if key in files}


def read_npy(path: Path) -> np.ndarray:
    """The array of an npy file, memory-mapped."""
    with reading(path, "is truncated or not an npy file of plain numbers"):
        return sound(np.load(readable_path(path), mmap_mode="r", allow_pickle=False))


def write_npz(path: Path, **arrays: Any) -> None:
    """Write arrays to an npz file atomically: an interruption leaves either the old file or the new one."""
    with whole_file(path) as file:
        np.savez(file, **arrays)


def cached(path: Path, stamp: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array that ``make`` returns, cached in the npz file ``path`` under ``stamp``.

    A cache with another stamp or a damaged one is replaced. If ``path`` cannot be written, a warning says so.
    """
    if path.is_file():
        try:
            if str(read_npz(path, ["stamp"])["stamp"]) == stamp:
                return read_npz(path, ["array"])["array"]
        except DataError:
            pass
    array = make()
    try:
        write_npz(path, stamp=np.array(stamp), array=array)
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error.strerror}), so it is made again next time.", stacklevel=2)
    return array


def stamp_of(paths: Iterable[Path], *settings: Any) -> str:
    """Checksum of files' names, sizes and modification times, and of settings."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for path in paths:
        about = path.stat()
        digest.update(
            f"{path.parent.name}/{path.name} {about.st_size} {about.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


def one_name_each(names: Iterable[Any], what: str) -> None:
    """Raise a ``DataError`` if several columns have one name, of which one would be taken for another."""
    if twice := [str(name) for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{what} has several columns named {', '.join(map(repr, sorted(twice)))}; rename them.")


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [D] of the columns of a table [N, D]; 1 for the deviation of a constant column.

    >>> moments(np.array([[1.0, 5.0], [3.0, 5.0]]))
    (array([2., 5.]), array([1., 1.]))
    """
    return x.mean(0), np.where(np.ptp(x, 0) > 0, x.std(0), 1.0)
