"""Experiments: conditions, the loop over rounds, the run directory, checkpoints, configuration and reports."""
