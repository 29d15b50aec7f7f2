"""The generated tables of the documentation, from what declares them.

    python -m benchmarks.tables                    # writes all but models.md
    python -m benchmarks.tables --check            # names the pages that differ, and fails
    python -m benchmarks.tables --architectures    # writes the table in models.md: some minutes

Options and settings are from their declarations, calls and fields from the OpenAPI schema, features
from `pipeinfer.cluster.features`, states from `benchmarks.states`. Architectures are tried, each
with tiny random models. Cut: every cut that is allowed gives the whole file's bits. Slices: what
`slices` says, and that one slice of everything gives these bits is in the tests. Torch and
decomposers: what takes the model. Exact width: of a Q8_0 file of the first model of a row, on this
host, up to 16.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click

from benchmarks import states
from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.pytorch.options import GGUF_FAMILIES
from pipeinfer.cli.options import declared as declared_options
from pipeinfer.cli.options import default_of
from pipeinfer.cluster import features as exclusions
from pipeinfer.config import SECTIONS, Option
from pipeinfer.errors import PipeinferError
from pipeinfer.models.architectures import TABLE, declared
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import LayerKind, layer_kinds, step_of
from pipeinfer.models.shard import SPLITTABLE
from pipeinfer.models.slices import widths_of
from pipeinfer.server import schema_requests
from pipeinfer.server.answers import Answers
from pipeinfer.server.app import Server
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.settings import Settings
from tests.kit.cut_check import cuts_of, differing, load
from tests.kit.random_architectures import ALONE, RECIPES, STATEFUL
from tests.kit.random_model import RandomSpec, tiny, write_random_model

DOCS = Path(__file__).resolve().parents[1] / "docs"
TITLES = {"model": "Models and backends", "cluster": "Ranks and hosts",
          "speculation": "Speculation and scheduling", "sampling": "Sampling",
          "grammar": "Grammar (`generate`)", "request": "Prompt and output (`generate`)",
          "serve": "Server (`serve`)"}


def entries(rows: Iterable[tuple[str, str]]) -> str:
    """Return a Markdown list of names and what they mean."""
    return "\n".join(f"- {name}: {text}" for name, text in rows)


# --- options.md --------------------------------------------------------------------------------


def settings() -> str:
    """Return the list of what `--set` takes."""
    return entries((f"`{name}` ({str(default_of(name)).lower()}; {_values(option)})", option.help)
                   for name, option in declared_options().items() if not option.flags)


def _values(option: Option) -> str:
    return ", ".join(option.choices) or (
        "true, false" if option.kind == "flag" else f"{option.low:g} to {option.high:g}")


def flags() -> str:
    """Return a list of options for each section."""
    return "\n\n".join(
        f"### {TITLES[section]}\n\n" + entries(
            (", ".join(f"`{flag}`" for flag in option.flags), option.help)
            for option in declared_options(section).values() if option.flags)
        for section in SECTIONS)


# --- api.md ------------------------------------------------------------------------------------


@cache
def schema() -> dict[str, Any]:
    """Return the schema that `/openapi.json` has."""
    client = EngineClient(Settings(model="model", name="model"), Metrics())
    return Server(Answers(client)).app.openapi()


def paths() -> str:
    """Return a line for each call; paths with the same one share it."""
    calls: dict[tuple[str, str], list[str]] = {}
    for path, methods in schema()["paths"].items():
        for method, call in methods.items():
            text = " ".join(call["description"].partition("\n\n")[0].split())
            calls.setdefault((method.upper(), f"{text.partition('. ')[0].rstrip('.')}."),
                             []).append(path)
    return entries((f"{method} {', '.join(f'`{path}`' for path in found)}", text)
                   for (method, text), found in calls.items())


def _type(field: dict[str, Any]) -> str:
    """Return a field's type, with its bounds where a client may meet them."""
    if kinds := [kind for kind in field.get("anyOf", ()) if kind.get("type") != "null"]:
        return " or ".join(dict.fromkeys(map(_type, kinds)))
    if values := field.get("enum", [field["const"]] if "const" in field else ()):
        return ", ".join(map(str, values))
    kind: str = "object" if "$ref" in field else field.get("type", "any value")
    if kind == "array":
        kind = f"list ({_type(field.get('items', {}))})"
    elif "maximum" in field and field["maximum"] < 1000:
        kind += f" {field['minimum']:g} to {field['maximum']:g}"
    return kind


