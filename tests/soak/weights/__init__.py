"""Parts of the plays in which weights travel and somebody dies on the way."""
