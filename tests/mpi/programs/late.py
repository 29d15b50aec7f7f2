"""`pipeinfer` on a machine that takes its time to start."""

import time

time.sleep(4)

from pipeinfer.cli.main import main  # noqa: E402

main()
