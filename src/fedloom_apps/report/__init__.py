"""Reports that compare runs: a page with figures and tables, made from run directories alone.

Nothing is recomputed. Change ``groups`` for what is read and how runs are combined, ``tables`` and
``comparisons`` for tables, ``figures`` for figures, ``page`` for the order of the page, and ``templates`` for its
appearance.
"""

from fedloom_apps.report.page import build, write

__all__ = ["build", "write"]
