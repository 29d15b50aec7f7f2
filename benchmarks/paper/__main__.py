"""`python -m benchmarks.paper`: see `experiments`."""

from benchmarks.paper.experiments import main

main()
