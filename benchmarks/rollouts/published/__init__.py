"""Schedules that others have published, over the same sampler as ours."""
