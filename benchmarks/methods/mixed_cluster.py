"""What a desktop with a GPU and three old servers plan and gain together, and each alone.

    python -m benchmarks.methods.mixed_cluster [--raw FILE]

Emulated, from profiles and in virtual time, as `pipeinfer plan --dry-run` is. The desktop has two
ranks: rank 0 with the draft on its processor, and one on its GPU. Alone, its processor holds what
the GPU has no memory for, as a stage of its own. Of the servers alone, one is rank 0 and a stage.
That the draft takes time from layers on the same processor is left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import raw_files
from pipeinfer.lab.emulation.profiles import load_profiles
from pipeinfer.lab.forecast import Report, dry

PAIRS = ("dolphin-tinyllama", "yi-9b")
TITLES = {"dolphin-tinyllama": "Dolphin 70B + TinyLlama, 79 % accepted",
          "yi-9b": "Yi 34B + Yi 9B, 70 % (assumed)"}
HOSTS = {"three servers": "the servers", "desktop": "the desktop", "both": "all"}
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
            "slowest_ms": 1e3 * plan.split.slowest, **found.speeds}


def rows_of(raw: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`emulated-desktop`."""
    rows: list[list[str]] = []
    for one in raw:
        title = TITLES[one["pair"]]
        rows.append(["" if any(row[0] == title for row in rows) else title,
                     HOSTS[one["where"]], _layers(one), f"{one['slowest_ms']:.0f}",
                     f"{one['iterative']:.1f}", f"{one['pipeinfer']:.1f}"])
    return rows


def _layers(one: Mapping[str, Any]) -> str:
    """Who holds how many layers."""
    counts: dict[str, int] = one["layers"]
    servers = ", ".join(str(counts[name]) for name in _SERVERS if name in counts)
    if one["where"] == "three servers":
        return servers
    own = {"processor": counts.get("desk"), "GPU": counts.get("card")}
    whose = "the" if one["where"] == "both" else "its"
    parts = [f"{count} on {whose} {name}" for name, count in own.items() if count]
    if one["where"] == "both":
        parts.append(f"{servers} on the servers" if servers else "servers left out")
    return ", ".join(parts)


def main() -> None:
    """Print a JSON object for each pair and each set of hosts."""
    parser = argparse.ArgumentParser(description="a desktop with a GPU and three old servers")
    parser.add_argument("--raw", type=Path, help="keep the objects as a list")
    given, rows = parser.parse_args(), []
    for pair in PAIRS:
        for where, hosts, link in (
                ("three servers", _SERVERS, "gigabit"), ("desktop", _DESK, "shared-memory"),
                ("both", _DESK + _SERVERS, "gigabit")):
            found = report(pair, hosts, link, head_stage=where != "both")
            rows.append(row(pair, where, found))
            print(json.dumps({
                name: round(cell, 1 if name == "slowest_ms" else 2)
                if isinstance(cell, float) else cell for name, cell in rows[-1].items()}),
                flush=True)
    if given.raw:
        raw_files.write(given.raw, rows)


if __name__ == "__main__":
    main()
