"""What this machine has, for the cluster that it is part of."""

from __future__ import annotations

import contextlib
import os
import platform
import socket

import psutil

from pipeinfer import __version__, host
from pipeinfer.core.codec import VERSION
from pipeinfer.llama.library import llama_version
from pipeinfer.planning.partition import size_text
from pipeinfer.supervise.join.messages import Offer, OwnSettings
from pipeinfer.supervise.launcher import Launcher

_KINDS = {"openmpi": "Open MPI", "hydra": "MPICH"}
_ELSEWHERE = ("192.0.2.1", 9)  #: an address that nobody has: nothing is sent there


def own_offer(launcher: Launcher, settings: OwnSettings) -> Offer:
    """Return what this machine has, without the addresses that a connection decides.

    settings: of its table in a nodes file.
    """
    facts = host.facts(len(os.sched_getaffinity(0)), 0, 1)
    return Offer(host=socket.gethostname(), cores=facts.cores, memory=facts.memory_available,
                 gpus=host.gpus(), dialled="", own="", port=0, pipeinfer=__version__,
                 digest=host.package_digest(), protocol=VERSION, llama=llama_version(),
                 python=platform.python_version(),
                 launcher=f"{_KINDS[launcher.kind]} {launcher.version}", settings=settings,
                 numa_nodes=max(1, len(host.numa_nodes())))


def words_of(offer: Offer) -> str:
    """Return what a machine has, in words."""
    gpus = f", {offer.gpus} GPU{'s' * (offer.gpus > 1)}" if offer.gpus else ""
    nodes = f" on {offer.numa_nodes} NUMA nodes" if offer.numa_nodes > 1 else ""
    own = "".join(f", {name} {value}" for name, value in offer.settings.given.items())
    return f"{offer.cores} cores{nodes}, {size_text(offer.memory)} of memory{gpus}{own}"


def card_of(address: str) -> str:
    """Return the hardware address of the card that has this address, "" if it has none."""
    for card in psutil.net_if_addrs().values():
        if any(one.address.partition("%")[0] == address for one in card):
            return next((one.address for one in card if one.family == psutil.AF_LINK), "")
    return ""


def own_addresses() -> list[str]:
    """Return the addresses of this host: first that in the network that leads elsewhere."""
    found = [one.address for _, interface in sorted(psutil.net_if_addrs().items())
             for one in interface
             if one.family == socket.AF_INET and not one.address.startswith("127.")]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        found.insert(0, str(probe.getsockname()[0]))
    return list(dict.fromkeys(found)) or [socket.gethostname()]
