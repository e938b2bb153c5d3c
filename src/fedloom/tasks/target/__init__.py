"""Models for the unlabelled data of somebody else, from a finished run."""
