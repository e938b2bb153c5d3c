"""Readers of published data sets, each a source that is known by its name in ``fedloom list data``."""
