"""The Ray engine on a local cluster: the same bits as serial, whatever dies; only where Ray is installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from helpers.federations import Shaken, as_images, classes
from helpers.marks import kinds
from helpers.networks import Flattening, tanh_net
from helpers.ray_cluster import Lent, processes_of
from helpers.runs import GENTLE, assert_same_run, go
from helpers.trouble import MARK, guarded_net, stumble, with_marked_client, worker_death

from fedloom import methods
from fedloom.base.errors import ClientError, ConfigError
from fedloom.experiment.evaluation import Evaluation
from fedloom_apps.ray.cluster import Cluster, Member

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.extra("ray")
VICTIM = 2
MODULE = import_module("fedloom_apps.ray.engine")  # a factory has the same name
MANY = tuple(2 + i % 3 for i in range(60))  # sizes: such a cohort is cut into blocks of three and less


def on_ray(method: str = "fedavg", gather: str = "chain", **changes: Any) -> Any:
    return go(method, engine="ray", engine_settings={"gather": gather}, **changes)


@pytest.mark.usefixtures("lent")
@pytest.mark.parametrize("name", kinds())
def test_every_method_has_the_bits_of_serial(name: str) -> None:
    """With the compute that suits it, chained; drop-outs included."""
    method = methods.make(name, **GENTLE.get(name, {}))
    cohort = None if method.needs("full_participation") else 5
    settings = {"cohort": cohort, "rounds": 2, "drop_rate": 0.15, "seed": 11, "compute": "auto"}
    assert_same_run(go(name, **settings), on_ray(name, **settings))


@pytest.mark.usefixtures("lent")
@pytest.mark.parametrize("gather", ["fold", "chain", "auto"])
@pytest.mark.parametrize("compute", ["live", "batched"])
def test_blocks_of_several_clients(gather: str, compute: str) -> None:
    """With means of client models, float32, and one client that diverges."""
    settings: dict[str, Any] = {"federation": with_marked_client(VICTIM, 1e160, MANY), "rounds": 2, "compute": compute}
    settings |= {"evaluation": Evaluation(what=("average", "received", "clients")), "drop_rate": 0.1}
    reference = go("scaffold", **settings)
    assert_same_run(reference, on_ray("scaffold", gather, **settings))


@pytest.mark.usefixtures("lent")
def test_augmentation_is_the_same() -> None:
    images = {"federation": as_images(classes()), "model": lambda: Flattening(tanh_net()), "augment": (Shaken(),)}
    assert_same_run(go(**images), on_ray(**images))


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first round on a worker does several blocks before it answers."""
    begin = MODULE.Ray.__init__

    def light(self: Any, *args: Any, **settings: Any) -> None:
        begin(self, *args, **settings)
        self.light = True

    monkeypatch.setattr(MODULE.Ray, "__init__", light)


@pytest.mark.usefixtures("lent", "several")
@pytest.mark.parametrize("gather", ["fold", "chain"])
def test_blocks_of_a_dead_worker_are_redone(gather: str, tmp_path: Path) -> None:
    diary = tmp_path / "deaths"
    settings = {
        "federation": with_marked_client(VICTIM, MARK, MANY),
        "model": guarded_net(worker_death(1, diary)),
        "rounds": 2,
    }
    reference = go("scaffold", **settings)
    with pytest.warns(UserWarning, match="a worker of the cluster died; its clients were redone by others") as warnings:
        result = on_ray("scaffold", gather, **settings)
    assert diary.read_text() == "x", "no worker died, so nothing was tested"
    assert len(warnings) == 1
    assert not result.failures
    assert_same_run(reference, result)


