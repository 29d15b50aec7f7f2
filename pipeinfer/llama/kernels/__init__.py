"""The C parts, both optional; docs/kernels.md says what each replaces."""
