"""The parts of the crash soak: a trainer and producers that can be killed, and the final check."""
