"""Machines, links, models and clusters by name: what the emulation and `plan --dry-run` count with.

A decode of `rows` rows over `weight_bytes` of weights takes

    overhead + max(moved bytes / bandwidth, weight_bytes / first * shape[rows])

the roofline: the larger of moving the weights once and of doing every row's arithmetic. `shape` is
the measured time of so many rows relative to one, never less than that of fewer; beyond the last
one that was measured, and on GPUs from the second row on, each row adds weight_bytes / rate. On a
processor the first row is the dearest: it fetches and unpacks what further rows find in the cache.
In a context of its own (`Experiment.context`) a row's attention is added: two products of a query
head's size per head and cached token, at the kernels' measured rate, or the reading of the cache,
whichever takes longer; on GPUs the reading alone. A node's bandwidth is its data sheet's times a
stated share; its rates are

    processors   bytes per cycle and core (`kernels`, measured) * clock * cores * efficiency
    GPUs         integer operations per second * share / 2 per weight * bits of a weight / 8

`profiles.toml` beside this module holds the figures with their sources; a further file may add or
override entries. See docs/emulation.md for how they came about. This module knows no scheduler and
measures nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pipeinfer.emulation.sizes import BASE, Shape, quantised
from pipeinfer.errors import UsageError
from pipeinfer.files import read_toml

T = TypeVar("T")

_FURTHER_ROW = 0.5  #: time of a further row's attention, relative to the first's (measured)
BUILT_IN = Path(__file__).with_name("profiles.toml")


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """A machine. memory: bytes; bandwidth: bytes/s sustained; overhead: s per decode.

    rates[quantisation]: bytes of weights per second that its arithmetic gets through for one row
    beyond the first; first[quantisation]: for the first one (missing: the same).
    shapes[quantisation]: arithmetic of runs of 1, 2, ... rows relative to one, as far as measured.
    attention: products per second of a row with cached keys and values; 0: memory bounds it.
    numa_nodes: parts of the machine, each with as much of its memory and a rank of its own.
    """

    name: str
    title: str
    cores: int
    memory: int
    bandwidth: float
    rates: Mapping[str, float]
    overhead: float
    source: str
    first: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    attention: float = 0.0
    numa_nodes: int = 1

    def attention_seconds(self, products: float, n_bytes: float) -> float:
        """Time of rows' attention. n_bytes: of keys and values, which rows of a run read once."""
        arithmetic = products / self.attention if self.attention else 0.0
        return max(n_bytes / self.bandwidth, arithmetic)

    def seconds(
        self, weight_bytes: float, quantisation: str, rows: int, moved_bytes: float | None = None
    ) -> float:
        """Time of a decode of `rows` rows, each of which uses `weight_bytes`.

        moved_bytes: what the run reads from memory where that differs (a mixture of experts).
        Raises UsageError when the node has no rate for `quantisation`.
        """
        rate = self.rates.get(quantisation)
        if rate is None:
            raise UsageError(f"node profile {self.name} has no rate for {quantisation}"
                             f"{_near(quantisation, self.rates)}")
        moved = weight_bytes if moved_bytes is None else moved_bytes
        shape = self.shapes.get(quantisation, (1.0,))
        measured = min(rows, len(shape))
        arithmetic = weight_bytes / self.first.get(quantisation, rate) * shape[measured - 1]
        arithmetic += (rows - measured) * weight_bytes / rate
        return self.overhead + max(moved / self.bandwidth, arithmetic)


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A link between neighbours. latency: s one way; bandwidth: bytes/s."""

    name: str
    title: str
    latency: float
    bandwidth: float
    source: str


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model file's sizes in bytes; layers on average.

    expert_bytes: the part of `layer_bytes` that belongs to experts; a row uses `experts_used` of
    `experts` of them (dense: 0, 1, 1). kv_bytes_per_token: all layers, f16. attention_bytes,
    keys_bytes: parts of `layer_bytes`, see `Sizes`.
    """

    name: str
    title: str
    n_layers: int
    n_embd: int
    n_vocab: int
    quantisation: str
    layer_bytes: int
    embedding_bytes: int
    output_bytes: int
    kv_bytes_per_token: int
    source: str
    expert_bytes: int = 0
    experts: int = 1
    experts_used: int = 1
    attention_bytes: int = 0
    keys_bytes: int = 0
    shape: Shape | None = None

    @property
    def total_bytes(self) -> int:
        """All weights: about the size of the file."""
        return self.n_layers * self.layer_bytes + self.embedding_bytes + self.output_bytes

    @property
    def active_layer_bytes(self) -> float:
        """Weights of a layer that one row uses."""
        idle = 1 - self.experts_used / self.experts
        return self.layer_bytes - self.expert_bytes * idle

    def moved_layer_bytes(self, rows: int) -> float:
        """Weights of a layer that a run of `rows` rows reads.

        Each row chooses its experts as if at random: an expert stays untouched with probability
        (1 - used / all) ** rows.
        """
        untouched = (1 - self.experts_used / self.experts) ** rows
        return self.layer_bytes - self.expert_bytes * untouched

    def attention_of(self, cells: int, longest: int) -> tuple[float, float]:
        """Products and bytes of a layer's attention: cells that the rows of a run see, summed, and
        those that the longest one sees (keys and values in 16 bits). Of the other rows' products
        `_FURTHER_ROW` counts."""
        heads = 0 if self.shape is None else self.shape.n_head * self.shape.head
        seen = longest + _FURTHER_ROW * (cells - longest)
        return 2.0 * heads * seen, longest * self.kv_bytes_per_token / self.n_layers

    def stage_seconds(self, node: NodeProfile, n_layers: int, rows: int, *, last: bool = False
                      ) -> float:
        """Time of `rows` rows through `n_layers` layers on `node`, with the output head if last."""
        head = self.output_bytes if last else 0
        return node.seconds(
            n_layers * self.active_layer_bytes + head, self.quantisation, rows,
            n_layers * self.moved_layer_bytes(rows) + head)


