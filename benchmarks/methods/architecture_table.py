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
from pipeinfer.models.architectures import declared
from pipeinfer.models.cuts import step_of
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import LayerKind, layer_kinds
from pipeinfer.models.slices import widths_of
from tests.rig.cut_check import cuts_of, differing, load

BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
_HEADER = ("architecture: models", "cut", "slices", "torch", "decomposers with gaps", "exact width")
#: of each architecture: what to try, and for which models people know it; those run most are first
ROWS: dict[str, tuple[tuple[str, ...], str]] = {
    "qwen35": (("qwen35", "qwen35-tied"), "Qwen3.5 to 3.8: dense"),
    "qwen35moe": (("qwen35moe",), "Qwen3.5 to 3.8: mixtures"),
    "qwen3vl": (("qwen3vl",), "Qwen3-VL (text)"),
    "qwen3vlmoe": (("qwen3vlmoe",), "Qwen3-VL mixtures (text)"),
    "gemma4": (("gemma4", "gemma4-dense", "gemma4-small"), "Gemma 4; E2B, E4B without slices"),
    "glm-dsa": (("glm-dsa",), "GLM-5, 5.1, 5.2"),
    "deepseek4": (("deepseek4",), "DeepSeek-V4 Flash"),
    "glm5-next": (("glm5-next",), "GLM-5.3-Flash, one request at a time"),
    "muse-glimmer": (("muse-glimmer",), "Muse Glimmer 30B"),
    "minimax-m3": (("minimax-m3",), "MiniMax-M3, one request at a time"),
    "deepseek32": (("deepseek32",), "DeepSeek-V3.2"),
    "step35": (("step35",), "Step 3.5"),
    "mimo2": (("mimo2",), "MiMo-V2"),
    "hy_v3": (("hy_v3",), "Hunyuan 3"),
    "mistral4": (("mistral4",), "Mistral Small 4"),
    "llama": (("llama", "llama-experts"), "Llama 2, 3, Mistral, Mixtral, SmolLM2, Yi"),
    "qwen3": (("qwen3",), "Qwen3"),
    "qwen3moe": (("qwen3moe",), "Qwen3-30B-A3B, Qwen3-235B-A22B"),
    "gpt-oss": (("gpt-oss",), "gpt-oss-20b, gpt-oss-120b"),
    "gemma3": (("gemma3", "gemma3-no-window"), "Gemma 3"),
    "qwen3next": (("qwen3next",), "Qwen3-Next-80B-A3B"),
    "qwen2": (("qwen2",), "Qwen2, Qwen2.5"),
    "deepseek2": (("deepseek2", "deepseek2-lite"), "DeepSeek-V2, V3, R1, Kimi K2"),
    "glm4moe": (("glm4moe",), "GLM-4.5, 4.6, Air"),
    "mistral3": (("mistral3",), "Ministral 3"),
    "nemotron_h_moe": (("nemotron_h_moe",), "Nemotron 3 Nano"),
    "minimax-m2": (("minimax-m2",), "MiniMax-M2"),
    "granitehybrid": (("granitehybrid",), "Granite 4 H: dense"),
    "lfm2": (("lfm2",), "LFM2: dense"),
    "lfm2moe": (("lfm2moe",), "LFM2: mixtures"),
    "phi3": (("phi3",), "Phi-3, Phi-3.5-mini, Phi-4"),
    "smollm3": (("smollm3",), "SmolLM3"),
    "kimi-linear": (("kimi-linear",), "Kimi Linear"),
    "qwen2moe": (("qwen2moe",), "Qwen1.5-MoE, Qwen2-57B-A14B"),
    "gemma2": (("gemma2",), "Gemma 2"),
    "glm4": (("glm4",), "GLM-4"),
    "falcon": (("falcon", "falcon-7b"), "Falcon"),
    "granite": (("granite",), "Granite 3"),
    "granitemoe": (("granitemoe",), "Granite 3: mixtures"),
    "olmo2": (("olmo2", "olmo2-window"), "OLMo 2, OLMo 3"),
    "cohere2": (("cohere2",), "Command R7B, Command A"),
    "llama4": (("llama4",), "Llama 4 Scout, Maverick"),
    "minicpm": (("minicpm", "minicpm-old"), "MiniCPM"),
    "exaone4": (("exaone4",), "EXAONE 4.0 1.2B"),
    "seed_oss": (("seed_oss",), "Seed-OSS-36B"),
    "hunyuan-dense": (("hunyuan-dense",), "Hunyuan"),
    "hunyuan-moe": (("hunyuan-moe",), "Hunyuan-A13B"),
    "ernie4_5": (("ernie4_5",), "ERNIE 4.5 0.3B"),
    "ernie4_5-moe": (("ernie4_5-moe",), "ERNIE 4.5 21B-A3B, 300B-A47B"),
    "dots1": (("dots1",), "dots.llm1"),
    "bailingmoe2": (("bailingmoe2",), "Ling 2.0, Ring 2.0"),
    "olmoe": (("olmoe",), "OLMoE"),
    "arctic": (("arctic",), "Snowflake Arctic"),
    "hunyuan_vl": (("hunyuan_vl",), "Hunyuan VL (text)"),
    "exaone-moe": (("exaone-moe",), "K-EXAONE"),
    "cohere2moe": (("cohere2moe",), "Command mixtures"),
    "grovemoe": (("grovemoe",), "GroveMoE"),
    "spark2_5": (("spark2_5",), "Spark 2.5"),
    "granite_swa": (("granite_swa",), "Granite with windows"),
    "gemma": (("gemma",), "Gemma 1"),
    "internlm2": (("internlm2",), "InternLM2, 2.5"),
    "command-r": (("command-r",), "Command R, R+"),
    "stablelm": (("stablelm",), "StableLM"),
    "starcoder2": (("starcoder2",), "StarCoder2"),
    "nemotron": (("nemotron",), "Nemotron-4, Minitron"),
    "arcee": (("arcee",), "Arcee AFM-4.5B"),
    "k2-horizon": (("k2-horizon",), "K2 Horizon"),
    "nanbeige": (("nanbeige",), "Nanbeige"),
    "apertus": (("apertus",), "Apertus"),
    "laguna": (("laguna",), "Laguna"),
    "mellum": (("mellum",), "Mellum 2"),
    "phimoe": (("phimoe",), "Phi-3.5-MoE"),
    "phi2": (("phi2",), "Phi-1, 1.5, 2"),
    "afmoe": (("afmoe",), "Arcee Trinity"),
    "smallthinker": (("smallthinker",), "SmallThinker"),
    "nemotron_h": (("nemotron_h",), "Nemotron-H, Nemotron Nano 2"),
    "jamba": (("jamba",), "Jamba"),
    "falcon-h1": (("falcon-h1",), "Falcon-H1"),
    "mamba": (("mamba",), "Mamba"),
    "mamba2": (("mamba2",), "Mamba 2, Codestral Mamba"),
}


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
