"""Checks and measurements that need a GPU; nothing else of the project does."""
