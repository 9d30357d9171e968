"""From a policy to what enforces it on this node. Pure: no clock, no I/O."""
