"""Every measured number of the documentation, as records: a page of Markdown per subject.

Numbers are added here, by hand or by a benchmark, and nowhere else.
"""
