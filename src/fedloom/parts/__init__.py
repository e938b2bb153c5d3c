"""The parts of methods: one package per slot, one idea per file.

A new part goes into the package of its slot and is named in the table of its ``__init__``; CONTRIBUTING.md shows one in
full. Parts never import other slots or an engine.
"""
