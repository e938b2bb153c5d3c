"""Twelve pages of one screen each: a picture, the code that draws it, and what it shows.

``python docs/gallery/make.py [NAME …]`` runs the code, in seconds a page, and writes the pages and their pictures. The
pictures are figures of the runs' report; numbers in the text are read from the runs.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from fedloom.cli import main
from fedloom.core.slots import SLOTS
from fedloom.experiment.console import number
from fedloom.experiment.rundir import RunDirectory
from fedloom_apps.report import build
from fedloom_apps.report.notebook import slots_picture

HERE = Path(__file__).parent
NUMBER = re.compile(r"\{([\w.,+=-]+):([\w./]+)\}")
"""A number in a text: the folder of a run, and the key of its final record."""


@dataclass(frozen=True)
class Page:
    """A page.

    Args:
        name: of its files.
        title: the heading.
        code: Python, or commands of fedloom, that leave run directories in ``runs``; at most ten lines.
        text: what it shows, with ``{folder of a run:key of its final record}`` for numbers.
        picture: the file of a figure, below the report's ``figures`` or a run's.
        more: pages to read on, by their words.
    """

    name: str
    title: str
    code: str
    text: str
    picture: str
    more: Mapping[str, str]

    @property
    def is_command(self) -> bool:
        """Whether the code is commands."""
        return self.code.startswith("\nfedloom ")

    @property
    def image(self) -> str:
        """The file of its picture."""
        return self.name + Path(self.picture).suffix

    def run(self) -> None:
        """Run the code in the working directory.

        Raises:
            RuntimeError: if a command fails.
        """
        if not self.is_command:
            exec(compile(self.code, f"{self.name}.py", "exec"), {})
            return
        for line in self.code.strip().replace("\\\n", " ").splitlines():
            if main([*shlex.split(line.partition("  #")[0])[1:], "-q"]):
                raise RuntimeError(f"{self.name}: {line} failed")

    def markdown(self, numbers: str | None = None) -> str:
        """The page, with its numbers from the runs in the working directory, or all with the text ``numbers``."""

        def value(match: re.Match[str]) -> str:
            if numbers is not None:
                return numbers
            run = next(path for path in Path("runs").rglob(match[1]) if path.is_dir())
            return number(match[2], RunDirectory(run).summary()["final"][match[2]])

        language = "" if self.is_command else "python"
        links = ", ".join(f"[{words}](../{page})" for words, page in self.more.items())
        return (
            f"# {self.title}\n\n![{self.title}]({self.image})\n\n```{language}\n{self.code.strip()}\n```\n\n"
            f"{NUMBER.sub(value, ' '.join(self.text.split()))}\n\nNumbers are from one seed. "
            f"More: {links}.\n"
        )


PAGES = (
    Page(
        "drift",
        "Client drift",
        """
import fedloom as fl

skewed = fl.data.partitions.make("dirichlet", alpha=0.1)
clients = fl.data.federate("digits", skewed, clients=20, seed=0)
local = fl.Local(epochs=5, lr=0.1)
for method in ("fedavg", "scaffold", "feddyn"):
    fl.run(method, clients, "mlp", rounds=40, participation=0.2, local=local, out=f"runs/{method}")
""",
        """
        Each client has images of few digits, and five epochs of local training take its model far from the others'.
        FedAvg ends at {fedavg:global/accuracy}, SCAFFOLD at {scaffold:global/accuracy} and FedDyn at
        {feddyn:global/accuracy}.
        """,
        "global_accuracy.svg",
        {"one global model": "drift.md", "choose a method": "howto/choose.md"},
    ),
    Page(
        "personal_heads",
        "Personal heads",
        """
import fedloom as fl

two = fl.data.partitions.make("pathological", classes=2)
clients = fl.data.federate("digits", two, clients=20, seed=0)
own = fl.Evaluation(what=["clients"], every=5)
for method in ("fedavg", "local", "fedper"):
    fl.run(method, clients, "mlp", rounds=20, evaluation=own, out=f"runs/{method}")
""",
        """
        Every client has images of two digits, and is tested on these. Clients are sorted from the worst to the
        best: with one model for all they reach {fedavg:clients/accuracy/mean} on average, with a shared body and a
        head of their own {fedper:clients/accuracy/mean}. But two digits are easy to tell apart: clients that train
        alone, on some 60 images, reach {local:clients/accuracy/mean}, so always compare with that.
        """,
        "clients_distribution.svg",
        {"personal models": "personal.md"},
    ),
    Page(
        "lambda_path",
        "Between the server's model and one's own",
        """
import fedloom as fl

