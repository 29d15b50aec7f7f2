"""The supervisor: `pipeinfer up`, and the program to which the launch scripts hand over.

It starts the launcher, owns the HTTP process, monitors the job, restarts it, and moves it to other
hosts. `rules` and `changes` decide without processes; the other modules act. This package uses no
MPI and handles no requests: the HTTP process reports how many are open.
"""
