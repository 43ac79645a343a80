"""The parts of the rollout pool's soak: a real run, who kills in it, and who keeps the books."""