@dataclass(frozen=True, slots=True)
class PairProfile:
    """A target with its draft. acceptance: as published, the share of drafted tokens that are
    accepted by synchronous trees of 4 with the cutoff 0.1; assumed: whether the paper does not say
    it; positions: the `SyntheticPair.acceptance` with which that baseline has it here, 0 where it
    was not fitted; by_depth: see `SyntheticPair`."""

    name: str
    title: str
    target: str
    draft: str
    acceptance: float
    paper: str
    assumed: bool = False
    by_depth: tuple[float, ...] = ()
    positions: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """Node profiles in the order of their ranks, joined by one kind of link."""

    name: str
    title: str
    nodes: tuple[str, ...]
    link: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Profiles:
    """All profiles of nodes, models, links, pairs and clusters, by name."""

    nodes: Mapping[str, NodeProfile]
    models: Mapping[str, ModelProfile]
    links: Mapping[str, LinkProfile]
    pairs: Mapping[str, PairProfile]
    clusters: Mapping[str, ClusterProfile]

    def node(self, name: str) -> NodeProfile:
        """The profile, or UsageError with what is near."""
        return lookup(self.nodes, name, "node profile")

    def model(self, name: str) -> ModelProfile:
        """The profile, or UsageError with what is near."""
        return lookup(self.models, name, "model profile")

    def link(self, name: str) -> LinkProfile:
        """The profile, or UsageError with what is near."""
        return lookup(self.links, name, "link profile")

    def pair(self, name: str) -> PairProfile:
        """The profile, or UsageError with what is near."""
        return lookup(self.pairs, name, "pair")

    def cluster(self, name: str) -> ClusterProfile:
        """The profile, or UsageError with what is near."""
        return lookup(self.clusters, name, "cluster profile")


def lookup(table: Mapping[str, T], name: str, what: str, where: str = "") -> T:
    """`table[name]`, or UsageError that names what is near."""
    if name not in table:
        raise UsageError(f"{where}there is no {what} {name!r}{_near(name, table)}")
    return table[name]


def load_profiles(path: Path | None = None) -> Profiles:
    """The built-in profiles, with the entries of `path` added or in their place.

    An entry of `path` for a name that exists changes only the keys that it has. Raises UsageError.
    """
    tables = _read(BUILT_IN)
    if path is not None:
        for section, entries in _read(path).items():
            for name, entry in entries.items():
                known = tables[section].get(name, {})
                tables[section][name] = {**known, **entry}
    origin = f"{path}: " if path is not None else ""
    kernels = tables["kernels"]
    for name, entry in kernels.items():
        _need(origin, "kernels", name, entry)
    nodes = {n: _node(origin, n, e, kernels) for n, e in tables["nodes"].items()}
    links = {n: _link(n, e) for n, e in tables["links"].items()}
    models = {n: _model(origin, n, e) for n, e in tables["models"].items()}
    pairs, clusters = {}, {}
    for name, entry in tables["pairs"].items():
        _need(origin, "pairs", name, entry)
        if max(entry["acceptance"], entry.get("positions", 0)) > 1:
            raise UsageError(f"{origin}[pairs.{name}] acceptance must be a share from 0 to 1")
        for key in ("target", "draft"):
            lookup(models, entry[key], "model profile", f"{origin}pair {name}: ")
        pairs[name] = PairProfile(name=name, **{
            **entry, "by_depth": tuple(entry.get("by_depth", ()))})
    for name, entry in tables["clusters"].items():
        clusters[name] = _cluster(origin, name, entry, nodes, links)
    return Profiles(*map(MappingProxyType, (nodes, models, links, pairs, clusters)))  # type: ignore[arg-type]


