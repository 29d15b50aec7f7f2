"""Joining machines to a cluster without ssh: `pipeinfer up --join` on one, `pipeinfer join` on the
others.

A machine that joins connects to the head, and they prove to each other that they have the same
token (`tokens`). From then on the head's launcher starts its daemons there through this connection
(`server` on the head, `agent` on the machine, `messages` between them). It knows no models.
"""
