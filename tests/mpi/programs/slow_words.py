"""Rank program: `pipeinfer ARGS...` whose rank 0 is late to say how a request ended."""

from __future__ import annotations

import time

from pipeinfer import cli

if __name__ == "__main__":
    report = cli._report

    def late_report(*args) -> None:
        time.sleep(0.05)
        report(*args)

    cli._report = late_report
    cli.main(prog_name="pipeinfer")
