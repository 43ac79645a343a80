"""The rollout pool against other schedules, and what it costs."""
