"""`python -m benchmarks.serving`: see `campaigns`."""

from benchmarks.serving.campaigns import main

main()