two = fl.data.partitions.make("pathological", classes=2)
clients = fl.data.federate("digits", two, clients=20, seed=0)
own = fl.Evaluation(what=["clients"], every=10)
for method in ("superfed_mm", "superfed_lm"):
    fl.run(method, clients, "mlp", rounds=20, evaluation=own, out=f"runs/{method}")
""",
        """
        A client has the server's model w and a model v of its own, and may use any mixture (1 − λ)w + λv. SuPerFed
        trains both so that all models between them are good, with one λ for the whole network (mm) or one per layer
        (lm): at λ = .5 clients reach {superfed_mm:lambda/0.5/accuracy/mean} and {superfed_lm:lambda/0.5/accuracy/mean},
        with v alone {superfed_mm:lambda/1/accuracy/mean} and {superfed_lm:lambda/1/accuracy/mean}.
        """,
        "lambda.svg",
        {"personal models": "personal.md"},
    ),
    Page(
        "fairness",
        "Fairness",
        """
import fedloom as fl

skewed = fl.data.partitions.make("dirichlet", alpha=0.1)
clients = fl.data.federate("digits", skewed, clients=20, seed=0)
own = fl.Evaluation(what=["clients"], every=5)
for method in ("fedavg", "afl", "aaggff_s"):
    fl.run(method, clients, "logistic", rounds=30, evaluation=own, out=f"runs/{method}")
""",
        """
        How well does one model serve each client? AFL and AAggFF give more weight to clients with high losses: the
        worst tenth has {fedavg:clients/accuracy/worst10} with FedAvg, {afl:clients/accuracy/worst10} with AFL and
        {aaggff_s:clients/accuracy/worst10} with AAggFF-S; the means are {fedavg:clients/accuracy/mean},
        {afl:clients/accuracy/mean} and {aaggff_s:clients/accuracy/mean}.
        """,
        "clients_distribution.svg",
        {"mixing and fairness": "mixing.md"},
    ),
    Page(
        "hostile_clients",
        "Hostile clients",
        """
import fedloom as fl

clients = fl.data.federate("digits", "iid", clients=20, seed=0)
attack = fl.attacks.SignFlip(fraction=0.2, scale=4)
for method in ("fedavg", "coordinate_median", "multi_krum", "rfa"):
    fl.run(method, clients, "mlp", rounds=25, attack=attack, out=f"runs/{method}")
""",
        """
        A fifth of the clients sends minus four times its update. The mean (FedAvg) ends at {fedavg:global/accuracy},
        the median at {coordinate_median:global/accuracy}, multi-Krum at {multi_krum:global/accuracy} and the geometric
        median (RFA) at {rfa:global/accuracy}.
        """,
        "global_accuracy.svg",
        {"trust": "trust.md"},
    ),
    Page(
        "privacy",
        "Privacy against accuracy",
        """
fedloom run -m method=dp_fedavg method.noise=5,10,20 method.clip=1 method.delta=1e-3 \\
    partition=iid clients=100 participation=1 model=logistic local.epochs=5 rounds=30 out=runs
""",
        """
        Clients' updates are clipped, and noise is added to their sum. With noise multiplier 5, accuracy after 30 rounds
        is {dp_fedavg-noise=5-0:global/accuracy} at ε = {dp_fedavg-noise=5-0:privacy/epsilon}; with 10,
        {dp_fedavg-noise=10-0:global/accuracy} at {dp_fedavg-noise=10-0:privacy/epsilon}; with 20,
        {dp_fedavg-noise=20-0:global/accuracy} at {dp_fedavg-noise=20-0:privacy/epsilon}. The extra privacy counts ε.
        """,
        "global_accuracy_ε.svg",
        {"trust": "trust.md"},
    ),
    Page(
        "synthetic_digits",
        "Synthetic digits",
        """
fedloom synthesize method=fedcvae method.beta=64 method.likelihood=gaussian method.variance=0.5 clients=5 \\
    rounds=30 local.steps=8 judge.every=0 judge.max_steps=300 out=runs/fedcvae
""",
        """
        Clients train the two halves of a conditional autoencoder by federated averaging, and the server draws digits of
        each class from the decoder, one row per class. A classifier trained on such images alone recognises
        {fedcvae:synthetic/accuracy} of the real test images.
        """,
        "fedcvae/figures/synthetic.png",
        {"synthetic data": "synthesis.md"},
    ),
    Page(
        "stream",
        "A stream of tasks",
        """
fedloom online -m learner=moml,ftml,mogd tasks=60 out=runs
""",
        """
        Small tasks arrive one by one: digits, transformed differently in each. Every task is predicted before it is
        learnt, from a few labelled samples. FTML stores all tasks; MOML and MOGD store none.
        """,
        "ctm_accuracy.svg",
        {"streams of tasks": "online.md"},
    ),
    Page(
        "distillation",
        "A small model with a large teacher",
        """
