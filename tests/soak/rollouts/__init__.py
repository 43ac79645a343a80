"""The parts of the rollout soak: a real run, the killer of its processes, and the ledger."""
