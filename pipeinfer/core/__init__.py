"""Shared data: rows, sequence operations, requests, the acceptance rule, and messages with their
bytes.

Also the jobs and proposals that the scheduler and the proposers exchange (`drafting`). Pure data
and pure functions: no module here may depend on models, MPI, clocks, threads or the decisions of a
policy.
"""
