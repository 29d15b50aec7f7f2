"""What tests and benchmarks share: drivers (real jobs, servers, namespaces, plain loops), fakes of
single parts, random models of every architecture, and oracles to compare with.

Needs a checkout (launch/, hostfiles/). Must not import benchmarks or the lab.
"""
