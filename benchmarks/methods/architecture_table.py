"""The table of architectures in docs/models.md, found out by trying each with a tiny random model.

    python -m benchmarks.methods.architecture_table               # prints it
    python -m benchmarks.methods.architecture_table --write docs/models.md

Cut: every cut that is allowed gives the whole file's bits. Slices: what `slices` says, and that one
slice of everything gives these bits is in the tests. Torch and decomposers: what takes the model.
Exact width: of a Q8_0 file of the first model of a row, on this host, up to 16. Knows no ranks.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.methods.settings_table import between
from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.pytorch.options import GGUF_FAMILIES
from pipeinfer.errors import PipeinferError
from pipeinfer.lab.random_architectures import ALONE, RECIPES, STATEFUL
from pipeinfer.lab.random_model import RandomSpec, tiny, write_random_model
from pipeinfer.models.architectures import TABLE, declared
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import LayerKind, layer_kinds, step_of
from pipeinfer.models.shard import SPLITTABLE
from pipeinfer.models.slices import widths_of
from tests.rig.cut_check import cuts_of, differing, load

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


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods.architecture_table")
    parser.add_argument("names", nargs="*", choices=[[], *ROWS], help="some of them alone")
    parser.add_argument("--write", type=Path, help="page to put the table into")
    given = parser.parse_args(arguments)
    rows = []
    for name in given.names or ROWS:
        print(name, file=sys.stderr)
        rows.append(study(name))
    table = as_table(rows)
    if given.write is None:
        print(table)
        return
    given.write.write_text(between(given.write.read_text(), BEGIN, END, table))


if __name__ == "__main__":
    main(sys.argv[1:])
