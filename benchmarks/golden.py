"""Compare two checkouts: every registered method on both, bit for bit.

    python benchmarks/golden.py OLD NEW [--quick] [--methods feddyn,apfl] [--kinds live,batched] [--save OLD.json]

OLD and NEW are folders of checkouts, or files that ``--save`` has written of OLD before. Each checkout runs in one
process with ``src`` of its folder on the path: three rounds of six clients with 24 images of digits each, in the kinds

* ``live`` and ``batched``: the serial engine with either compute;
* ``processes``: two workers;
* ``resumed``: the third round once more, from the checkpoint of the second.

Compared are all of ``metrics.jsonl`` but wall-clock times, ``clients.parquet``, ``mixing.parquet`` and
``partition.parquet`` with their types, the parameters of the final model and the outputs of every client's model.
Settings that only one checkout has are left out of both, and methods that only one has are named. The exit status is 1
if something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, OrderedDict
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

KINDS: dict[str, dict[str, Any]] = {
    "live": {"engine": "serial", "compute": "live"},
    "batched": {"engine": "serial", "compute": "batched"},
    "processes": {"engine": "processes", "compute": "auto", "engine_settings": {"workers": 2}},
    "resumed": {"engine": "serial", "compute": "auto"},
}
QUICK = (
    "fedavg", "centralised", "scaffold", "feddyn", "fednova", "q_ffl", "fedpaq", "krum", "fedhen", "heterofl", "ifca",
    "fedntd", "pfldyn", "knn_per", "fedrep", "fedbn", "fedbabu", "apfl", "ditto", "superfed_mm", "fedadam", "fedssa",
)  # fmt: skip
ALWAYS: dict[str, Any] = {"rounds": 3, "cohort": 4, "drop_rate": 0.1, "seed": 5, "device": "cpu"}
LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 10, "lr": 0.1, "lr_decay": 0.9}
WHAT = ("global", "clients", "average")
CLIENTS, SAMPLES = 6, 24

# What single methods need: settings of the method, conditions of the run, the model.
TEACHER = {"teacher": lambda: Net(20, seed=1)}
SETTINGS: dict[str, dict[str, Any]] = {"pfedme": {"lam": 3.0}, "fedssa": {"steps": 10, "feed_back": True},
                                       "feddf": {"steps": 10}}  # fmt: skip
CONDITIONS: dict[str, dict[str, Any]] = {
    **{name: {"cohort": None} for name in ("afl", "aaggff_s", "fltrust", "centralised")},
    **dict.fromkeys(("distill", "disk"), TEACHER),
    "robust": {"augment": ("crop",)},
    "distill_robust": {**TEACHER, "augment": ("crop",)},
    "ifca": {"what": ("global", "clients")},
    **{name: {"what": ()} for name in ("fedevg", "fedcgan", "fedcvae")},
}
MODELS: dict[str, Any] = {
    **dict.fromkeys(("fedhen", "noside", "decouple"), lambda: Ends()),
    "fedbn": lambda: Net(norm=True),
    "fedcgan": "conditional_gan",
    "fedcvae": "conditional_vae",
}


class Net(nn.Module):
    """A body of one layer, and a head."""

    def __init__(self, width: int = 12, seed: int = 0, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            last = [nn.BatchNorm1d(width)] if norm else []
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), *last)
            self.head = nn.Linear(width, 10)

    def features(self, x: Tensor) -> Tensor:
        """Images [B, 1, 8, 8] to [B, width]."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 10]."""
        return self.head(self.body(x))


