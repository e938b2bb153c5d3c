"""Whether other frameworks compute the same as FedLoom: the same clients, mini-batches and first model, in float64.

    python benchmarks/peers/agreement [--envs DIR] [--peers fluke flgo fedlab flower pfl] [--only METHOD ...]
                                      [--out benchmarks/results/agreement.json] [--page docs/agreement.md]

Every framework is installed from PyPI into an environment of its own (once) and plays there, through its own classes,
what one file says: who takes part, which rows a step sees, where the model starts. A number is the digits that agree,
-log10(max |Δ| / max |θ|), over the server's last model and what clients keep to themselves. Where two disagree,
``rows.py`` names the cause and the smallest change after which they do not; what it does not explain ends the command
with an error. Rows of ``--out`` that ``--peers`` and ``--only`` leave out stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import in_fedloom  # noqa: E402
import page  # noqa: E402
from environments import prepare, versions  # noqa: E402
from federation import SITUATIONS, SIZES, Models  # noqa: E402
from rows import ROWS, Row  # noqa: E402

PEERS = ("fluke", "flgo", "fedlab", "flower", "pfl")


def digits(models: Models, peer_models: Models) -> float:
    """-log10(max |Δ| / max |θ|) over all vectors of both, at most 16; 0 if they are not about the same clients."""
    if models.keys() != peer_models.keys() or any(models[name].shape != peer_models[name].shape for name in models):
        return 0.0
    difference = max(float(np.abs(models[name] - peer_models[name]).max(initial=0.0)) for name in models)
    size = max(float(np.abs(value).max(initial=0.0)) for value in models.values())
    if not np.isfinite(difference):
        return 0.0
    return round(float(np.clip(-np.log10(difference / size), 0.0, 16.0)), 1) if difference else 16.0


def play_peer(peer: str, python: Path, path: Path, jobs: list[tuple[Row, bool]]) -> list[Models | str]:
    """The other framework's last models, or its words, for each row, as it is or changed."""
    todo, out = path.with_name(f"{peer}.jobs"), path.with_name(f"{peer}.npz")
    todo.write_text(
        json.dumps([{"method": r.preset, "settings": r.peer_settings, "changed": changed} for r, changed in jobs])
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    process = subprocess.run(
        [python, HERE / f"in_{peer}.py", path, todo, out], env=env, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{peer} ended with {' '.join(process.stderr.strip().splitlines()[-1:])}")
    failed = json.loads(out.with_suffix(".json").read_text())
    with np.load(out) as arrays:
        models = {name: arrays[name] for name in arrays.files}
    return [
        failed.get(str(i)) or {key.partition("/")[2]: v for key, v in models.items() if key.split("/")[0] == str(i)}
        for i in range(len(jobs))
    ]


def compare(rows: list[Row], pythons: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    """The digits of every row in all situations, or what the other framework said, as it is and after the change."""
    results: list[dict[str, Any]] = [
        {"method": row.method, "peer": row.peer, "digits": [], "changed": []} for row in rows
    ]
    for situation in SITUATIONS:
        path = folder / "federation.npz"
        in_fedloom.write(path, situation)
        everybody = SITUATIONS[situation]["cohort"] == len(SIZES)
        for peer, python in pythons.items():
            here = [i for i, row in enumerate(rows) if row.peer == peer and (everybody or not row.everybody)]
            jobs = [(i, changed) for changed in (False, True) for i in here if rows[i].is_changed or not changed]
            played = play_peer(peer, python, path, [(rows[i], changed) for i, changed in jobs])
            for (i, changed), other in zip(jobs, played, strict=True):
                settings = {**rows[i].settings, **(rows[i].switch if changed else {})}
                value = other
                if not isinstance(other, str):
                    value = digits(in_fedloom.play(path, situation, rows[i].preset, settings), other)
                results[i]["changed" if changed else "digits"].append(value)
        print(f"{situation}: done", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Prepare the environments, play everything and print a table; write JSON and the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedloom" / "peers"
    parser.add_argument("--envs", type=Path, default=cache, help=f"folder of the environments (default {cache})")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--only", nargs="+", help="methods")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    pythons, missing = {}, {}
    for peer in args.peers:
        python, reason = prepare(peer, args.envs)
        if python is None:
            missing[peer] = reason
        else:
            pythons[peer] = python
    for peer, reason in missing.items():
        print(f"{peer} is left out: {reason}", file=sys.stderr)
    rows = [row for row in ROWS if row.peer in pythons and (not args.only or row.preset in args.only)]
    with tempfile.TemporaryDirectory() as folder:
        results = compare(rows, pythons, Path(folder))
    old = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"rows": [], "versions": {}}
    all_rows = {(result["method"], result["peer"]): result for result in (*old["rows"], *results)}
    record = {
        "command": "python benchmarks/peers/agreement",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": old["versions"]
        | {"fedloom": {"torch": version("torch")}}
        | {p: versions(p, python) for p, python in pythons.items()},
        "left_out": missing,
        "situations": list(SITUATIONS),
        "rows": [all_rows[row.method, row.peer] for row in ROWS if (row.method, row.peer) in all_rows],
    }
    print(page.table(record))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if args.page:
        args.page.write_text(page.page(record))
    wrong = page.unexplained(record)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
