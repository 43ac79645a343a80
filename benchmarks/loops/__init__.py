"""The same training work, by this project and by others: of end_to_end.py and learning.py."""
