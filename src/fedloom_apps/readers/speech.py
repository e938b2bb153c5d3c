"""SpeechCommands by speaker: one second of raw sound."""

from __future__ import annotations

import os
import wave
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.files import check_memory
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.sources.files import Files, cached, reads, stamp_of, with_progress
from fedloom_apps.readers.formats import read_words

FOLDER = "speech_commands_v0.02"
LISTS = ("validation_list.txt", "testing_list.txt")
FILES = Files(
    "SpeechCommands",
    tuple(tuple(f"{home}{FOLDER}/{part}" for part in ("", *LISTS)) for home in ("", "SpeechCommands/")),
    "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
    {f"{FOLDER}.tar.gz": "sha256 af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58"},
)
RATES = (8000, 16_000)
MARK = "_nohash_"


@sources.register
@reads(FILES)
def speech_commands(
    rate: int = 16_000, words: tuple[str, ...] = (), validation: bool | Literal["apart"] = False,
    root: str | Path | None = None,
) -> Source:  # fmt: skip
    """SpeechCommands v0.02: one of 35 spoken words, by speaker, as raw sound.

    Reads ``speech_commands_v0.02/<word>/<speaker>_nohash_<n>.wav`` (16 bit, one channel, 16 kHz) with
    ``validation_list.txt`` and ``testing_list.txt``; also under ``SpeechCommands/``, torchaudio's layout. Inputs are
    float32 [N, 1, rate] in -1..1: one second, padded with silence. The natural clients of the training pool (84 843
    recordings) are its speakers; those of the test set are other people. Background noise is not used. Decoded sound is
    cached beside the words in ``fedloom-<rate>.npz``. At 16 kHz the full set takes 7 GB of memory. AAggFF leaves out
    speakers with fewer than 3 recordings: ``partition.min_size=3``.

    Args:
        rate: sampling rate in Hz: 16000, or 8000 (downsampled after a low-pass filter).
        words: the words to keep; by default all.
    """
    if rate not in RATES:
        raise ConfigError(f"SpeechCommands comes at {' or '.join(map(str, RATES))} samples per second, not {rate}.")
    folder, *lists = FILES.obtain(root)
    there = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] not in "._")
    if missing := [word for word in words if word not in there]:
        raise ConfigError(f"SpeechCommands has no word {missing[0]!r}; there are: {', '.join(there) or 'none'}.")
    selection = [word for word in there if word in words or not words]
    names = [
        f"{word}/{name}" for word in selection for name in sorted(os.listdir(folder / word)) if name.endswith(".wav")
    ]
    if strange := next((name for name in names if MARK not in name), None):
        raise DataError(f"{folder / strange} does not name its speaker: its name has no {MARK!r}.")
    valid, test = (np.isin(names, [*chain(*read_words(path))]) for path in lists)
    train = ~test if validation is True else ~(test | valid)
    paths = [folder / name for name in names]
    check_memory("SpeechCommands", 6 * rate * len(paths))

    def make() -> np.ndarray:
        sound = np.empty((len(paths), rate), np.int16)
        for row, path in enumerate(with_progress(paths, "SpeechCommands")):
            sound[row] = read_wave(path, rate)
        return sound

    sound = cached(folder / f"fedloom-{rate}.npz", stamp_of(paths, rate), make)
    y = np.searchsorted(selection, [name.partition("/")[0] for name in names])
    speaker = np.array([name.partition("/")[2].partition(MARK)[0] for name in names])

    def arrays(part: np.ndarray) -> Arrays:
        x = torch.empty(int(part.sum()), 1, rate)
        np.divide(sound[part][:, None], np.float32(32_768), out=x.numpy())
        return Arrays(x, torch.from_numpy(y[part]), len(selection), tuple(selection))

    return Source(
        name="speech_commands",
        train=arrays(train),
        test=arrays(test),
        licence="CC BY 4.0",
        citation=bibtex("warden2018speech"),
        **natural_clients(speaker[train], speaker[test], "speaker "),
        settings={"rate": rate, "words": list(words), "validation": validation},
        validation=arrays(valid) if validation == "apart" else None,
    )


def read_wave(path: Path, rate: int) -> np.ndarray:
    """One second of a 16 kHz recording, int16 [rate]."""
    try:
        with wave.open(str(path), "rb") as file:
            kind = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.getnframes()
            blob = file.readframes(min(frames, RATES[-1]))
    except (wave.Error, EOFError, OSError) as error:
        raise DataError(f"{path} is truncated or not a WAV file ({error or 'it ends too early'}).") from error
    if kind != (1, 2, RATES[-1]):
        raise DataError(f"{path} has {kind[0]} channels of {8 * kind[1]} bits at {kind[2]} Hz, not 1 of 16 at 16000.")
    if len(blob) < 2 * min(frames, RATES[-1]):
        raise DataError(f"{path} is truncated: it promises {frames} samples.")
    sound = np.zeros(RATES[-1], np.int16)
    sound[: len(blob) // 2] = np.frombuffer(blob, "<i2")
    if rate == RATES[-1]:
        return sound
    from scipy.signal import resample_poly

    return np.rint(resample_poly(sound.astype(np.float64), 1, 2)).clip(-32_768, 32_767).astype(np.int16)
