"""Parsing a report page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def figures_of(page: Path) -> list[dict[str, Any]]:
    """The figures of a page, as its script gets them."""
    figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(), re.DOTALL)
    assert figures is not None
    return json.loads(figures[1])
