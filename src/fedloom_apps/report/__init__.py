"""Reports that compare runs: a page with figures and tables, made from run directories alone.

Nothing is recomputed. Change ``rundata`` for what is read, ``groups`` for how runs are combined, ``results``,
``comparisons`` and ``costs`` for tables, ``figures`` for figures, ``page`` for the order of the page, and ``templates``
for its appearance.
"""

from fedloom_apps.report.page import build, write

__all__ = ["build", "write"]
