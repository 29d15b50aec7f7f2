"""benchmarks/records/gpu.toml from the results of checks on a GPU.

Several results are of one day and one kind of card: what a later one found stands for an earlier
one's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "records" / "gpu.toml"
_COMMAND = "bash benchmarks/gpu/run.sh --out FOLDER"
_ROWS = ("1", "2", "3", "4", "5", "6", "8", "9", "12", "16", "32", "64")
#: questions of benchmarks.gpu.bits about unpadded rows, and how the table calls them
_QUESTIONS = {"the same again": "decoded again", "asked whether to stop": "may be stopped",
              "a hole of three cells": "behind a hole of three cells",
              "300 cells of another sequence": "beside 300 other cells",
              "two shards": "cut in two"}


def merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Step -> result, of the last check in which the step was done, or else found something."""
    found: dict[str, Any] = {}
    for wanted in (False, True):
        for result in results:
            for name, step in result["steps"].items():
                if step.get("result") and (step["state"] == "done") == wanted:
                    found[name] = step["result"]
    return found


def records_of(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tables of these results. Raises ValueError for a rehearsal's."""
    if any(result["device"] != "cuda" for result in results):
        raise ValueError("these are results of a rehearsal, whose speeds say nothing of a GPU")
    steps = merged(results)
    records = [record for make in (_speed, _curve, _padded, _unpadded, _jobs, _torch)
               if (record := make(steps)) is not None]
    speeds = [speed for result in results
              if (speed := result["steps"].get("speed", {}).get("result")) is not None]
    if len(speeds) > 1:
        _add_earlier(records[0], speeds[-2])
    return records


def write(results: Sequence[Mapping[str, Any]], commit: str = "") -> Path:
    """Write the records of these results; gives the file. commit: that was measured, by default
    the one that the check saw. Raises ValueError for a rehearsal's."""
    steps = merged(results)
    records = records_of(results)
    facts = steps["facts"]
    gpu, memory, driver, *_ = (part.strip() for part in facts["gpu"].split(","))
    date, commit = results[-1]["date"].split()[0], commit or facts["commit"]
    head = {"order": 5, "title": "GPUs",
            "intro": f"One {gpu} ({memory}, driver {driver}), {facts['cores']} cores, llama.cpp "
                     "of the pinned sources built for it alone. The pair is the embedded one "
                     "inflated: its text and its acceptance, the shape of a 7 B (32 layers of "
                     "4,096, Q8_0, 6.9 B weights) and of a 0.6 B. Vocabulary: 4,096.",
            "processor": f"{gpu}, {facts['processor']}", "command": _COMMAND}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
    for record in records:
        lines += ["", "[[record]]", *(
            f"{name} = {json.dumps(value, ensure_ascii=False)}"
            for name, value in {**record, "date": date, "commit": commit}.items())]
    PATH.write_text("\n".join(lines) + "\n")
    return PATH


def _speed(steps: Mapping[str, Any]) -> dict[str, Any] | None:
    speed = steps.get("speed")
    if speed is None:
        return None
    rows = []
    for name, values in speed["speeds"].items():
        stats = speed["stats"].get(name, {})
        rows.append([name, f"{statistics.median(values):.0f}",
                     f"{min(values):.0f} to {max(values):.0f}" if len(values) > 1 else "",
                     str(stats.get("R", "")), str(stats.get("steps", ""))])
    return {"id": "gpu-speed", "what": "tokens per second of one request, and of prompts where the "
            "row says so", "columns": ["program", "median", "range", "R", "steps of 256 tokens"],
            "rows": rows}


def _add_earlier(record: dict[str, Any], earlier: Mapping[str, Any]) -> None:
    """Put what the check before found into the table of speeds."""
    record["columns"].append("in the check before")
    for row in record["rows"]:
        values = earlier["speeds"].get(row[0], ())
        row.append(f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"
                   if values else "")
    record["notes"] = ("Between the two checks drafts and `--exact off` began to keep flash "
                       "attention on GPUs.")


def _curve(steps: Mapping[str, Any]) -> dict[str, Any] | None:
    curve = steps.get("curve")
    if curve is None:
        return None
    whole = next(one for one in curve if "layers" in one)
    rows = [[f"behind {one['behind']} tokens", *(
        f"{one['seconds'][count] * 1e3:.2f}" for count in _ROWS)]
        for one in curve if "behind" in one]
    layer = whole["one_layer_seconds"] * whole["layers"] / whole["whole_model_seconds"]
    return {"id": "gpu-rows", "what": "milliseconds of a decode of so many rows, all with logits",
            "columns": ["", *_ROWS], "rows": rows,
            "notes": f"A layer that is measured alone takes {layer:.2f} times its share of the "
                     "whole model: launching and waiting count once per layer then."}


def _bits(steps: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """(model and options, answers)."""
    found: list[tuple[str, list[Any]]] = []
    for line in [*steps.get("bits", ()), *steps.get("bits of wide models", ())]:
        if line["what"] == "options":
            kinds = line.get("type_k", "f16"), "off" if line.get("flash_attn") == "off" else "on"
            found.append((f"{line['model'].removesuffix('.gguf')}, {kinds[0]} cache, "
                          f"flash attention {kinds[1]}", []))
        else:
            found[-1][1].append(line)
    return found


def _padded(steps: Mapping[str, Any]) -> dict[str, Any] | None:
    rows = []
    for name, answers in _bits(steps):
        padded = [one for one in answers if one["what"] == "padded"]
        cells = []
        for question in ("neighbours", "chain", "after a miss", "beside another sequence"):
            equal = sum(one[question]["equal"] for one in padded)
            cells.append(f"{equal} of {sum(one[question]['of'] for one in padded)}")
        rows.append([name, *cells])
    return {"id": "gpu-padded", "what": "rows with the bits of a row alone, where every decode has "
            "W rows (2, 4, 8, 16) and the rest is padding, behind 40 and 250 tokens",
            "columns": ["model", "other padding", "a chain", "after a miss",
                        "beside another sequence"],
            "rows": rows} if rows else None


def _unpadded(steps: Mapping[str, Any]) -> dict[str, Any] | None:
    rows = []
    for name, answers in _bits(steps):
        by_name = {one["what"]: one for one in answers}
        rows.append([name, str(by_name["width"]["R"]), *(
            f"{by_name[key]['equal']} of {by_name[key]['of']}" for key in _QUESTIONS)])
    return {"id": "gpu-bits", "what": "unpadded single rows with the bits of a plain loop's",
            "columns": ["model", "R", *_QUESTIONS.values()], "rows": rows} if rows else None


def _jobs(steps: Mapping[str, Any]) -> dict[str, Any] | None:
    jobs = {name: one for name, one in steps.get("jobs", {}).items() if "error" not in one}
    rows = [[name, str(one["R"]), str(one["answers"]), str(one["differ"]), str(one["near_ties"]),
             str(one["accepted"])] for name, one in jobs.items()]
    return {"id": "gpu-lossless", "what": "answers of 64 tokens that differ from a plain loop's on "
            "the same GPU: every policy, greedy and sampled, 4 prompts",
            "columns": ["arrangement", "R", "answers", "differ", "of these near-ties",
                        "guesses accepted"], "rows": rows} if rows else None


def _torch(steps: Mapping[str, Any]) -> dict[str, Any] | None:
    lines = steps.get("torch", [])
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        if line["what"] in ("torch width", "torch speed"):
            block = line.get("block", 0)
            tile = f"{line['tile']}, attention by {block}" if block else f"{line['tile']}"
            rows.setdefault((line["dtype"], tile), {}).update(line)
    return {"id": "gpu-torch", "what": "the torch backend, embedded target: R, tokens per second "
            "of a plain loop, and the time of 8 and 16 rows relative to one",
            "columns": ["type", "tile", "R", "tokens per second", "8 rows", "16 rows"],
            "rows": [[dtype, tile, str(one["R"]), f"{one['tokens_per_second']:.0f}",
                      f"{one['curve']['8']:.2f}", f"{one['curve']['16']:.2f}"]
                     for (dtype, tile), one in rows.items()]} if rows else None