class Ends(Net):
    """A net with an early exit."""

    def __init__(self) -> None:
        super().__init__(8)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            near = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh())
            far = nn.Sequential(nn.Linear(12, 8), nn.Tanh())
            self.body = nn.Sequential(OrderedDict(near=near, far=far))
            self.exit = nn.Sequential(OrderedDict(pool=nn.Identity(), head=nn.Linear(12, 10)))

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at the exit and at the end."""
        near = self.body.get_submodule("near")(x)
        return self.exit(near), self.head(self.body.get_submodule("far")(near))


def digest(tensor: Tensor) -> str:
    """Type, shape and bits of a tensor, in few letters."""
    plain = tensor.detach().cpu().contiguous()
    return f"{plain.dtype} {[*plain.shape]} {hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:12]}"


class Checkout:
    """The checkout on the path, which runs methods."""

    def __init__(self, common: dict[str, list[str]]) -> None:
        from sklearn.datasets import load_digits

        import fedloom as fl

        self.fl, self.common = fl, common
        digits: Any = load_digits()
        x = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
        y = torch.tensor(digits.target)
        rows = torch.argsort(y[:1200] + 3 * torch.rand(1200, generator=torch.Generator().manual_seed(0)))
        rows = rows[torch.linspace(0, 1199, CLIENTS * SAMPLES).long()]  # a few classes each
        data = {
            "client": torch.arange(len(rows)).div(SAMPLES, rounding_mode="floor").numpy(),
            "test": (x[1200:1320], y[1200:1320]),
            "validation": 0.2,
        }
        plain = (x[rows], y[rows])
        self.federation = fl.data.federate(plain, **self.of("federate", data))
        # a target of unlabelled inputs changes the common test set, so that it is for those methods alone
        self.target = fl.data.federate(plain, **self.of("federate", {**data, "target": "uniform"}))
        self.x = x[1320:1330]

    def of(self, record: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Those settings of a record that both checkouts have."""
        return {name: value for name, value in settings.items() if name in self.common.get(record, [])}

    def run(self, name: str, kind: str, out: Path) -> dict[str, Any]:
        """What a method leaves in a run directory, as plain data."""
        fl = self.fl
        conditions = {**ALWAYS, **KINDS[kind], **CONDITIONS.get(name, {})}
        what = conditions.pop("what", WHAT)
        if "teacher" in conditions:
            conditions["teacher"] = conditions["teacher"]()
        conditions["local"] = fl.Local(**self.of("local", LOCAL))
        conditions["evaluation"] = fl.Evaluation(what=what, metrics=("accuracy", "ece"))
        method = getattr(fl.methods, name)(**self.of(name, SETTINGS.get(name, {})))
        federation = self.target if name.startswith("fedssa") or name == "feddf" else self.federation
        model = MODELS.get(name, Net)

        def go(**changes: Any) -> Any:
            return fl.run(method, federation, model, out=out, **self.of("experiment", conditions) | changes)

        if kind == "resumed":
            go(checkpoint_every=1, keep=3)
            result = go(resume=sorted((out / "checkpoint").iterdir())[1])
        else:
            result = go()
        outcome: dict[str, Any] = {}
        for line in (out / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            for key in record:
                if "seconds" not in key:
                    outcome[f"round {record['round']}: {key}"] = json.dumps(record[key])
        import pyarrow.parquet as pq

        for table in ("clients", "mixing", "partition"):
            if (out / f"{table}.parquet").exists():
                columns = pq.read_table(out / f"{table}.parquet")
                for column in columns.column_names:
                    values = json.dumps(columns[column].to_pylist(), default=str)
                    outcome[f"{table}.parquet: {column}"] = f"{columns[column].type} {values}"
        for key, value in result.model.state_dict().items():
            outcome[f"model: {key}"] = digest(value)
        if what:
            for client in range(1 if name == "centralised" else CLIENTS):
                with torch.no_grad():
                    outputs = result.trained.client(client).outputs(self.x)
                outcome[f"outputs of client {client}"] = digest(outputs)
        return outcome


def settings() -> dict[str, list[str]]:
    """The names of methods and settings of the checkout on the path."""
    import fedloom as fl

    names = list(fl.methods.methods.names())
    return {
        "methods": names,
        "experiment": [f.name for f in fields(fl.Experiment)],
        "local": [f.name for f in fields(fl.Local)],
        "federate": [*inspect.signature(fl.data.federate).parameters],
        **{n: [*inspect.signature(getattr(fl.methods, n)).parameters] for n in SETTINGS if n in names},
    }


def serve() -> None:
    """Print the names of this checkout, read what to run, and print each outcome as a line of JSON."""
    stdout, sys.stdout = sys.stdout, sys.stderr
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(settings()), file=stdout, flush=True)
    request = json.loads(sys.stdin.readline())
    checkout = Checkout(request["known"])
    for name, kind in request["runs"]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = checkout.run(name, kind, Path(folder) / "run")
            except Exception as error:
                outcome = {"error": f"{type(error).__name__}: {error}".replace(folder, "").partition("\n")[0]}
        print(json.dumps([name, kind, outcome]), file=stdout, flush=True)


