"""One agent loop, run both ways: in the trainer's process, and in a worker container."""
