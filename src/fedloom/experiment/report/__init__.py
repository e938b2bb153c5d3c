"""Reports that compare runs: a page with figures and tables, made from run directories alone.

Nothing is recomputed. Change ``rundata`` for what is read, ``groups`` for how runs are combined, ``results`` and
``costs`` for tables, ``curves`` and ``clients`` for figures, ``page`` for the order of the page.
"""

from fedloom.experiment.report.page import build, comparison_picture

__all__ = ["build", "comparison_picture"]
