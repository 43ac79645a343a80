"""The trainer: memory and time of its passes, cost of a checkpoint, agreement with engines."""
