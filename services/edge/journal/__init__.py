"""What the edge remembers over restarts, and the trajectory log made of it."""
