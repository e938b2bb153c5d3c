"""Synthesis: labelled synthetic data sets, generated at the server of a federation."""
