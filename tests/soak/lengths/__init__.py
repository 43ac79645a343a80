"""Parts of the soak of trained lengths: a run whose worker, trainer and Redis end and resume."""
