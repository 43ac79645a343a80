"""The parts of the soak: a trainer job and producers that can be killed, and who judges the end."""