@pytest.mark.usefixtures("lent")
def test_sums_that_died_with_their_worker_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed when all blocks are done, and before the chain goes through it."""
    settings = {"federation": classes(MANY), "rounds": 2}
    original, killed = MODULE._Blocks._total, []

    def total(self: Any, homes: dict[int, Any]) -> Any:
        if not killed:
            killed.append(max(homes))
            victim = homes[killed[0]]
            assert isinstance(victim, Member)
            ray.kill(victim.actor)
        return original(self, homes)

    monkeypatch.setattr(MODULE._Blocks, "_total", total)
    reference = go("feddyn", **settings)
    with pytest.warns(UserWarning, match="a worker of the cluster died"):
        assert_same_run(reference, on_ray("feddyn", **settings))
    assert killed


@pytest.mark.usefixtures("lent", "several")
def test_a_client_that_kills_its_workers_is_left_out_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others of its blocks count: the run is the one in which that client raises an error instead."""
    diary, settings = tmp_path / "deaths", {"federation": with_marked_client(VICTIM, MARK, MANY), "rounds": 1}
    reference = go("feddyn", model=guarded_net(stumble), **settings)
    with pytest.warns(UserWarning, match="a worker of the cluster died"):
        result = on_ray("feddyn", model=guarded_net(worker_death(10**6, diary)), **settings)
    assert [str(f) for f in result.failures] == [
        f"round 1, client {VICTIM}: its worker process or its result was lost 4 times"
    ]
    assert_same_run(reference, result)
    assert capfd.readouterr() == ("", ""), "what nodes report is not for the terminal"


