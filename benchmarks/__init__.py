"""What the parts of Leash cost, against what else one could use; run by `make bench`."""
