"""The C parts, both optional; docs/kernels.md describes what each replaces."""
