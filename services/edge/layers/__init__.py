"""Layers on this node: where they are, how they are mounted, what is composed of them."""
