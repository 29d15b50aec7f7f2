"""Exchanges the facts of all ranks at the start and checks that they can work together.

It compares versions, options and host facts; it has no model, no plan and no request.
"""

from __future__ import annotations

import hashlib
import json
import time

from msgspec import structs

from pipeinfer import host
from pipeinfer.backends.pytorch.options import missing_packages
from pipeinfer.config import JobConfig
from pipeinfer.core.codec import VERSION
from pipeinfer.core.control import Bell, Hello, Refused, pack, unpack
from pipeinfer.errors import MismatchError, PipeinferError, RankLost
from pipeinfer.host import Place, host_name
from pipeinfer.llama.library import NO_LIBRARY, llama_kernels, llama_version
from pipeinfer.nodes import Nodes, RankInfo, check_head
from pipeinfer.nodes import load as load_nodes
from pipeinfer.transport.base import Dismissed

_PER_NODE_FIELDS = frozenset({"threads", "threads_draft", "gpu_layers", "gpu_layers_draft", "numa",
                              "keep_binding", "trace", "nodes", "backend", "device",
                              "offline"})

_REFUSED_SECONDS = 90.0  #: that a refusing rank waits for rank 0, longer than start-up's 60
_ALONE_SECONDS = 2.0  #: that it waits for the end of the job if it cannot reach rank 0


def hello(config: JobConfig, place: Place) -> Hello:
    """Return what this rank sends to the head: versions, a digest of the config, host facts."""
    shared = {k: v for k, v in config.values().items() if k not in _PER_NODE_FIELDS}
    digest = hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=8)
    return Hello(
        rank=place.rank, version=host.package_version(), protocol=VERSION, backend=llama_version(),
        kernels=llama_kernels(), config=digest.hexdigest(),
        values={k: repr(v)[:80] for k, v in shared.items()},
        asked_backend=config.model.backend, torch_missing=tuple(missing_packages()),
        facts=host.facts(place.cores, place.local_rank, place.local_size), bell=_bell(place))


def _bell(place: Place) -> Bell:
    if place.comm is None:
        return Bell()
    from pipeinfer.transport import mpi_job

    return mpi_job.own_bell()


def tell(config: JobConfig, place: Place) -> None:
    """Rank k: send this rank's Hello to rank 0. Raises TransportTimeout, RankLost."""
    from pipeinfer.transport import mpi_job

    mpi_job.gather_json(place.comm, pack(hello(config, place)).decode())


def refuse(error: PipeinferError) -> None:
    """Rank k: send the error to rank 0, which prints it and ends the job.

    Rank 0 does so at once if it has found the same error. Returns only if this rank has to print
    the error itself.
    """
    host.choose_transports()
    try:
        from pipeinfer.transport import mpi_job

        comm = mpi_job.world()
    except (ImportError, RuntimeError, PipeinferError):
        time.sleep(_ALONE_SECONDS)
        return
    if mpi_job.JOB.ports or comm.Get_size() != host.launched_size():
        time.sleep(_ALONE_SECONDS)
        return
    words = Refused(comm.Get_rank(), host_name(), str(error), error.exit_code)
    try:
        mpi_job.refuse(comm, words, _REFUSED_SECONDS)
    except Dismissed:
        mpi_job.leave()


def compare(config: JobConfig, place: Place) -> list[RankInfo]:
    """Rank 0: return every rank, with its host's settings from the nodes file.

    Raises MismatchError when they cannot work together, RankRefused for a rank that takes no part,
    RankLost for a dead rank if the job does not survive that, UsageError when the nodes file
    cannot be used.
    """
    mine = hello(config, place)
    if place.comm is None:
        return _with_settings(config, [_info(mine)])
    from pipeinfer.transport import mpi_job

    texts = mpi_job.gather_json(place.comm, pack(mine).decode(), instead="")
    assert texts is not None
    dead = [rank for rank, text in enumerate(texts) if not text]
    if dead and not mpi_job.survivable():
        raise RankLost(dead[0], "died while the job was starting")
    found = [mine]
    for rank, text in enumerate(texts[1:], 1):
        other = mine
        if text:
            heard = unpack(text.encode())
            if not isinstance(heard, Hello):
                raise MismatchError(f"rank {rank} opened with the unexpected message "
                                    f"{type(heard).__name__}: install the same version on every "
                                    "host")
            other = heard
        _check(mine, other)
        _check_library(mine, other, strict=config.cluster.strict)
        found.append(other)
    return _with_settings(config, [
        RankInfo(rank, "a dead host", dead=True) if rank in dead else _info(one)
        for rank, one in enumerate(found)])


