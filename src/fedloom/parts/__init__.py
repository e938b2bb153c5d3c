"""The parts of methods, one a file, in one package a slot."""
