"""Simulated users and units of the system: load with faults, at the size of a laptop."""
