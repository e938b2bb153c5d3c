"""Experiments: conditions, the loop over rounds, evaluation, the run directory and checkpoints.

Where a change belongs: a new condition of a run in ``experiment`` (with ``setup`` and ``fingerprint``), what is
measured in ``evaluation`` and ``evaluator``, a file of the run directory in ``rundir``, the loop that all tasks share
in ``trainer``, what is printed in ``console`` and ``callbacks``. ``federated`` is the federated task itself.
"""
