"""Which options exclude one another. This is the only module that decides that.

A feature is something that a config uses, by the name that messages print. An exclusion that a user
has caused is an error; a feature that pipeinfer chooses by itself is left out instead.
docs/features.md has the table of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from msgspec import Struct

from pipeinfer.config import (
    NO_DRAFT,
    UNQUANTISED,
    Config,
    GrammarConfig,
    JobConfig,
    SpeculationConfig,
)
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import UsageError
from pipeinfer.strategies import registry
from pipeinfer.strategies.resources import class_of

Uses = Callable[[Config], object]

#: features that pipeinfer chooses by itself
TIME_SHARING = "time sharing of one host's cores"
LOOKUP = "prompt lookup without --proposer"
LOOKUP_ALONE = "prompt lookup without --proposer, on one rank"
STATE = "layers with a state"  #: a property of the model
GAPS = "positions with gaps (--decomposer)"  #: properties of a job
HEAD = "a prediction head (--proposer)"


class Exclusion(Struct, frozen=True):
    """One feature, those that exclude it, and the error if a config uses both.

    message: {found} stands for the others that the config uses
    """

    feature: str
    others: tuple[str, ...]
    message: str


#: options that only apply to speculation during the target's runs
_OVERLAPPING = ("--set credit", "--set draft_max", "--set tip", "--ablate", "--set alternatives",
                "--set path_min")
#: options with which speculative tokens need not pay for their rows
_UNWEIGHED = ("--set adapt=false", "--speculation on", "--speculation off", "--set tree_max")


#: features that a config uses if an option has another value than its default
_OPTIONS = {
    "-fa": "flash_attn",
    "-ctk": "cache_type_k", "-ctv": "cache_type_v", "--exact off": "exact",
    "--set like_llama_cpp": "like_llama_cpp", "-t": "threads", "-ngl": "gpu_layers",
    "--set keep_binding": "keep_binding", "--grid": "grid",
    "--slices": "slices", "--layers": "layers", "--draft-ranks": "draft_ranks",
    "--decomposer": "decomposer", "--ablate": "ablate", "--set credit": "credit",
    "--set draft_max": "draft_max", "--set tree_max": "tree_max",
    "--set alternatives": "alternatives", "--set path_min": "path_min", "--set tip": "tip",
    "--set adapt=false": "adapt",
}


@cache
def features() -> Mapping[str, Uses]:
    """Return the test for each feature, by its name."""
    found: dict[str, Uses] = {name: partial(_differs, option) for name, option in _OPTIONS.items()}
    found |= {
        "-md": lambda config: config.job.model.draft_model not in ("", NO_DRAFT),
        "--hook pace": lambda config: any(
            word.startswith("pace=") for word in config.job.cluster.hook),
        "-mm": lambda config: config.job.model.mmproj not in ("", "none"),
        "--numa": lambda config: config.job.model.numa not in ("", "off"),
        "-md none": partial(_equals, "draft_model", NO_DRAFT),
        "-fa off": partial(_equals, "flash_attn", "off"),
        "a quantised -ctv": lambda config: config.job.model.cache_type_v not in (
            "auto", *UNQUANTISED),
        "--grid auto": partial(_equals, "grid", "auto"),
        "--speculation off": partial(_equals, "speculation", "off"),
        "--speculation on": partial(_equals, "speculation", "on"),
        "an adapter (--bita)": lambda config: registry.adapter(config.job.speculation),
        "a grammar": lambda config: config.grammar != GrammarConfig(),
        "repetition penalties": lambda config: SamplingParams(
            **{name: getattr(config.sampling, name) for name in (
                "repeat_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n")}
        ).uses_history,
    }
    found |= {f"--policy {one}": partial(_equals, "policy", str(one)) for one in Policy}
    found |= {f"--decomposer {one}": partial(_equals, "decomposer", one)
              for one in registry.decomposers()}
    return found | {f"--proposer {name}": partial(_proposes, name) for name in registry.proposers()}


def _value(config: Config, option: str) -> Any:
    job = config.job
    return next(getattr(section, option) for section in (job.model, job.cluster, job.speculation)
                if hasattr(section, option))


def _differs(option: str, config: Config) -> bool:
    return bool(_value(config, option) != _value(Config(), option))


def _equals(option: str, value: str, config: Config) -> bool:
    return bool(_value(config, option) == value)


def _proposes(name: str, config: Config) -> bool:
    return name in [spec.name for spec in registry.named(config.job.speculation)]


@cache
def exclusions() -> tuple[Exclusion, ...]:
    """Return all exclusions, in the order in which they are checked."""
    proposers, methods = registry.proposers().values(), registry.decomposers().values()
    policies = tuple(f"--policy {policy}" for policy in Policy)
    speculating = tuple(name for name in policies if name != f"--policy {Policy.ITERATIVE}")
    inline = tuple(f"--proposer {one.name}" for one in proposers if one.inline is not None)
    apart = "{feature} and {found} contradict each other: leave one out"
    found = [
        Exclusion("-fa off", ("a quantised -ctv",),
                  "-ctv: quantised values need flash attention: leave out -fa off"),
        Exclusion("--set like_llama_cpp", ("-ctk", "-ctv", "-fa", "--exact off"),
                  "{feature} decides cache types and flash attention itself: leave out {found}"),
        Exclusion("--speculation off", speculating, apart),
        *_of_heads(),
        Exclusion("-mm", ("--decomposer",),
                  "{feature} and {found}: threads of an answer cannot share pictures: leave one "
                  "out"),
        Exclusion("--grid auto", ("--slices", "--layers"),
                  "{feature} chooses slices and layers itself: leave out {found}, or name the "
                  "grid"),
        Exclusion("an adapter (--bita)", ("--grid", "--slices"),
                  "{feature} needs stages of whole layers: leave out {found}"),
        Exclusion(f"--policy {Policy.PUBLISHED}", inline,
                  "{feature} issues speculative tokens of a draft alone, so it cannot be "
                  "combined with {found}: leave one out"),
        *(Exclusion(f"--decomposer {one.name}", ("a grammar",), "{feature} cannot be combined with "
                    "a grammar: the grammar would have to describe the threads")
          for one in methods if one.make is not None),
        *(Exclusion(f"--decomposer {one.name}", ("repetition penalties",), "{feature} cannot be "
                    "combined with repetition penalties: threads run ahead of each other, so it is "
                    "not defined what a token repeats") for one in methods if not one.penalties),
        _of_states(inline),
        Exclusion(TIME_SHARING, (
            "-t", "--numa", "-ngl", "--set keep_binding", "--hook pace", "--grid", "--slices",
            "--draft-ranks", "--decomposer", "an adapter (--bita)",
            f"--policy {Policy.PUBLISHED}", *_OVERLAPPING, *inline), ""),
        Exclusion(LOOKUP, (
            *(f"--proposer {one.name}" for one in proposers), "--speculation off",
            "-md none", f"--policy {Policy.ITERATIVE}",
            f"--policy {Policy.PUBLISHED}"), ""),
        Exclusion(LOOKUP_ALONE, (f"--policy {Policy.SPECULATIVE}", *_UNWEIGHED, *_OVERLAPPING), ""),
    ]
    return tuple(found)


def _of_heads() -> list[Exclusion]:
    heads = [one.name for one in registry.proposers().values()
             if (kind := class_of(one)) and kind.reads_rows]
    return [
        Exclusion(GAPS, (HEAD,), "stages that allow {feature} give no rows to {found}: leave one "
                  "out"),
        *(Exclusion(f"--proposer {one}", tuple(f"--proposer {other}" for other in heads[k + 1:]),
                    "{feature} and {found}: a job uses one prediction head: leave one out")
          for k, one in enumerate(heads[:-1]))]


def _of_states(inline: tuple[str, ...]) -> Exclusion:
    """Return what layers with a state exclude. inline: proposers that add rows to runs."""
    return Exclusion(STATE, (
        f"--policy {Policy.PUBLISHED}", *inline, "--decomposer",
        "an adapter (--bita)"), "leave out {found}")


def used(names: Sequence[str], config: Config) -> list[str]:
    """Return which of these features a config uses."""
    return [name for name in names if name in features() and features()[name](config)]


def excluding(feature: str, job: JobConfig) -> list[str]:
    """Return what a config uses that excludes a feature."""
    return [name for one in exclusions() if one.feature == feature
            for name in used(one.others, Config(job=job))]


def check(config: Config) -> None:
    """Raise UsageError, with what to leave out, if options of a config exclude one another."""
    for one in exclusions():
        if used([one.feature], config) and (found := used(one.others, config)):
            raise UsageError(one.message.format(feature=one.feature, found=" and ".join(found)))


def check_found(found: Mapping[str, bool], job: JobConfig) -> None:
    """Raise UsageError if properties that a job was found to have exclude one another, or an
    option of its config. found: whether it has each property."""
    for one in exclusions():
        if found.get(one.feature) and (others := [
                *(name for name in one.others if found.get(name)),
                *used(one.others, Config(job=job))]):
            raise UsageError(one.message.format(feature=one.feature, found=" and ".join(others)))


def _of(config: SpeculationConfig) -> Config:
    return Config(job=JobConfig(speculation=config))


def overlaps(config: SpeculationConfig) -> bool:
    """Return whether an option applies only to speculation during the target's runs."""
    return bool(used(_OVERLAPPING, _of(config)))


def weighs(config: SpeculationConfig) -> bool:
    """Return whether speculative tokens have to pay for their rows where draft and target take
    turns."""
    return not used(_UNWEIGHED, _of(config))


def verdict(first: str, second: str) -> str:
    """Return what becomes of two features: "refused", "left out" (of one that pipeinfer would
    choose), or "" if they work together."""
    for one in exclusions():
        if {first, second} <= {one.feature, *one.others} and one.feature in (first, second):
            return "refused" if one.message else "left out"
    return ""
