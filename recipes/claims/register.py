"""The claim files of this folder, which ``fedloom claim`` reads, and what their stored results say."""

from __future__ import annotations

from pathlib import Path

from fedloom_apps.claims.register import read_claims

from .measures import Result

FILES = {f"claims/{file.name}": file for file in read_claims(Path(__file__).parent)}
RESULTS: dict[str, Result] = {
    name: Result(
        file.title, file.differs, [claim for claim, judged in file.judged(file.results()) if judged], file.note
    )
    for name, file in FILES.items()
    if file.stored.exists()
}