@pytest.mark.usefixtures("lent")
def test_faults_in_the_code_end_the_run_with_a_sentence() -> None:
    federation = with_marked_client(0)
    federation.train.arrays.x[:, 0] = MARK
    with pytest.raises(ClientError, match="round 1, client 0: failed in step 1 of 4: RuntimeError: the sample is cur"):
        on_ray(federation=federation, model=guarded_net(stumble))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"workers": 1000},
            "workers is 1000, but the cluster has room for 2, with one CPU each; lower it, or add nodes",
        ),
        ({"gpus": 1}, "workers is 1, but the cluster has room for 0, with one CPU and 1 GPU each"),
        ({"workers": 1}, "workers is 1, but the cluster has room for 0 now, with one CPU each; lower it with"),
        ({"workers": -1}, "workers must be at least 0, not -1"),
        ({"gather": "heap"}, "engine 'ray': gather is 'heap'; there are: auto, chain, fold"),
    ],
)
def test_what_a_cluster_does_not_have_is_refused_at_once(settings: dict[str, Any], sentence: str, lent: Lent) -> None:
    if not lent.members:
        on_ray(rounds=1)
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "Cluster", Cluster)
        with pytest.raises(ConfigError, match=sentence):
            go(engine="ray", engine_settings=settings)
    assert time.monotonic() - start < 60  # Ray would wait for ever


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", r"nothing answers at 127.0.0.1:1 \(Connection refused\); start a cluster there with ray start"),
        ("somewhere", "address is 'somewhere', but it must be host:port, like 10.0.0.1:6379, or auto"),
    ],
)
def test_an_address_without_a_cluster(address: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(ConfigError, match=sentence):
        go(engine="ray", engine_settings={"address": address})


PROGRAM = """
import sys
from pathlib import Path
from fedloom_apps.ray import cluster
original = cluster.tempfile.mkdtemp
def named(**options):
    folder = original(**options)
    Path("folder").write_text(folder)
    return folder
cluster.tempfile.mkdtemp = named
from fedloom.cli import main
sys.exit(main(sys.argv[1:]))
"""


def start_program(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """The program after two rounds; begun again where Ray gave itself up, as it does after 30 s on a busy machine."""
    deadline, metrics = time.monotonic() + 300, folder / "here" / "metrics.jsonl"
    while True:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        while program.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") > 1:
                return program
            assert time.monotonic() < deadline, (program.kill(), program.communicate())
            time.sleep(0.05)
        out, err = program.communicate()
        assert "timed out during startup" in err, (out, err)
        shutil.rmtree(folder / "here", ignore_errors=True)


def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    """It reaches the whole process group, as in a terminal; the run writes its checkpoint and says how to go on."""
    words = ["run", "method=fedavg", "engine=ray", "engine.workers=1", "rounds=100000", "out=here"]
    program = start_program(tmp_path, words)
    try:
        os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=60)
    finally:
        program.kill()
    folder = (tmp_path / "folder").read_text()
    assert not processes_of(folder)
    assert not Path(folder).exists()
    assert program.returncode == 130
    assert "continue with: fedloom run resume=here" in out + err
    assert not any(word in out + err for word in ("raylet", "Traceback", "ray::", "usage"))


TWO_NODES = """
import sys, threading, warnings
sys.path.insert(0, sys.argv[1])
from helpers.federations import classes
from helpers.runs import assert_same_run, experiment, go
from fedloom_apps.ray.cluster import ENVIRONMENT
import os
os.environ.update(ENVIRONMENT)
from ray.cluster_utils import Cluster
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.federated import run

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
node = cluster.add_node(num_cpus=1)

class Killer(Callback):
    def on_round(self, record):
        if record["round"] == 1:
            threading.Timer(0.03, cluster.remove_node, (node,), {"allow_graceful": False}).start()

conditions = {"federation": classes(tuple(2 + i % 3 for i in range(60))), "rounds": 4, "compute": "auto"}
states, out = sys.argv[2:]
settings = {"address": cluster.address, "workers": 2, "gather": "chain"}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    work = experiment("scaffold", engine="ray", engine_settings=settings, client_state=states, **conditions)
    result = run(work, out, callbacks=[Killer()])
assert_same_run(go("scaffold", **conditions), result)
print([str(w.message) for w in caught if "worker" in str(w.message)])
cluster.shutdown()
"""


def program(text: str, *words: str) -> list[str]:
    """The lines that a program prints, which can import the helpers of these tests."""
    tests = str(Path(__file__).parents[1])
    process = subprocess.run(
        [sys.executable, "-c", text, tests, *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.mark.parametrize("states", ["memory", "shared"])
def test_two_nodes_one_of_which_dies(states: str, tmp_path: Path) -> None:
    """A node is killed in the midst of a run that joined two; what it held is made again on the other."""
    lines = program(TWO_NODES, states, str(tmp_path / "run"))
    assert lines[-1] == "['a worker of the cluster died; its clients were redone by others.']"


DECLARED_GPU = """
import os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the tests see no GPU, and Ray would declare none
import sys, time
sys.path.insert(0, sys.argv[1])
from helpers.runs import assert_same_run, experiment, go
from fedloom_apps.ray import cluster as engine
os.environ.update(engine.ENVIRONMENT)
import ray
from ray.cluster_utils import Cluster
from fedloom.base.errors import FedLoomError
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.federated import run

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 1, "include_dashboard": False})
def settings(**changes):
    return {"engine": "ray", "engine_settings": {"address": cluster.address, **changes}}
for changes in ({"gpus": 0.5, "workers": 3}, {"gpus": 2.0}, {"gpus": 1.0}):
    try:
        go(**settings(**changes))
    except FedLoomError as error:
        print(error)
start = engine.Cluster._start
def on_the_cpu(self):
    self.device = "cpu"
    return start(self)
engine.Cluster._start = on_the_cpu
class Looks(Callback):
    def on_round(self, record):
        while ray.available_resources().get("GPU", 0):
            time.sleep(0.1)
        alive = sum(actor["State"] == "ALIVE" for actor in ray._private.state.actors().values())
        print(ray.cluster_resources()["GPU"], "used by", alive)
for _ in range(40):  # actors that could not start take a moment to be gone
    try:
        result = run(experiment(rounds=1, **settings(gpus=0.5)), callbacks=[Looks()])
        break
    except FedLoomError as error:
        if "has room for 0 now" not in str(error):
            raise
        time.sleep(0.5)
assert_same_run(go(rounds=1), result)
cluster.shutdown()
"""


@pytest.mark.skipif(which("nvidia-smi") is not None, reason="PyTorch can use a GPU here")
def test_shares_of_gpus_are_asked_for_and_refused_in_a_sentence() -> None:
    """Ray's resources are numbers, so that a cluster may declare a GPU that is not there."""
    crowded, none, no_cuda, use = program(DECLARED_GPU)
    assert re.search("workers is 3, but the cluster at .* has room for 2, with one CPU and 0.5 GPU each", crowded)
    assert re.search("workers is 1, but the cluster at .* has room for 0, with one CPU and 2 GPU each", none)
    assert re.search(r"cannot start \(ConfigError: PyTorch on .* can use no GPU; install its CUDA build", no_cuda)
    assert use == "1.0 used by 2"