def _check(mine: Hello, other: Hello) -> None:
    """Raise MismatchError if a rank has another version or config than rank 0."""
    who = f"rank {other.rank} on {other.facts.host}"
    for theirs, ours, what in ((other.version, mine.version, "pipeinfer"),
                               (other.protocol, mine.protocol, "protocol")):
        if theirs != ours:
            raise MismatchError(
                f"{who} runs {what} {theirs}, rank 0 on {mine.facts.host} runs {ours}: install the "
                "same version on every host")
    if other.config != mine.config:
        names = [k for k, v in mine.values.items() if other.values.get(k) != v]
        raise MismatchError(
            f"{who} and rank 0 have different values for {', '.join(names)}: give every rank the "
            "same options (check PIPEINFER_* variables and config files on each host)")


def _check_library(mine: Hello, other: Hello, *, strict: bool) -> None:
    """Raise MismatchError if a rank's llama.cpp does not match rank 0's.

    Another revision of llama.cpp may compute different results. The same source compiled for
    another processor rounds differently, which shows in near-ties only: see `notes_on`.
    """
    for one in (mine, other):
        if one.backend.startswith(NO_LIBRARY):
            if one.asked_backend == "torch":
                return
            reason = one.backend.removeprefix(NO_LIBRARY)
            raise MismatchError(f"rank {one.rank} on {one.facts.host} runs no llama.cpp: {reason}")
    who = f"rank {other.rank} on {other.facts.host}"
    if other.backend != mine.backend:
        raise MismatchError(
            f"{who} runs llama.cpp from {other.backend}, rank 0 on {mine.facts.host} from "
            f"{mine.backend}: use the same on every host, all prebuilt or all --native")
    if strict and other.kernels != mine.kernels:
        raise MismatchError(
            f"{who} runs llama.cpp with kernels for {_words(other, mine)}, rank 0 on "
            f"{mine.facts.host} for {_words(mine, other)}: use the same build on every host, or "
            "leave out --strict")


def _words(one: Hello, other: Hello) -> str:
    """Return the kernels that only the first of the two has."""
    theirs = other.kernels.split()
    return " ".join(word for word in one.kernels.split() if word not in theirs) or "less"


def notes_on(hosts: list[RankInfo]) -> list[str]:
    """Return notes for the user on differences between ranks that can work together."""
    kinds = {one.kernels for one in hosts if one.kernels}
    return ["these ranks have different kernels, pipeinfer doctor says which: tokens equal plain "
            "decoding through the same stages, and that of one build up to near-ties (--strict "
            "refuses this)"] if len(kinds) > 1 else []


def unmet(config: JobConfig, hosts: list[RankInfo]) -> list[str]:
    """Return notes for the user on what the nodes file asks of ranks that cannot do it."""
    nodes, last, own = load_nodes(config.cluster), len(hosts) - 1, hosts[0].settings
    notes = [f"the nodes file has settings of rank {rank}, but the last rank of this job is {last}"
             for rank in (nodes.ranks if nodes else ()) if rank > last]
    return notes + ["rank 0 leads the job and does not draft by the nodes file: --proposer and -md "
                    "say what it proposes"] * bool(own.proposer or own.draft)


def _info(hello: Hello) -> RankInfo:
    facts = hello.facts
    return RankInfo(
        hello.rank, facts.host, float(facts.memory_available), facts.cores, facts.cores_host,
        asked_backend=hello.asked_backend, torch_missing=hello.torch_missing, bell=hello.bell,
        kernels=hello.kernels)


def _with_settings(config: JobConfig, ranks: list[RankInfo]) -> list[RankInfo]:
    """Return the ranks with their hosts' settings, and their memory limited by those.

    Raises UsageError when the nodes file cannot be used or names another host as the head.
    """
    nodes = load_nodes(config.cluster) or Nodes("")
    check_head(nodes, [rank.host for rank in ranks])
    found = []
    for rank in ranks:
        settings = nodes.of(rank.host, rank.rank)
        memory = rank.memory if settings.memory is None else min(rank.memory, settings.memory)
        backend = settings.options(config.given).get("backend", rank.asked_backend)
        found.append(structs.replace(
            rank, settings=settings, memory=memory, asked_backend=backend))
    return found
