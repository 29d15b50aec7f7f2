"""Every measured number of the documentation, as records; docs/benchmarks.md is written from them.

A TOML file per group. Numbers are added here, by hand or by a benchmark, and nowhere else.
"""
