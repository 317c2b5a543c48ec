"""Benchmarks: what stands behind each number that the README quotes."""
