"""Who opens what is covered, decoyed or replaced inside a sandbox, as the kernel tells it."""
