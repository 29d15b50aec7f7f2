"""Notes for the user when a job begins: the policy in use, and options that may not do what they
seem to, and the members of wide stages. Texts only; this module decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeinfer.cluster.handshake import notes_on, unmet
from pipeinfer.config import ModelConfig, SpeculationConfig
from pipeinfer.core.control import Ready
from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.models.slice_parts import Slice
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.wide import stages_of
from pipeinfer.runtime.drafts import RemoteDraft
from pipeinfer.scheduler.controller import NEVER
from pipeinfer.scheduler.events import LaneStats
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies import registry

if TYPE_CHECKING:
    from pipeinfer.cluster.assembly import Assembly
    from pipeinfer.cluster.placement import Job


def at_start(job: Job, assembly: Assembly, hosts: list[RankInfo], remotes: Sequence[RemoteDraft],
             further: Sequence[str], weighed: bool) -> list[str]:
    """Return all notes of a job that begins. further: on what became of its proposers.
    weighed: see `doubts`"""
    config = job.config
    return [why(config.speculation, job), *notes_on(hosts), *unmet(config, hosts), *job.notes,
            *job.survey.notes, *further,
            *filter(None, [job.plan.line(), one_stage(job.plan.ranks, hosts),
                           time_shared(hosts, job),
                           cut_candidates(job, min(assembly.terms.exact, job.width))]),
            *drawing(assembly.held, assembly.ready), *drafting(remotes, hosts, job),
            *doubts(config.speculation, job, weighed), *map(str, assembly.changes),
            *doubts_about(config.model, job, assembly)]


def why(config: SpeculationConfig, job: Job) -> str:
    """Return the policy in use, and the reason for it."""
    guessers = [spec.name for spec in registry.named(config) if spec.inline is not None]
    guessers += [one.name for one in job.proposers]
    if job.policy is not Policy.ITERATIVE:
        return f"policy {job.policy}: draft tokens come from {' and '.join(guessers)}"
    if config.speculation == "off":
        return f"policy {job.policy}, token by token: --speculation off"
    if guessers:
        return f"policy {job.policy}, token by token, as requested: without draft tokens of " \
               f"{' and '.join(guessers)}"
    return f"policy {job.policy}, token by token: there is no proposer (-md, --proposer)"


def time_shared(hosts: list[RankInfo], job: Job) -> str:
    """Describe the time sharing of cores, if all ranks take turns on one host; else ""."""
    return (f"all ranks are on {hosts[0].host}: draft and stages share its {hosts[0].cores_host} "
            "cores in time (--set turns=off: each keeps its own, and runs overlap)"
            ) if job.time_sharing else ""


def one_stage(ranks: Sequence[int], hosts: Sequence[RankInfo]) -> str:
    """Describe a job whose only stage is on another host than rank 0, else "". ranks: of stages."""
    if tuple(ranks) in ((), (0,)) or len(ranks) > 1 or hosts[ranks[0]].host == hosts[0].host:
        return ""
    return (f"rank {ranks[0]} on {hosts[ranks[0]].host} holds all layers; rank 0 on "
            f"{hosts[0].host} schedules and drafts (--head-stage: it holds layers as well)")


def doubts(config: SpeculationConfig, job: Job, weighed: bool = False) -> list[str]:
    """Return notes on options that may not do what the user expects.
    weighed: whether each speculative token has to pay for its row (`Limits.costs`)"""
    notes = []
    inline = registry.inline(config)
    rivals = [spec.name for spec in registry.named(config) if spec.inline is not None]
    if inline is not None and len(rivals) > 1:
        notes.append(f"{' and '.join(rivals)} compete for the same rows: only {inline.name}, named "
                     "first, is used")
    notes += _without_effect(config, job, weighed)
    branching = [f"--set {name}" for name, least in (
        ("alternatives", 0), ("branches", 1), ("partitions", 0)) if getattr(config, name) > least]
    if job.chains and branching:
        notes.append(f"{' and '.join(branching)} without effect: with padded runs on GPUs the "
                     "speculative tokens of a request are one chain (--exact off allows others)")
    if Ablation.ASYNC in config.ablate:
        notes.append("--ablate async also ends continuous speculation: draft and target alternate")
    if job.gaps:
        notes.append("stages of llama.cpp leave gaps between positions: tokens equal those of "
                     "another run up to near-ties (docs/decomposers.md)")
    return notes


def _without_effect(config: SpeculationConfig, job: Job, weighed: bool) -> list[str]:
    """Return notes on options that change nothing in this job."""
    notes, policy = [], job.policy
    used = policy is Policy.PIPEINFER and not job.time_sharing
    dead = [name for name, given in (
        ("p_recovery", config.p_recovery > 0 and weighed),
        ("p_decay", config.p_decay > 0 and weighed),
        ("alternatives", config.alternatives > 0 and not used and not job.chains),
        ("tip", config.tip != "auto" and not used)) if given]
    if dead:
        notes.append(" and ".join(f"--set {name}" for name in dead) + " without effect: policy "
                     f"{policy} does not use {'it' if len(dead) == 1 else 'them'}"
                     + (" where ranks take turns (--set turns=off)" if job.time_sharing else
                        " where draft and target take turns (--set adapt=false)" * weighed))
    if config.branches > 1 and policy not in (Policy.SPECULATIVE, Policy.PUBLISHED) \
            and "async" not in config.ablate:
        notes.append(f"--set branches has no effect with policy {policy}: it is for trees of "
                     "--policy speculative and --policy published")
    if config.p_decay > 0 and config.draft_p_min <= 0 and config.p_recovery <= 0 \
            and policy is Policy.PIPEINFER and not (weighed or job.time_sharing):
        notes.append("--set p_decay has no effect here: it lowers a cutoff, which is 0 without "
                     "--set draft_p_min or --set p_recovery")
    return notes


def drafting(remotes: Sequence[RemoteDraft], hosts: Sequence[RankInfo], job: Job) -> list[str]:
    """Return notes on the ranks that propose tokens, other than rank 0."""
    busy = {rank for remote in remotes for rank in remote.ranks}
    idle = [str(one.rank) for one in hosts
            if one.rank and one.settings.drafts and not one.dead and one.rank not in busy]
    reason = (f"policy {job.policy} takes no draft tokens" if job.policy is Policy.ITERATIVE else
              "there is no draft model" if job.facts.draft is None else
              "no --proposer asks the draft")
    notes = [f"rank {', '.join(idle)} is there to draft and has nothing to do: {reason}"
             ] if idle else []
    for remote in remotes:
        words = "; ".join(
            f"rank {one.rank} on {one.host}" + (
                "" if remote.free else f", {one.weight_bytes / 1e6:.0f} MB, {one.threads} "
                f"thread{'s' * (one.threads > 1)}")
            for one in map(remote.ready.__getitem__, remote.ranks))
        notes.append(f"{remote.name} drafts on {words}")
    return notes


def doubts_about(config: ModelConfig, job: Job, assembly: Assembly) -> list[str]:
    """Return notes on what the loaded stages reported that a user may not expect."""
    notes = []
    if config.like_llama_cpp:
        rows = assembly.terms.exact
        notes.append("computed like llama.cpp by default; of that only runs of "
                     f"{rows} row{'s' * (rows != 1)} are exact")
    if config.exact == "off":
        notes.append("exact widths are off: tokens equal plain decoding up to near-ties")
    elif assembly.terms.exact == 1:
        if job.policy is not Policy.ITERATIVE:
            notes.append("only runs of one row are exact here, so draft tokens travel one by one, "
                         "with one stage and --policy speculative not at all; --exact off allows "
                         "wider runs")
        if any(one.backend == "torch" and one.threads > 1 for one in assembly.ready.values()):
            notes.append("torch splits a run's sums over its threads by the number of rows: with "
                         "-t 1 wider runs may be exact")
    there = [one for one in assembly.ready.values() if one.gpu and config.exact == "on"]
    if gpus := {one.gpu for one in there if not one.padded}:
        notes.append(f"layers on {', '.join(sorted(gpus))}: there tokens equal plain decoding's up "
                     "to near-ties (docs/exactness.md#gpus)")
    notes += sorted({f"decodes on {one.gpu} are padded to {one.padded} rows, which take "
                     f"{one.padding_cost:.2f} times as long as one, in plain decoding too"
                     for one in there if one.padded > 1})
    if len({one.backend for one in assembly.ready.values()}) > 1:
        notes.append("stages run on different backends: tokens equal plain decoding through the "
                     "same stages, and that of one backend up to near-ties")
    return notes


def cut_candidates(job: Job, exact: int) -> str:
    """Describe a step of an inline proposer that has more draft tokens than an exact run has rows
    for, else "". exact: R."""
    config = job.config.speculation
    spec = registry.inline(config)
    if spec is None or spec.name != "lookahead" or job.config.model.exact == "off":
        return ""
    own = registry.values_of(spec, config)
    most, size = own["lookahead_candidates"], own["lookahead_ngram"] - 1
    if most * size < exact:
        return ""
    return (f"lookahead verifies at most {exact - 1} draft tokens per step, which are exact here: "
            f"{(exact - 1) // size} whole candidates of {size} tokens instead of {most} (--exact "
            "off: all)")


def undrafted(limits: Limits, lane: LaneStats) -> str:
    """Return why a request that has ended had no draft token in flight, else ""."""
    if limits.policy is Policy.ITERATIVE or lane.issued_speculative:
        return ""
    if not limits.speculates:
        why = "only runs of one row are exact here"
    elif lane.drafted:
        why = f"none of {lane.drafted} drafted tokens was likely enough to pay for its row"
    elif limits.path_min >= NEVER or not limits.asks_models:
        why = "a model's draft tokens would cost more time here than they gain"
    else:
        why = "the proposers had nothing to propose, or rested because they did not pay"
    return f"no draft token was issued: {why}"


# --- wide stages ------------------------------------------------------------------------------


def drawing(held: Sequence[Holding], ready: Mapping[int, Ready]) -> list[str]:
    """Return a line per wide stage: the slices of its members, and the measured time of a sum."""
    nodes = {holding: node for node, holding in enumerate(held, 1)}

    def sums(team: Sequence[Holding]) -> str:
        last = ready[nodes[team[-1]]]
        return f"a sum takes {1e6 * last.sum_seconds:.0f} us ({last.sums})"

    return lines_of(held, lambda one: ready[nodes[one]].host,
                    lambda one: ready[nodes[one]].weight_bytes, sums)


def lines_of(held: Sequence[Holding], host_of: Callable[[Holding], str],
             bytes_of: Callable[[Holding], float], sums: Callable[[Sequence[Holding]], str]
             ) -> list[str]:
    """Return a line per stage whose layers are cut.

    host_of: returns the host of a member. bytes_of: returns the weights of a member.
    sums: returns the text on the sums of a stage.
    """
    lines = []
    for number, team in enumerate(stages_of(held), 1):
        if not team[0].cut:
            continue
        members = [f"rank {one.rank} on {host_of(one)} ({_slices(one)}; "
                   f"{bytes_of(one) / 1e6:.0f} MB)" for one in team]
        lines.append(f"stage {number}: layers {team[0].start}-{team[0].stop - 1}, {sums(team)}: "
                     + "; ".join(members))
    return lines


def _slices(holding: Holding) -> str:
    own = [Slice.parse(holding.cut[index]) for index in holding.slices]
    return " and ".join(f"{_heads(one)}, columns {one.ff[0]}-{one.ff[1] - 1}" + (
        f", of each expert {one.experts[0]}-{one.experts[1] - 1}" if one.experts else
        f" of experts {one.among[0]}-{one.among[1] - 1}" if one.among else "")
        for one in own)


def _heads(piece: Slice) -> str:
    text = f"KV heads {piece.heads[0]}-{piece.heads[1] - 1}"
    if piece.queries is not None:
        text = f"query heads {piece.queries[0]}-{piece.queries[1] - 1} of KV head {piece.heads[0]}"
    if piece.delta is not None:
        text += f", key heads {piece.delta[0]}-{piece.delta[1] - 1} of layers with a state"
    return text