# --- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """Keys of a section's entries and their kinds; * marks those that must be there."""

    keys: Mapping[str, type | tuple[type, ...]]
    needed: Collection[str] = field(default=())


_NUMBER = (int, float)
_MOST = 1e15  #: of any unit
_MOST_SIZE = 1 << 20  #: layers, heads, elements of a model
_COUNT_DIGITS = 4  #: of how many nodes of a kind
_SECTIONS = {
    "kernels": _Entry({"first": dict, "further": dict, "milliseconds": dict, "source": str,
                       "attention": _NUMBER}, ("first", "further")),
    "nodes": _Entry({
        "title": str, "source": str, "cores": int, "memory_gib": _NUMBER,
        "bandwidth_gbs": _NUMBER, "sustained": _NUMBER, "clock_ghz": _NUMBER, "kernels": str,
        "efficiency": _NUMBER, "tera_ops": _NUMBER, "share": _NUMBER, "overhead_us": _NUMBER,
        "rates_gbs": dict, "numa_nodes": int,
    }, ("memory_gib", "bandwidth_gbs")),
    "links": _Entry({"title": str, "source": str, "latency_us": _NUMBER,
                     "bandwidth_mbs": _NUMBER}, ("latency_us", "bandwidth_mbs")),
    "models": _Entry({
        "title": str, "source": str, "quantisation": str,
        **{f.name: str if f.name == "architecture" else int for f in dataclasses.fields(Shape)},
    }, ("quantisation", "architecture", "n_layers", "n_embd", "n_ff", "n_head", "n_head_kv",
        "n_vocab")),
    "pairs": _Entry({"title": str, "target": str, "draft": str, "acceptance": _NUMBER,
                     "paper": str, "assumed": bool, "by_depth": list, "positions": _NUMBER},
                    ("title", "target", "draft", "acceptance", "paper")),
    "clusters": _Entry({"title": str, "nodes": list, "link": str, "source": str},
                       ("nodes", "link")),
}
#: bits of a weight in a mix, scales included: the mean over a 7B model's file
_MIX_BITS = {"F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.56, "Q5_K_M": 5.68, "Q4_K_M": 4.85,
             "Q3_K_M": 3.91, "Q3_K_S": 3.5, "Q2_K": 3.0, "Q2_K_2023": 3.35}


