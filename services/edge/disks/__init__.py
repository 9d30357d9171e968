"""Writable layers of bounded size."""