def start_server(folder: Path) -> subprocess.Popen[str]:
    """A process that serves the checkout in ``folder``."""
    where = folder if (folder / "fedloom").is_dir() else folder / "src"
    if not (where / "fedloom" / "__init__.py").exists():
        sys.exit(f"there is no src/fedloom in {folder}")
    environment = {**os.environ, "PYTHONPATH": str(where.resolve()), "OMP_NUM_THREADS": "1", "FEDLOOM_SERVE": "1"}
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def line(stream: IO[str] | None) -> Any:
    """The next line of JSON that a checkout prints."""
    text = stream.readline() if stream else ""
    if not text:
        sys.exit("a checkout ended early; its error is above")
    return json.loads(text)


def report(outcomes: list[dict[str, dict[str, Any]]], kinds: list[str], most: int = 6) -> int:
    """Print what is equal and what is not, by method; the number of methods that differ."""
    old, new = outcomes
    total: Counter[str] = Counter()
    for name in dict.fromkeys([*old, *new]):
        lines, values, refused = [], 0, []
        for kind in kinds:
            if (left := old.get(name, {}).get(kind)) is None or (right := new.get(name, {}).get(kind)) is None:
                continue
            keys = [key for key in dict.fromkeys(["error", *left, *right]) if left.get(key) != right.get(key)]
            if "error" in keys:
                lines.append(f"    {kind}: {left.get('error', 'runs')} -> {right.get('error', 'runs')}")
                continue
            values += len(left) - len(keys)
            refused += [f"{kind}: {left['error']}"] if "error" in left and not keys else []
            for key in keys[:most]:
                lines.append(f"    {kind}: {key}: {left.get(key, 'absent')!s:.60} -> {right.get(key, 'absent')!s:.60}")
            if len(keys) > most:
                lines.append(f"    {kind}: and {len(keys) - most} more")
        word = "differs" if lines else "refused by both" if refused else "equal"
        total[word] += 1
        print(f"{name:18} {word}" + f" ({values} values)" * (word == "equal"))
        for text in lines or refused:
            print(text if lines else f"    {text}")
    print(", ".join(f"{count} {word}" for word, count in total.items()))
    return total["differs"]


def main() -> bool:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT", help="OLD and NEW, or OLD with --save")
    parser.add_argument("--methods", help="names, with commas between; by default all")
    parser.add_argument("--kinds", default=",".join(KINDS), help="by default %(default)s")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} methods, live and batched")
    parser.add_argument("--save", type=Path, help="write the outcomes of OLD to this file")
    args = parser.parse_args()
    kinds = ["live", "batched"] if args.quick else args.kinds.split(",")
    outcomes: list[dict[str, dict[str, Any]]] = []
    servers: dict[int, subprocess.Popen[str]] = {}
    names_by_record: dict[int, dict[str, list[str]]] = {}
    for number, path in enumerate(args.checkouts[:2]):
        if path.suffix == ".json":
            stored = json.loads(path.read_text())
            outcomes.append(stored["outcomes"])
            names_by_record[number] = stored["known"]
        else:
            outcomes.append({})
            servers[number] = start_server(path)
    for number, server in servers.items():
        names_by_record[number] = line(server.stdout)
    tables = [names_by_record[number] for number in sorted(names_by_record)]
    both = {
        record: [name for name in names if all(name in table.get(record, ()) for table in tables)]
        for record, names in tables[0].items()
    }
    methods = args.methods.split(",") if args.methods else list(QUICK if args.quick else both["methods"])
    for record, shared in both.items():
        if lost := sorted({name for table in tables for name in table.get(record, ())} - {*shared}):
            print(f"{record}: {', '.join(lost)} only in one checkout")
    runs = [(name, kind) for name in methods if name in both["methods"] for kind in kinds]
    for server in servers.values():
        assert server.stdin
        print(json.dumps({"known": both, "runs": runs}), file=server.stdin, flush=True)
    for count in range(len(runs)):
        for number, server in servers.items():
            name, kind, outcome = line(server.stdout)
            outcomes[number].setdefault(name, {})[kind] = outcome
        with contextlib.suppress(OSError):
            if sys.stderr.isatty():
                print(f"\r{count + 1}/{len(runs)}", end="\r", file=sys.stderr)
    for server in servers.values():
        server.communicate()
    if args.save:
        args.save.write_text(json.dumps({"known": names_by_record[0], "outcomes": outcomes[0]}))
    if len(outcomes) == 1:
        outcomes *= 2
    pair = [{name: side[name] for name in methods if name in side} for side in outcomes]
    return bool(report(pair, kinds))


if __name__ == "__main__":
    if os.environ.pop("FEDLOOM_SERVE", ""):
        serve()
    else:
        sys.exit(main())
