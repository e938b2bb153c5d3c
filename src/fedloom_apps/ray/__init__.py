"""The engine for clusters of Ray."""
