"""The demonstration: real rollouts on real sandboxes, from a clean clone to rewards."""
