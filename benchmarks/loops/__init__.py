"""The same training work, done by this project and by others: parts of end_to_end.py."""
