"""Data sets that a federation makes: synthetic, labelled, at the server."""
