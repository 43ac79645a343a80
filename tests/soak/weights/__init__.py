"""Parts of the weight soaks, in which processes die during a publish."""
