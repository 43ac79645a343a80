"""Benchmarks of the parts of Leash against alternatives; run by `make bench`."""
