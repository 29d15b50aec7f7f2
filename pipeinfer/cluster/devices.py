"""The memory of ranks' GPUs: what plans may fill there, and plans that would overfill it.

Only layers on llama.cpp count. This module asks no rank; `placement` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from pipeinfer.backends.factory import backend_for
from pipeinfer.config import JobConfig
from pipeinfer.core.control import Measured
from pipeinfer.errors import PlanError
from pipeinfer.nodes import RankInfo
from pipeinfer.planning.partition import Load, size_text
from pipeinfer.planning.planner import Plan
from pipeinfer.planning.wide import share_of


def offloading(config: JobConfig, model: Any, hosts: Sequence[RankInfo]) -> list[int]:
    """Return the living ranks whose layers of the model would be on a GPU, all or some."""
    return [one.rank for one in hosts if not one.dead and one.gpu_layers(config)
            and backend_for(one.asked_backend, model.path) == "llamacpp"]


def on_their_gpus(config: JobConfig, model: Any, hosts: Sequence[RankInfo],
                  answers: Mapping[int, Measured]) -> list[RankInfo]:
    """Return the ranks with the memory of their GPUs in the place of their hosts', without a bound
    where it is not known; with that of their hosts where there is no GPU.

    answers: by rank, of those that were asked.
    """
    ranks = offloading(config, model, hosts)
    return [_on_gpu(config, model, one, answers.get(one.rank)) if one.rank in ranks else one
            for one in hosts]


def _on_gpu(config: JobConfig, model: Any, one: RankInfo, answer: Measured | None) -> RankInfo:
    settings, room, free = one.settings, f"{one.host}, its GPUs", 0.0
    if answer is not None and not (answer.gpu_name or answer.error):
        return one
    if answer is not None and answer.gpu_name:
        which = f"GPU {answer.gpu}" if answer.gpu else "its GPUs"
        room, free = f"{one.host}, {which} ({answer.gpu_name})", answer.gpu_free
    bound = settings.memory if settings.gpu_memory is None else settings.gpu_memory
    device = min(free or math.inf, math.inf if bound is None else bound)
    memory = device
    if one.gpu_layers(config) < model.n_layers:  # the others stay in the host's
        memory += one.memory
        if settings.gpu_memory is None and bound is not None:
            memory = min(memory, bound)
    return structs.replace(one, memory=memory, room=room, device=device)


def without_embedding(load: Load, first: RankInfo) -> Load:
    """Return the load without the embedding where that is not in the memory that the first stage
    fills: llama.cpp leaves it to the processor.

    first: the rank of that stage.
    """
    whole = first.room and first.memory <= first.device
    return structs.replace(load, first_bytes=0.0) if whole else load


def check_devices(config: JobConfig, load: Load, plan: Plan, hosts: Sequence[RankInfo],
                  head_bytes: float = 0.0) -> None:
    """Raise PlanError where layers need more of a GPU's memory than is free there.

    hosts: from `on_their_gpus`. head_bytes: of rank 0's draft.
    """
    needs: dict[str, float] = {}
    if hosts[0].room and hosts[0].drafts_on_gpu(config):
        needs[hosts[0].room] = head_bytes
    users = users_of(plan, hosts)
    for one in plan.held:
        rank = hosts[one.rank]
        if not rank.room:
            continue
        # llama.cpp counts the output as a layer, and leaves the embedding to the processor
        first = max(one.start, one.stop + 1 - rank.gpu_layers(config))
        share, embedding = share_of(one), load.first_bytes * (first == 0)
        need = load.slices_bytes(first, one.stop, share, max(1, len(one.slices)))
        needs[rank.room] = needs.get(rank.room, 0.0) + need - share * embedding
    for room, ranks in users.items():
        free = min(hosts[rank].device for rank in ranks)
        if needs[room] > free * (1 + 1e-9):
            raise PlanError(
                f"{_named(ranks)} on {room}: layers there need {size_text(needs[room])} (weights, "
                f"cache, scratch), but {size_text(free)} are free: use a lower -ngl, a smaller "
                "context (-c) or quantisation, fewer ranks on it, or end what else runs there")


def users_of(plan: Plan, hosts: Sequence[RankInfo]) -> dict[str, list[int]]:
    """Return the ranks with layers on each GPU, by its name."""
    found: dict[str, list[int]] = {}
    for one in plan.held:
        if room := hosts[one.rank].room:
            found.setdefault(room, []).append(one.rank)
    return found


def notes_on(plan: Plan, hosts: Sequence[RankInfo], answers: Mapping[int, Measured]) -> list[str]:
    """Return notes for the user: on ranks that were to use a GPU and have none, and on each GPU
    that several ranks use, whose speed together no rank measures."""
    held = {one.rank for one in plan.held}
    without = sorted(rank for rank, answer in answers.items()
                     if rank in held and not (hosts[rank].room or answer.error))
    found = [f"llama.cpp finds no GPU for {_named(without)}: all layers there are on the processor "
             "(pipeinfer doctor)"] if without else []
    return found + [
        f"{_named(ranks)} share the GPU of {room}: how fast they are together is unknown, each "
        "measured itself alone" for room, ranks in users_of(plan, hosts).items() if len(ranks) > 1]


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