fedloom distill -m method=ce,kd,disk epochs=40 out=runs
""",
        """
        A small student learns from labels alone (ce), or also from a larger model (kd); in DiSK a learnt guide excuses
        it from following the larger model on some samples.
        """,
        "global_accuracy.svg",
        {"distillation": "distill.md"},
    ),
    Page(
        "target",
        "A model for somebody else's data",
        """
fedloom run -m method=fedavg,feddf,fedssa partition=niid1 clients=5 participation=1 target=skew \\
    local.epochs=5 model=mlp views=[blur] rounds=15 out=runs
""",
        """
        A buyer has unlabelled images of some digits only. FedDF distils the clients' models on them; FedSSA weights the
        models by how consistent and confident they are on them, once, in the last round.
        """,
        "global_accuracy.svg",
        {"models for a target": "target.md"},
    ),
    Page(
        "time",
        "Time",
        """
import fedloom as fl

clients = fl.data.federate("digits", "iid", clients=50, seed=0)
phones = fl.timing.devices.make("lognormal", sigma=1)
for name, settings in {"rounds": {}, "buffered": {"k": 5}}.items():
    schedule = fl.timing.schedules.make(name, **settings)
    conditions = {"devices": phones, "schedule": schedule, "participation": 0.4}
    fl.run("fedavg", clients, "mlp", rounds=60, out=f"runs/{name}", **conditions)
""",
        """
        Devices differ in speed by a factor of a hundred. A server that waits for its whole cohort takes 60 steps in
        {rounds:clock} virtual seconds and reaches {rounds:global/accuracy}. One that takes a step whenever five updates
        have arrived, some of them stale, needs {buffered:clock} seconds and reaches {buffered:global/accuracy}: it is
        ahead at first, but unsteady.
        """,
        "global_accuracy_time.svg",
        {"time": "time.md"},
    ),
    Page(
        "graph",
        "A graph of clients",
        """
fedloom run -m method=fedavg method.topology=own_model,ring,exponential,complete partition=iid clients=50 \\
    participation=1 model=mlp rounds=30 evaluation.what=[clients] evaluation.every=2 out=runs
""",
        """
        Without a server, each of 50 clients has a model and averages it with those of its neighbours. Alone (own_model)
        clients reach {fedavg+own_model-0:clients/accuracy/mean}, on a ring {fedavg+ring-0:clients/accuracy/mean}, with
        edges to those at distance 1, 2, 4, … {fedavg+exponential-0:clients/accuracy/mean}, and on the complete graph
        {fedavg+complete-0:clients/accuracy/mean}.
        """,
        "clients_accuracy.svg",
        {"topologies": "topology.md"},
    ),
)


def page_files(page: Page) -> Iterator[tuple[str, bytes]]:
    """The files of a page, made by running its code."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        page.run()
        build(["runs"], "report", files=[Path(page.picture).suffix[1:]])
        places = [Path("report") / "figures" / page.picture, Path("runs") / page.picture]
        yield page.image, next(place for place in places if place.is_file()).read_bytes()
        yield f"{page.name}.md", page.markdown().encode()


ANSWERS = {
    "objective": "what it minimises",
    "drift": "how drift is corrected",
    "personal": "what stays private",
    "adaptation": "how it fits a client",
    "uplink": "what leaves a client",
    "mixing": "how clients count",
    "weighting": "what stale work counts",
    "server": "what step it takes",
    "topology": "who talks to whom",
}
"""The question that each slot of a method answers."""


def algebra() -> str:
    """The picture of the slots, which leads README."""
    return slots_picture({slot: ANSWERS[slot] for slot in SLOTS})


def index() -> str:
    """The page of all pages."""
    cells = [f"[![{page.title}]({page.image})]({page.name}.md)<br>[{page.title}]({page.name}.md)" for page in PAGES]
    rows = [" | ".join(cells[at : at + 3]) for at in range(0, len(cells), 3)]
    head = "# Gallery\n\nEach picture links to a page with the code that draws it, and what it shows. "
    head += "All run in seconds, and numbers are from one seed.\n\n"
    return head + "| | | |\n|---|---|---|\n" + "".join(f"| {row} |\n" for row in rows)


if __name__ == "__main__":
    names = sys.argv[1:] or [page.name for page in PAGES]
    for page in PAGES:
        if page.name in names:
            for name, content in page_files(page):
                (HERE / name).write_bytes(content)
    (HERE / "index.md").write_text(index())
    (HERE.parent / "images" / "algebra.svg").write_text(algebra())
