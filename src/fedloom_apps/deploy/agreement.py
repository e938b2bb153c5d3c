"""The data specification to which a node's owner has agreed: the only one under which its data are read for a server.

A server that could choose columns, ranges and names of classes order by order would learn a table value by value from
which of them fit. The first specification is therefore kept; another one is written beside it and waits for the owner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.base.errors import CheckpointError, first_line
from fedloom.experiment.atomic import sync_folder, write_whole
from fedloom_apps.deploy.data import DataSpec
from fedloom_apps.deploy.messages import Code, Refusal
from fedloom_apps.deploy.wire import WireError

AGREED, OFFERED = "specification.json", "specification-offered.json"
LONGEST = 1 << 20  # characters


class Agreement:
    """The agreed specification in a node's folder."""

    def __init__(self, home: Path, tell: Callable[[str], None] = lambda sentence: None) -> None:
        self.home, self.tell = home, tell

    def hold(self, spec: DataSpec, seed: int) -> tuple[str, int]:
        """The agreed specification as text and the seed of the split, if a server's specification is that one.

        The first one that is offered becomes the agreed one, with the seed of its run.

        Raises:
            Refusal: if another one is agreed.
            CheckpointError: if the file is damaged.
        """
        text = as_text(spec)
        if len(text) > LONGEST:
            raise WireError(f"a data specification has {len(text):,} characters, but at most {LONGEST:,} are allowed.")
        agreed = self.agreed()
        if agreed is None:
            self._write({"data": json.loads(text), "seed": seed})
            self.tell(f"this node's data are read under this specification from now on: {text}")
            return text, seed
        if agreed[0] != text:
            write_whole(self.home / OFFERED, json.dumps({"data": json.loads(text), "seed": seed}, indent=1).encode())
            raise Refusal(
                Code.AGREEMENT,
                f"a server offers another data specification than the agreed one in {self.home / AGREED}; compare it "
                f"with {self.home / OFFERED}, and if you agree, type fedloom deploy agree {self.home}",
            )
        return agreed

    def accept(self) -> str:
        """Agree to the specification that was offered last; returns its text."""
        try:
            offered = json.loads((self.home / OFFERED).read_bytes())
            text = as_text(offered["data"])
            self._write({"data": json.loads(text), "seed": int(offered["seed"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"no server has offered another specification to the node in {self.home}.") from error
        (self.home / OFFERED).unlink()
        return text

    def agreed(self) -> tuple[str, int] | None:
        """The agreed specification as text and the seed of the split; None if none is agreed yet."""
        path = self.home / AGREED
        try:
            content = json.loads(path.read_bytes())
            return as_text(content["data"]), int(content.get("seed", 0))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({first_line(error)}); write the agreed specification again."
            ) from error

    def _write(self, agreed: Mapping[str, Any]) -> None:
        write_whole(self.home / AGREED, json.dumps(agreed, indent=1).encode())
        sync_folder(self.home)


def as_text(spec: DataSpec | Mapping[str, Any]) -> str:
    """A specification as canonical text; what a file leaves out has its default.

    >>> as_text({"inputs": [3], "classes": 2}) == as_text(DataSpec((3,), 2))
    True
    """
    facts = vars(spec) if isinstance(spec, DataSpec) else vars(DataSpec(**spec))
    return json.dumps(facts, sort_keys=True, default=dict)
