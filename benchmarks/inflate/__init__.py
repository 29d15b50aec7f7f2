"""`python -m benchmarks.inflate` (docs/models.md): models of any size, for benchmarks."""
