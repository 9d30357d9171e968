"""Benchmarks: ``python -m bench NAME [--json] [--quick]``. They gate nothing."""