def _read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Section -> name -> entry, every key checked. Raises UsageError."""
    data = read_toml(path, "profiles")
    for section, entries in data.items():
        known = lookup(_SECTIONS, section, "section", f"{path}: ")
        if not isinstance(entries, dict):
            raise UsageError(f"{path}: [{section}] needs tables: write [{section}.NAME]")
        for name, entry in entries.items():
            if not isinstance(entry, dict) or not name.isprintable():
                raise UsageError(f"{path}: {section}.{name!r} is not a table: write "
                                 f"[{section}.NAME]")
            for key, value in entry.items():
                kind = lookup(known.keys, key, "key", f"{path}: [{section}.{name}] ")
                if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                    raise UsageError(f"{path}: [{section}.{name}] {key} cannot be {value!r}")
                if isinstance(value, int | float) and not 0 <= value <= _MOST:
                    raise UsageError(f"{path}: [{section}.{name}] {key} must be a finite number of "
                                     "at least 0")
                if isinstance(value, dict):
                    where = f"{path}: [{section}.{name}] {key}"
                    (_check_times if key == "milliseconds" else _check_rates)(where, value)
    return {section: data.get(section, {}) for section in _SECTIONS}


def _check_rates(where: str, rates: Mapping[str, Any]) -> None:
    for mix, rate in rates.items():
        lookup(BASE, mix, "quantisation", f"{where}: ")
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= _MOST:
            raise UsageError(f"{where}.{mix} cannot be {repr(rate)[:80]}")


def _check_times(where: str, times: Mapping[str, Any]) -> None:
    for mix, values in times.items():
        lookup(BASE, mix, "quantisation", f"{where}: ")
        if not isinstance(values, list) or not values or not all(
                isinstance(ms, int | float) and not isinstance(ms, bool) and 0 < ms <= _MOST
                for ms in values):
            raise UsageError(f"{where}.{mix} cannot be {repr(values)[:80]}: give the milliseconds "
                             "of runs of 1, 2, 3 ... rows")


def _need(origin: str, section: str, name: str, entry: Mapping[str, Any]) -> None:
    if missing := [key for key in _SECTIONS[section].needed if key not in entry]:
        raise UsageError(f"{origin}[{section}.{name}] lacks {', '.join(missing)}: add it")


def _node(
    origin: str, name: str, entry: Mapping[str, Any], kernels: Mapping[str, Mapping[str, Any]]
) -> NodeProfile:
    _need(origin, "nodes", name, entry)
    rates: dict[str, float] = {}
    first: dict[str, float] = {}
    shapes: dict[str, tuple[float, ...]] = {}
    attention = 0.0
    if "kernels" in entry:
        measured = lookup(kernels, entry["kernels"], "kernels", f"{origin}[nodes.{name}] ")
        cycles = (entry.get("clock_ghz", 0) * 1e9 * entry.get("cores", 0)
                  * entry.get("efficiency", 1.0))
        rates = {k: v * cycles for k, v in measured["further"].items()}
        first = {k: v * cycles for k, v in measured["first"].items()}
        attention = measured.get("attention", 0.0) * cycles
        shapes = {k: tuple(time / v[0] for time in itertools.accumulate(v, max))
                  for k, v in measured.get("milliseconds", {}).items()}
    elif "tera_ops" in entry:
        weights = entry["tera_ops"] * 1e12 * entry.get("share", 1.0) / 2
        rates = {mix: weights * bits / 8 for mix, bits in _MIX_BITS.items()}
    for mix, rate in entry.get("rates_gbs", {}).items():
        rates[mix] = rate * 1e9
        first.pop(mix, None)
        shapes.pop(mix, None)
    bandwidth = entry["bandwidth_gbs"] * 1e9 * entry.get("sustained", 1.0)
    if not rates or bandwidth <= 0 or min(*rates.values(), *first.values(), 1) <= 0:
        raise UsageError(f"{origin}[nodes.{name}] needs a bandwidth and rates above zero: give "
                         "kernels with clock_ghz and cores, tera_ops, or rates_gbs")
    return NodeProfile(
        name, entry.get("title", name), entry.get("cores", 1), round(entry["memory_gib"] * 2**30),
        bandwidth, MappingProxyType(rates), entry.get("overhead_us", 0.0) * 1e-6,
        entry.get("source", ""), MappingProxyType(first), MappingProxyType(shapes), attention,
        entry.get("numa_nodes", 1))


def _link(name: str, entry: Mapping[str, Any]) -> LinkProfile:
    _need("", "links", name, entry)
    if entry["bandwidth_mbs"] <= 0:
        raise UsageError(f"[links.{name}] needs a bandwidth above zero")
    return LinkProfile(name, entry.get("title", name), entry["latency_us"] * 1e-6,
                       entry["bandwidth_mbs"] * 1e6, entry.get("source", ""))


def _model(origin: str, name: str, entry: Mapping[str, Any]) -> ModelProfile:
    _need(origin, "models", name, entry)
    where = f"{origin}[models.{name}] "
    mix = entry["quantisation"]
    lookup(BASE, mix, "quantisation", where)
    lookup({"llama": 1, "falcon": 1, "qwen2": 1}, entry["architecture"], "architecture", where)
    names = {f.name for f in dataclasses.fields(Shape)}
    shape = Shape(**{k: v for k, v in entry.items() if k in names})
    sizes_given = (shape.n_layers, shape.n_embd, shape.n_head, shape.n_head_kv)
    if min(sizes_given) < 1 or max(sizes_given) > _MOST_SIZE or (
            shape.n_expert and not 0 < shape.n_expert_used <= shape.n_expert):
        raise UsageError(f"{where}has impossible sizes: check its layers, widths and parameters")
    sizes = quantised(shape, mix)
    return ModelProfile(
        name, entry.get("title", name), shape.n_layers, shape.n_embd, shape.n_vocab, mix,
        sizes.layer_bytes, sizes.embedding_bytes, sizes.output_bytes, sizes.kv_bytes_per_token,
        entry.get("source", ""), sizes.expert_bytes, shape.n_expert or 1,
        shape.n_expert_used or 1, sizes.attention_bytes, sizes.keys_bytes, shape)


def _cluster(
    origin: str, name: str, entry: Mapping[str, Any], nodes: Mapping[str, NodeProfile],
    links: Mapping[str, LinkProfile],
) -> ClusterProfile:
    """A cluster; nodes are names or "8 x name"."""
    _need(origin, "clusters", name, entry)
    where = f"{origin}[clusters.{name}] "
    expanded: list[str] = []
    for item in entry["nodes"]:
        count, times, single = str(item).partition(" x ")
        if times and not (count.isdecimal() and len(count) <= _COUNT_DIGITS):
            raise UsageError(f'{where}nodes: {item!r} is neither a name nor "8 x name"')
        lookup(nodes, single or count, "node profile", where)
        expanded += [single] * int(count) if times else [count]
    lookup(links, entry["link"], "link profile", where)
    return ClusterProfile(name, entry.get("title", name), tuple(expanded), entry["link"],
                          entry.get("source", ""))


def _near(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
