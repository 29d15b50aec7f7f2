"""What a launcher calls in place of ssh: starts its daemon on a machine that has joined.

    python -m pipeinfer.supervise.join.launch_agent NAME [OPTIONS] HOST COMMAND...

NAME is that of the supervisor, which passes the order on. Options of ssh are ignored.
"""

from __future__ import annotations

import sys

from pipeinfer.errors import PipeinferError
from pipeinfer.supervise.commands_socket import LaunchDaemon, call
from pipeinfer.supervise.join.daemon import arguments_of
from pipeinfer.supervise.state import Folder

_SECONDS = 40.0


def main() -> int:
    """Start the daemon; return the exit status for the launcher."""
    name, *words = sys.argv[1:]
    while words and words[0].startswith("-"):
        words.pop(0)
    try:
        kind, arguments = arguments_of(" ".join(words[1:]))
        call(Folder(name), lambda _: None, _SECONDS, LaunchDaemon(words[0], kind, arguments))
    except PipeinferError as error:
        sys.stderr.write(f"pipeinfer: {words[0] if words else 'a host'}: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
