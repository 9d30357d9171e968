"""The way out of a sandbox: kernel programs that judge, a gate that connects.

A sandbox that may reach something still has no interface. What it connects to is judged
in the kernel and turned to a gate that listens inside its own namespace; the gate checks
names and connects outside in its stead (docs/adr/0060). When the edge dies, the way out
is gone with it.
"""
