"""The computation of a federated round: the local work of clients, the sums of what they send, the server's steps.

This package imports only ``fedloom.core`` and ``fedloom.base``. Reading order: ``plan`` (what stays the same from
round to round), ``client`` (local work), ``round`` (the server), ``meeting`` (several models).
"""
