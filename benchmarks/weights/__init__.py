"""The checkpoint engine against the wire and other ways to send weights."""
