"""Pictures that commands draw with matplotlib, where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from pipeinfer.errors import UsageError


def check_drawing(otherwise: str = "") -> None:
    """Raise UsageError if matplotlib is not installed. otherwise: alternative, for the message."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"drawing needs matplotlib: pip install 'pipeinfer[plot]'{otherwise}")


def pyplot() -> Any:
    """Return matplotlib's pyplot for pictures in files. Raises UsageError if it is not
    installed."""
    check_drawing()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
