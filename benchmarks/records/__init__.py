"""Every measured number of the documentation, as records; pages are written from them.

A TOML file per group. Numbers are added here, by hand or by a benchmark, and nowhere else.
"""
