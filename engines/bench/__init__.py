"""Benchmarks of the engines themselves: `make bench`."""
