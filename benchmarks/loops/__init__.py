"""Whole launches of one work: beside other systems, by rule of scheduling, by staleness."""
