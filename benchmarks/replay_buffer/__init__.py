"""The replay buffer against other queues, bare Redis and its own targets."""
