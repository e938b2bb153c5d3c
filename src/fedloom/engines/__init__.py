"""Interpreters of client work: serial, processes, vmap."""
