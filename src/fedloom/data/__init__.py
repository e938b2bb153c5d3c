"""Data: sources, partitions, and the federations they make."""
