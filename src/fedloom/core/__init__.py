"""The algebra of FedLoom: parts, what they need and see, and the methods that are composed of them.

This package imports only ``fedloom.base``. A new method should need no change here: write a part (``fedloom.parts``)
or combine existing ones (``fedloom.methods``). Change ``core`` when a part needs a hook, a requirement (``Needs``) or a
record that does not exist yet. Reading order: ``parts`` (the hooks), ``context`` (what they see), ``method``.
"""
