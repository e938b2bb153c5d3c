"""Models for another party's unlabelled data, from a finished run."""
