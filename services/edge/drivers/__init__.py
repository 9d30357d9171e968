"""Backends behind one port, and what some of them offer beside it."""
