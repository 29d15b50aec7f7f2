"""Rank program: `pipeinfer ARGS...` whose rank 0 is late to say how a request ended."""

from __future__ import annotations

import time

from pipeinfer.cli import generate, main

if __name__ == "__main__":
    report = generate._report

    def late_report(*args) -> None:
        time.sleep(0.05)
        report(*args)

    generate._report = late_report
    main.main(prog_name="pipeinfer")
