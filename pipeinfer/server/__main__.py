"""`python -m pipeinfer.server LINK LISTENER`: the HTTP process, see `http_server`."""

import sys

from pipeinfer.loading import uncollected

with uncollected():
    from pipeinfer.server.http_server import main

if __name__ == "__main__":
    sys.exit(main())
