"""Drivers that tests and benchmarks share: real jobs, servers, namespaces, a plain loop to compare
with.

Needs a checkout (launch/, hostfiles/); no command of the package imports it.
"""