def fields() -> str:
    """Return a line for each field of chats and completions."""
    found = schema()["components"]["schemas"]
    chat, completion = (found[name]["properties"] for name in ("ChatRequest", "CompletionRequest"))
    rows = []
    for name in {**chat, **completion}:
        kinds = {where: _type(known[name]) for where, known in
                 (("chat", chat), ("completions", completion)) if name in known}
        kind = next(iter(kinds.values())) if len(set(kinds.values())) == 1 else \
            "; ".join(f"{k}: {v}" for k, v in kinds.items())
        where = "" if len(kinds) == 2 else f" ({next(iter(kinds))})"
        rows.append((f"`{name}`{where}", kind))
    return entries(rows)


def refused() -> str:
    """Return a line for each field that is refused by name."""
    return entries((f"`{name}`", why) for name, why in schema_requests.REFUSED.items())


# --- features.md -------------------------------------------------------------------------------


FEATURES = """\
# Options that exclude one another

{n} features, by the names that messages use. The {pairs} pairs below do not work together; all
others do. This page is generated (`python -m benchmarks.tables`) from
[`cluster/features.py`](../pipeinfer/cluster/features.py), the only place that decides it.

## Refused

Before anything loads, with a message that names what to leave out.

| feature | cannot be combined with |
|---|---|
{refused}

## Left out

pipeinfer chooses these by itself, and leaves them out with any of the others.

| feature | left out with |
|---|---|
{omitted}
"""


def pairs(verdict: str) -> dict[str, list[str]]:
    """Return the second features of all pairs with a verdict, by their first one."""
    found: dict[str, list[str]] = {}
    for one in exclusions.exclusions():
        found.setdefault(one.feature, []).extend(
            other for other in one.others if exclusions.verdict(one.feature, other) == verdict)
    return {name: others for name, others in found.items() if others}


def rows(found: dict[str, list[str]]) -> str:
    """Return the rows of a table in Markdown."""
    return "\n".join(f"| {_code(name)} | {', '.join(map(_code, others))} |"
                     for name, others in found.items())


def features() -> str:
    """Return the whole page."""
    refused, omitted = pairs("refused"), pairs("left out")
    names = {name for table in (refused, omitted) for first, others in table.items()
             for name in (first, *others)}
    count = sum(len(others) for table in (refused, omitted) for others in table.values())
    return FEATURES.format(n=len(names), pairs=count, refused=rows(refused), omitted=rows(omitted))


def _code(name: str) -> str:
    return f"`{name}`" if name.startswith("-") else name


# --- models.md ---------------------------------------------------------------------------------

BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
_HEADER = ("architecture: models", "cut", "slices", "torch", "decomposers with gaps", "exact width")
#: tiny models that need no recipe, and for which models people know them
_PLAIN = {"llama": (("llama", "llama-experts"), "Llama 2, 3, Mistral, Mixtral, SmolLM2, Yi"),
          "qwen2": (("qwen2",), "Qwen2, Qwen2.5"), "qwen3": (("qwen3",), "Qwen3")}
#: architectures of models that are run most; the table has them first
_FIRST = ("qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe", "gemma4", "glm-dsa", "deepseek4",
          "glm5-next", "muse-glimmer", "minimax-m3", "deepseek32", "step35", "mimo2", "hy_v3",
          "mistral4", "llama", "qwen3", "qwen3moe", "gpt-oss", "gemma3", "qwen3next", "qwen2",
          "deepseek2", "glm4moe", "mistral3", "nemotron_h_moe", "minimax-m2", "granitehybrid",
          "lfm2", "lfm2moe", "phi3", "smollm3")


def _rows() -> dict[str, tuple[tuple[str, ...], str]]:
    """Of each architecture that can be cut: names of tiny models, and what people know it by."""
    found = dict(_PLAIN)
    for name, recipe in (RECIPES | STATEFUL | ALONE).items():
        names, models = found.get(recipe.architecture, ((), recipe.models))
        found[recipe.architecture] = (*names, name), models
    rest = (name for name in TABLE if name not in _FIRST and name in SPLITTABLE)
    return {name: found[name] for name in (*_FIRST, *rest)}


ROWS = _rows()


@dataclass(frozen=True, slots=True)
class Row:
    """What was found out; texts as in the table. width: 0 where it was not measured."""

    architecture: str
    cut: str
    slices: str
    torch: str
    gaps: str
    width: int = 0

    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        return (f"`{self.architecture}`: {ROWS[self.architecture][1]}", self.cut, self.slices,
                self.torch, self.gaps, str(self.width or "?"))


