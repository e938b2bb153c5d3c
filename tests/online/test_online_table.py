"""The table of ``fedloom online``."""

from __future__ import annotations

from fedloom_apps.online.config import table


def test_small_memories_are_not_shown_as_none() -> None:
    def summary(size: int) -> dict:
        return {
            "hedge": {"p": {"one": 1.0}},
            "ctm": {"accuracy": 0.5},
            "memory": {"task_bytes": size},
            "rounds": 4,
            "seconds": 1.0,
        }

    cells = list(table([(str(size), summary(size)) for size in (0, 4000, 2_500_000)]).columns[3].cells)
    assert cells == ["0 B", "4 kB", "2.5 MB"]
