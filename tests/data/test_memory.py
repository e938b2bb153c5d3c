"""Data sets of MNIST's size are read with little more memory than they occupy."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys_only = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
PEAK = """
import re, sys, threading
import numpy, torch, PIL.Image, scipy.signal
from fedloom.data import federate, sources
from fedloom.data.partitions import DirichletBalanced

def rss(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

open("/proc/self/clear_refs", "w").write("5")  # the peak so far was imports
before = rss("VmRSS")
source = sources.make(sys.argv[1], **eval(sys.argv[2]))
federation = federate(source, DirichletBalanced(0.3), int(sys.argv[3]))
held = sum(a.x.nbytes + a.y.nbytes for a in (source.train, source.test))
print((rss("VmHWM") - before) / held, federation.train.arrays.x.data_ptr() == source.train.x.data_ptr())
"""


def peak(name: str, settings: dict, clients: int = 100) -> float:
    """Peak memory of reading and partitioning a source, as a multiple of its arrays."""
    command = [sys.executable, "-c", PEAK, name, repr(settings), str(clients)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if "clear_refs" in done.stderr:
        pytest.skip("the peak of memory cannot be reset here")
    assert done.returncode == 0, done.stderr
    ratio, shared = done.stdout.split()
    assert shared == "True"
    return float(ratio)


@sys_only
@pytest.mark.slow
def test_reading_an_npz_of_images_takes_little_more_than_its_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = {f"x_{part}": rng.integers(0, 256, (n, 28, 28), np.uint8) for part, n in (("train", 48_000), ("test", 8000))}
    np.savez(tmp_path / "emnist_l.npz", y_train=np.arange(48_000) % 10, y_test=np.arange(8000) % 10, **x)
    assert peak("emnist_l", {"root": str(tmp_path)}) < 1.3


@sys_only
@pytest.mark.skipif("FEDLOOM_DATA" not in os.environ, reason="FEDLOOM_DATA is not set")
@pytest.mark.parametrize(
    ("name", "settings", "clients"),
    [
        ("mnist", {}, 10_000),
        ("fashion_mnist", {}, 100),
        ("emnist_l", {}, 100),
        ("cifar10", {}, 100),
        ("shakespeare", {}, 100),
    ],
)
@pytest.mark.slow
def test_real_sets_are_read_in_1_3_times_their_memory(name: str, settings: dict, clients: int) -> None:
    from fedloom.data.sources.files import PLACES

    if not PLACES[name].look():
        pytest.skip(PLACES[name].missing())
    assert peak(name, settings, clients) < 1.3
