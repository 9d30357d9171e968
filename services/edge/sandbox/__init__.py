"""One sandbox on this node: its actor, its decisions, its time."""
