"""What a desktop with a GPU and three old servers plan and gain together, and each alone.

    python -m benchmarks.methods.mixed_cluster

Emulated, from profiles and in virtual time, as `pipeinfer plan --dry-run` is. The desktop has two
ranks: rank 0 with the draft on its processor, and one on its GPU. Alone, its processor holds what
the GPU has no memory for, as a stage of its own. Of the servers alone, one is rank 0 and a stage.
That the draft takes time from layers on the same processor is left out.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from pipeinfer.lab.emulation.profiles import load_profiles
from pipeinfer.lab.forecast import Report, dry

PAIRS = ("dolphin-tinyllama", "yi-9b")
_DESK = ("desk", "card")
_SERVERS = ("old1", "old2", "old3")
#: the desktop's processor with memory for what the GPU does not hold
_PROFILES = '[nodes."i7-4790"]\nmemory_gib = 32\n'
_NODES = """
[node.desk]
profile = "i7-4790"
[node.card]
profile = "rtx-3090"
device = "gpu"
gpu_memory = "23 GiB"
[node."old*"]
profile = "xeon-e5-2650x2"
"""
_GIVEN: dict[str, Any] = {
    "cluster": "", "nodes_file": "", "acceptance": None, "layers": "", "split": "planned",
    "ctx": 4096, "length": 0}


def report(pair: str, hosts: tuple[str, ...], link: str, *, head_stage: bool) -> Report:
    """The plan and the speeds of a pair on these hosts. head_stage: whether the first may hold
    layers."""
    with tempfile.TemporaryDirectory() as folder:
        hostfile, more = Path(folder) / "lab", Path(folder) / "profiles.toml"
        hostfile.write_text("".join(f"{name}\n" for name in hosts))
        Path(f"{hostfile}.toml").write_text(_NODES)
        more.write_text(_PROFILES)
        profiles = load_profiles(more)
        own = profiles.pair(pair)
        return dry(own.target, profiles, **_GIVEN, hostfile=str(hostfile), draft=own.draft,
                   link=link, head_stage=head_stage)


def row(pair: str, where: str, found: Report) -> dict[str, Any]:
    """Layers by host, the slowest stage in ms, and tokens per second by policy."""
    plan = found.plan
    layers = {found.machines[plan.candidates[i]].host: stop - start
              for i, start, stop in plan.split.ranges()}
    return {"pair": pair, "where": where, "layers": layers,
            "slowest_ms": round(1e3 * plan.split.slowest, 1),
            **{name: round(speed, 2) for name, speed in found.speeds.items()}}


def main() -> None:
    """Print a JSON object for each pair and each set of hosts."""
    for pair in PAIRS:
        for where, hosts, link in (
                ("three servers", _SERVERS, "gigabit"), ("desktop", _DESK, "shared-memory"),
                ("both", _DESK + _SERVERS, "gigabit")):
            found = report(pair, hosts, link, head_stage=where != "both")
            print(json.dumps(row(pair, where, found)), flush=True)


if __name__ == "__main__":
    main()
