"""Experiments: conditions, the loop over rounds, evaluation, the run directory, checkpoints and reports.

Where a change belongs: a new condition of a run in ``experiment`` (with ``setup`` and ``fingerprint``), an evaluation
in ``evaluate``, a file of the run directory in ``rundir``, the loop that all tasks share in ``trainer``, what is
printed in ``console`` and ``progress``, the comparison page in ``report``. ``federated`` is the federated task itself.
"""
