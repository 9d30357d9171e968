"""Layers on this node: where they are, how they are mounted."""