def spec_of(name: str, qtype: str) -> RandomSpec:
    """A tiny model under a name in ROWS."""
    if name in RECIPES | STATEFUL | ALONE:
        return tiny(name, qtype=qtype)
    return RandomSpec(name.partition("-")[0], n_embd=256, qtype=qtype,
                      n_expert=4 if name == "llama-experts" else 0)


def study(architecture: str, *, width: bool = True) -> Row:
    """Try the architecture. Raises AssertionError where stages differ from the whole."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        models = [ModelFile(write_random_model(folder / f"{name}.gguf", spec_of(name, "Q8_0")))
                  for name in ROWS[architecture][0]]
        for model in models:
            if wrong := differing(model, cuts_of(model), folder / "cache"):
                raise AssertionError(f"{model.path.name}: {wrong[0]} differs from the whole")
        main = models[0]
        limit = 0
        if width:
            backend = load(main.path, (0, main.n_layers), main.n_layers)
            limit = min(exact_width(backend), backend.exact_limit)
            backend.close()
        torch = "yes" if architecture in GGUF_FAMILIES else "no"
        return Row(architecture, _places(main), _slices(main), torch, _gaps(main), limit)


def _places(model: ModelFile) -> str:
    if (step := step_of(model)) > 1:
        return f"at multiples of {step} layers"
    if {LayerKind.STATE, LayerKind.CACHE} <= set(layer_kinds(model)):
        return "behind layers with attention"
    cut = declared(model.architecture).cut
    if cut.begins:
        return "at layers that choose positions"
    if cut.ends[0]:
        return "behind layers that choose cells"
    return "at layers without a window" if cut.period < 0 else "yes"


def _slices(model: ModelFile) -> str:
    try:
        widths_of(model)
    except PipeinferError as error:
        found = re.search(
            r"(?:not sliced: |: is )(.*?)(?:, which is not sliced)?: run it", str(error))
        return f"no: {found[1] if found else error}"
    return "yes"


def _gaps(model: ModelFile) -> str:
    try:
        GapModel(model)
    except PipeinferError:
        return "no"
    return "yes"


def as_table(rows: Sequence[Row]) -> str:
    """The rows as Markdown; those that differ in their models alone are one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        name, *rest = row.cells()
        alike.setdefault(tuple(rest), []).append(name)
    lines = [_HEADER, tuple("---" for _ in _HEADER),
             *(("; ".join(names), *rest) for rest, names in alike.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table_in(text: str) -> dict[str, tuple[str, ...]]:
    """Architecture -> cells of a row for it alone, of a page that has the table."""
    inner, found = text.partition(BEGIN)[2].partition(END)[0], {}
    for line in inner.splitlines():
        if line.startswith("| `"):
            names, *rest = (cell.strip() for cell in line.strip("|").split(" | "))
            for name in re.split(r"; (?=`)", names):
                found[name.split("`")[1]] = (name, *(cell.strip("| ") for cell in rest))
    return found


# --- pages -------------------------------------------------------------------------------------


def between(text: str, begin: str, end: str, table: str) -> str:
    """Return a page with a table between two marks."""
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "options.md": {"options": flags, "settings": settings},
    "architecture.md": {"runs": states.runs, "phases": states.phases},
    "api.md": {"paths": paths, "fields": fields, "refused": refused}}


def pages() -> dict[Path, str]:
    """Return each page but models.md as its tables make it."""
    found = {DOCS / "features.md": features()}
    for name, tables in TABLES.items():
        text = (DOCS / name).read_text()
        for mark, made in tables.items():
            text = between(text, f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->", made())
        found[DOCS / name] = text
    return found


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail where a page differs.")
@click.option("--architectures", is_flag=True, help="Try every architecture instead.")
@click.option("--only", multiple=True, type=click.Choice([*ROWS]),
              help="With --architectures: these alone.")
def main(check: bool, architectures: bool, only: tuple[str, ...]) -> None:
    """Write the tables, or compare them."""
    if architectures:
        page, rows = DOCS / "models.md", []
        for name in only or ROWS:
            print(name, file=sys.stderr)
            rows.append(study(name))
        page.write_text(between(page.read_text(), BEGIN, END, as_table(rows)))
        return
    differ = {path: text for path, text in pages().items() if path.read_text() != text}
    for path, text in differ.items():
        if check:
            print(f"{path.name} is not what its sources give: run python -m benchmarks.tables",
                  file=sys.stderr)
        else:
            path.write_text(text)
    sys.exit(bool(differ) and check)


if __name__ == "__main__":
    main()
