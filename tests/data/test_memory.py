"""Data sets of MNIST's size are read with little more memory than they occupy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys_only = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
PEAK = """
import ctypes, gc, json, re, sys, threading
import numpy, torch, PIL.Image, scipy.signal
from fedloom.data import federate, sources
from fedloom.data.partitions import DirichletBalanced

def rss(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def measure(name, settings, clients):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the set before has freed would be taken again unseen
    open("/proc/self/clear_refs", "w").write("5")  # the peak so far was imports, or another set
    before = rss("VmRSS")
    source = sources.make(name, **settings)
    federation = federate(source, DirichletBalanced(0.3), clients)
    size = sum(a.x.nbytes + a.y.nbytes for a in (source.train, source.test))
    shared = federation.train.arrays.x.data_ptr() == source.train.x.data_ptr()
    print(json.dumps([name, (rss("VmHWM") - before) / size, shared]), flush=True)

for entry in sources:
    entry.factory  # what it imports is no memory of its arrays
for about in json.loads(sys.argv[1]):
    measure(*about)
"""
SETS: dict[str, int] = {"mnist": 10_000, "fashion_mnist": 100, "emnist_l": 100, "cifar10": 100, "shakespeare": 100}
"""Clients of each set."""


def peaks(*about: tuple[str, dict, int]) -> dict[str, float]:
    """Peak memory of reading and partitioning sources (name, settings, clients), as multiples of their arrays."""
    command = [sys.executable, "-c", PEAK, json.dumps(about)]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if "clear_refs" in process.stderr:
        pytest.skip("the peak of memory cannot be reset here")
    assert process.returncode == 0, process.stderr
    measurements = {name: (ratio, shared) for name, ratio, shared in map(json.loads, process.stdout.splitlines())}
    assert all(shared for _, shared in measurements.values())
    return {name: ratio for name, (ratio, _) in measurements.items()}


@sys_only
@pytest.mark.exhaustive
def test_reading_an_npz_of_images_takes_little_more_than_its_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = {f"x_{part}": rng.integers(0, 256, (n, 28, 28), np.uint8) for part, n in (("train", 48_000), ("test", 8000))}
    np.savez(tmp_path / "emnist_l.npz", y_train=np.arange(48_000) % 10, y_test=np.arange(8000) % 10, **x)
    assert peaks(("emnist_l", {"root": str(tmp_path)}, 100))["emnist_l"] < 1.32


@sys_only
@pytest.mark.skipif("FEDLOOM_DATA" not in os.environ, reason="FEDLOOM_DATA is not set")
@pytest.mark.exhaustive
def test_real_sets_are_read_in_1_3_times_their_memory() -> None:
    from fedloom.data import sources
    from fedloom.data.sources.files import files_of

    read = {name: files_of(sources[name]) for name in SETS}
    here = [(name, {}, clients) for name, clients in SETS.items() if (files := read[name]) and files.look()]
    if not here:
        pytest.skip("none of the sets is here")
    ratios = peaks(*here)
    assert list(ratios) == [name for name, _, _ in here]
    assert max(ratios.values()) < 1.3, ratios
