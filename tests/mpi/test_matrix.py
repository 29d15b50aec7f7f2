"""Every policy writes the tokens of plain decoding, on every kind of model and stages.

A job has one kind of model in one layout of ranks, and runs all policies one after the other. So
the sample, which has few jobs, shows each policy with each kind and each number of ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.bita_adapter import BitaAdapter, save_bita
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.planning.wide import shares_of
from pipeinfer.scheduler.settings import PUBLISHED
from tests.kit import launch, random_architectures
from tests.kit.block_files import write_block_draft
from tests.kit.clockwork import write_eagle
from tests.kit.plain_loop import PlainLoop
from tests.kit.random_architectures import HEADED, RECIPES, STATEFUL
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.references import StagedLoop
from tests.kit.sample import fewer, full
from tests.kit.sliced_loop import SlicedLoop
from tests.models.test_slices_of_architectures import MIXTURES, stages_of

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROMPTS = ("def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n" * 6)
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "top_k": 30, "repeat_penalty": 1.1, "key": noise_key(5)}
COUNT = fewer(40, 16)
POLICIES = (
    {"policy": "iterative"},
    {"policy": "speculative", "branches": 3, "p_split": 0.1},
    {"policy": "pipeinfer", "p_min": 0.2},
    {"policy": "pipeinfer", "p_min": 0.0, "alternatives": 3, "path_min": 0.001},
    {"policy": "pipeinfer", "adapt": True},
    {"policy": "pipeinfer", "time_sharing": True, "tree_max": 3, "p_min": 0.05},
    {"policy": "pipeinfer", "join_tip": True, "draft_max": 4, "path_min": 0.0001,
     "exact_width": 4},
    {"policy": "speculative", "exact_width": 4},
    {"policy": "pipeinfer", "ablations": ["cancel"], "p_min": 0.0},
    {"policy": "pipeinfer", "ablations": ["continuous"], "p_min": 0.1},
    {"policy": "pipeinfer", "ablations": ["async"], "p_min": 0.1},
    {"policy": "pipeinfer", "ablations": ["alternatives"], "p_min": 0.1},
    {"policy": "published", **PUBLISHED},
    {"policy": "published", **PUBLISHED, "branches": 3},
    {"policy": "published", **PUBLISHED, "ablations": ["multibuffer"]},
)


class Layout(NamedTuple):
    """ranks, options; of a grid members and slices of each stage, as the options write them."""

    ranks: int
    options: Mapping[str, Any] = MappingProxyType({})
    widths: tuple[int, ...] = ()
    slices: str = ""


LAYOUTS = {
    **{f"{n} ranks": Layout(n) for n in (1, 2, 3, 4)},
    "head stage over tcp": Layout(3, {"head_stage": True, "cancel_path": "direct"}),
    "head stage": Layout(2, {"head_stage": True, "cancel_path": "backward"}),
    "draft rank": Layout(4, {"draft_ranks": 1}),
    "1x2 and a draft rank": Layout(4, {"draft_ranks": 1}, (2,)),
    "few ids": Layout(3, {"head_stage": True, "partitions": 1}),
    "halves": Layout(3, {"hidden_type": "f16"}),
    "slices on one rank": Layout(2, {}, (1,), "2"),
    "4 slices": Layout(1, {"head_stage": True}, (1,), "4"),
    "1x2 with rank 0": Layout(2, {"head_stage": True}, (2,)),
    "1x2 with rank 0 by messages": Layout(
        2, {"head_stage": True, "sum_path": "messages"}, (2,)),
    "1x2": Layout(3, {}, (2,)),
    "1x2 unequal": Layout(3, {}, (2,), "3:1"),
    "1x3 unequal": Layout(4, {"sum_path": "messages"}, (3,), "3:2:1"),
    "1x4": Layout(5, {"sum_path": "messages", "sum_type": "f16"}, (4,)),
    "2x2": Layout(5, {}, (2, 2)),
    "2,1": Layout(4, {"sum_path": "messages", "sum_type": "bf16"}, (2, 1), "2,2"),
}
RANKS = tuple(name for name in LAYOUTS if name[1:] == " ranks")
GRIDS = ("1x2", "1x2 unequal", "1x3 unequal", "2x2", "2,1")
HALVES = tuple(name for name in GRIDS if "3" not in name)  #: of models that cannot be cut in three


class Kind(NamedTuple):
    """write: its model; sampled, others: its layouts in the sample and in the full run."""

    write: Callable[[Path], Path]
    sampled: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    config: Mapping[str, Any] = MappingProxyType({})


def embedded(folder: Path) -> Path:
    return EMBEDDED / "target.gguf"


def shallow(folder: Path) -> Path:
    """The sample's has 2 layers, not 12: torch takes seconds to measure how many rows are exact."""
    return EMBEDDED / fewer("target.gguf", "draft.gguf")


def hugging_face(folder: Path) -> Path:
    from tests.kit.embedded_folder import write_folder

    return write_folder(shallow(folder), folder / "target")


def recipe(name: str, **sizes: Any) -> Callable[[Path], Path]:
    return lambda folder: write_random_model(
        folder / "m.gguf", tiny(name, **({"qtype": "Q8_0"} | sizes)))


def with_eagle(own: bool) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = write_random_model(folder / "m.gguf", RandomSpec(n_layer=6, qtype="Q8_0"))
        write_eagle(folder / "head.gguf", path, (1, 3, 5), own=own)
        return path

    return write


def with_blocks(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = write_random_model(folder / "m.gguf", RandomSpec(n_layer=6, qtype="Q8_0"))
        write_block_draft(folder / "draft.gguf", path, (1, 3, 5), kind)
        return path

    return write


def adapter_at(path: Path, prompts: int) -> str:
    """A BiTA adapter of random vectors: what it proposes is worth nothing, and harmless."""
    chance, layers = np.random.default_rng(prompts), (12, prompts, 2, 64)
    save_bita(path, BitaAdapter(*(chance.normal(0, 0.5, shape).astype(np.float32)
                                  for shape in ((3, 256), layers, layers))))
    return str(path)


def with_masks(prompts: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        adapter_at(folder / "bita.safetensors", prompts)
        return EMBEDDED / "target.gguf"

    return write


TORCH = {"backend": "torch", "device": "cpu"}
MASKS = {"bita": "bita.safetensors", "proposer": ["bita", "draft"], "policy": "speculative"}
HEAD = {"proposer": ["mtp"], "speculation": "on"}
EAGLE = {"eagle": "head.gguf", "speculation": "on"}
BLOCKS = {"draft_model": "draft.gguf", "proposer": ["dflash"], "speculation": "on"}
WIDE = {"expert_ff": 192, "n_ff": 192, "n_head": 8, "n_head_kv": 4}
K_QUANTS = {"qtype": "Q4_K_M", "n_layer": 2, "n_embd": 1024, "n_head": 16, "n_head_kv": 4}
KINDS = {
    "plain": Kind(embedded, ("1 ranks", "head stage over tcp"),
                  (*RANKS[1:], "few ids", "draft rank")),
    "wide": Kind(embedded, ("1x3 unequal", "1x2 with rank 0"), (
        *GRIDS, "1x4", "slices on one rank", "1x2 with rank 0 by messages",
        "1x2 and a draft rank")),
    "lookup and draft": Kind(embedded, ("4 ranks",), ("1 ranks", "3 ranks"),
                             {"proposer": ["prompt-lookup", "draft"]}),
    "lookahead": Kind(embedded, ("1 ranks", "3 ranks"), ("4 ranks",),
                      {"proposer": ["lookahead", "draft"]}),
    "lookahead on torch": Kind(shallow, (), ("2 ranks",), TORCH | {"proposer": ["lookahead"]}),
    "masks": Kind(with_masks(0), ("2 ranks",), ("1 ranks", "4 ranks"), MASKS),
    "masks on torch": Kind(with_masks(16), (), ("1 ranks", "4 ranks"), MASKS | TORCH),
    "torch": Kind(shallow, ("head stage",), ("1 ranks", "3 ranks", "1x3 unequal"), TORCH),
    "torch folder": Kind(hugging_face, (), ("2 ranks", "4 ranks", "1x2"), TORCH),
    "torch bfloat16": Kind(shallow, (), ("1x2 unequal",), TORCH | {"dtype": "bfloat16"}),
    "mixture": Kind(recipe("gpt-oss", qtype="MXFP4", **WIDE), ("1x3 unequal",), GRIDS),
    "some experts": Kind(recipe("qwen3moe", expert_ff=512, **K_QUANTS), ("4 slices",), ("1x4",)),
    "many experts": Kind(recipe("qwen3moe", expert_ff=768, **K_QUANTS), (), ("1x4",)),
    "few experts": Kind(recipe("qwen3moe", expert_ff=256, **K_QUANTS), (), ("2,1",)),
    "state": Kind(recipe("qwen35", n_layer=12), ("2,1",), (
        *RANKS, *HALVES, "head stage", "few ids")),
    "state and mixture": Kind(recipe("qwen35moe", n_layer=12), ("4 ranks",), HALVES),
    "state and some experts": Kind(recipe("qwen35moe", n_layer=12, expert_ff=32), (), HALVES),
    "windows": Kind(recipe("gemma3"), ("2x2",), ("3 ranks",)),
    "head": Kind(recipe("glm4moe"), ("draft rank",), (*RANKS, "head stage", "halves"), HEAD),
    "eagle": Kind(with_eagle(False), ("2 ranks",), (*RANKS, "head stage", "halves", "draft rank"),
                  EAGLE),
    "eagle with a vocabulary": Kind(with_eagle(True), (), ("3 ranks", "draft rank"), EAGLE),
    "blocks": Kind(with_blocks("dflash"), ("3 ranks",), (*RANKS, "draft rank"), BLOCKS),
    "blocks of a chain": Kind(with_blocks("dspark"), ("2 ranks",), (
        *RANKS, "head stage", "halves", "draft rank"), BLOCKS),
    "blocks of a lattice": Kind(with_blocks("dflash2"), ("1 ranks",), RANKS, BLOCKS),
    # every other recipe
    **{f"mixture {name}": Kind(recipe(name, qtype="Q4_0", **WIDE), (), GRIDS)
       for name in MIXTURES if name not in ("deepseek2-lite", "gpt-oss")},
    **{f"state {name}": Kind(recipe(name, n_layer=12), (), ("2 ranks", "3 ranks", "few ids"))
       for name in STATEFUL},
    **{f"wide state {name}": Kind(recipe(name, n_layer=12), (), HALVES)
       for name in ("qwen3next", "nemotron_h-groups")},
    **{f"recipe {name}": Kind(recipe(name), (), (
        "head stage" if random_architectures.stages_of(name) == 2 else "3 ranks",))
       for name in RECIPES},
    **{f"wide {name}": Kind(recipe(name), (), ("2x2",)) for name in ("gemma2", "glm4", "granite")},
    **{f"head {name}": Kind(recipe(name), (), ("1 ranks", "3 ranks", "draft rank"), HEAD)
       for name in HEADED},
}


def cells():
    """Kind and layout of every job; those of the sample are not marked."""
    return [one if one[1] in KINDS[one[0]].sampled else full(*one) for one in (
        (name, layout) for name, kind in KINDS.items()
        for layout in dict.fromkeys((*kind.sampled, *kind.others)))]


def test_the_sample_shows_each_number_of_ranks_and_grids():
    shown = [LAYOUTS[layout] for kind in KINDS.values() for layout in kind.sampled]
    assert {layout.ranks for layout in shown} >= {1, 2, 3, 4}
    assert {len(layout.widths) for layout in shown} == {0, 1, 2}


def cases(shift, state, few):
    """Each policy with each prompt and each way to choose; where few are wanted with one of each,
    which differ between jobs. What takes parts of a state back is refused beside such a model."""
    ways = list(itertools.product(PROMPTS, (GREEDY, SEEDED)))
    return [{"prompt": prompt, "params": params, "limits": limits, "count": COUNT}
            for k, limits in enumerate(POLICIES) if not (state and limits["policy"] == "published")
            for prompt, params in ([ways[(k + shift) % len(ways)]] if few else ways)]


def run_matrix(folder, ranks, config, todo, **options):
    """What the program `matrix` says of a job of this config."""
    task, out = folder / "task.json", folder / "out.json"
    base = {"ctx": 512, "threads": 1, "threads_draft": 1, "branches": 3, "policy": "pipeinfer"}
    task.write_text(json.dumps({"config": base | config, "cases": todo}))
    done = launch.python(ranks, "matrix", str(task), str(out), timeout=240, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def loop_over(path, place, layers, config, folder):
    """Plain decoding of the model, or of the slices of a grid, row by row."""
    if config.get("backend") == "torch":
        from pipeinfer.backends.pytorch.backend import TorchBackend
        from pipeinfer.backends.pytorch.options import TorchOptions

        return StagedLoop(TorchBackend.load(path, n_ctx=512, n_seq_max=1, n_batch=64, n_threads=1,
                                            options=TorchOptions("cpu")))
    if not place.widths:
        return PlainLoop(path)
    shares = [own or (1.0,) for own in shares_of(place.slices, place.widths)]
    return SlicedLoop(path, layers, shares, sum_type=place.options.get("sum_type", "f32"),
                      cache_dir=folder)


def loop_tokens(loop, path, todo, count=COUNT):
    """What a loop of plain decoding writes of each case."""
    tokenizer = open_tokenizer(path)
    found = [loop.generate(tokenizer.encode(case["prompt"]), count,
                           SamplingParams(**case["params"])) for case in todo]
    loop.close()
    tokenizer.close()
    return found


@pytest.mark.parametrize(("ranks", "qtype"), [(1, ""), full(2, ""), *(
    full(1, kind) for kind in ("Q4_K_M", "Q4_0", "Q8_0", "F16", "BF16", "MXFP4"))])
def test_many_requests_share_runs_that_are_wider_than_a_request_s(tmp_path, ranks, qtype):
    many, count = [f"{PROMPTS[0]}# {k}" for k in range(40)], 60
    path = embedded(tmp_path) if not qtype else write_random_model(
        tmp_path / "m.gguf", RandomSpec(**K_QUANTS | {"qtype": qtype, "n_ff": 512}))
    config = {"policy": "iterative", "parallel": len(many), "cache_tokens": 8192}
    case = {"prompt": many[0], "beside": many[1:], "params": GREEDY, "count": count,
            "limits": {"share": [len(many)]}}
    answer = run_matrix(tmp_path, ranks, {"model": str(path), **config}, [case])
    found, loop = answer["results"][0], PlainLoop(path)
    assert found["tokens"] == loop_tokens(
        loop, path, [{"prompt": one, "params": GREEDY} for one in many], count)
    assert answer["exact_width"] <= 16
    assert (found["widest"] > 16) is (answer["group_max"] > 16)  # by the kernels at hand


@pytest.mark.parametrize(("kind", "layout"), cells())
def test_every_policy_writes_the_tokens_of_plain_decoding(tmp_path, kind, layout):
    model, place = KINDS[kind], LAYOUTS[layout]
    for package in ("torch", "transformers", "safetensors") * (
            "torch" in kind or "masks" in kind):
        pytest.importorskip(package)
    path = model.write(tmp_path)
    config = {"model": str(path), **place.options, **model.config}
    config |= {name: str(tmp_path / config[name]) for name in ("eagle", "bita", "draft_model")
               if name in config}
    if not {"eagle", "draft_model"} & config.keys() and model.config is not HEAD:
        own = path.parent == tmp_path and not path.is_dir()  # is its own draft, which is right
        config["draft_model"] = str(path if own else EMBEDDED / "draft.gguf")
    keeps = "state" in kind or "qwen35" in kind
    todo, layers = cases(len(kind), keeps, fewer(kind != "plain", True)), ()
    once = {(case["prompt"], str(case["params"])): case for case in todo}
    if place.widths:
        file = ModelFile(path) if path.is_file() else ModelFile(shallow(tmp_path))
        layers = [stop - start for start, stop in (
            stages_of(file) if len(place.widths) > 1 else [(0, file.n_layers)])]
        config |= {"grid": ",".join(map(str, place.widths)), "slices": place.slices,
                   "layers": ",".join(map(str, layers))}
    if "torch" in kind and place.widths:  # the slices on one rank
        alone = {**model.config, "model": str(path), "draft_model": config["draft_model"],
                 "slices": place.slices or str(place.widths[0])}
        answer = run_matrix(tmp_path, 1, alone, [
            case | {"limits": POLICIES[0]} for case in once.values()])
        plain = [result["tokens"] for result in answer["results"]]
    else:
        loop = loop_over(path, place, layers, config, tmp_path)
        plain = loop_tokens(loop, path, once.values())
    expected = dict(zip(once, plain, strict=True))
    over_tcp = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self") * ("tcp" in layout)
    answer = run_matrix(tmp_path, place.ranks, config, todo, mpi_args=over_tcp)
    for case, result in zip(todo, answer["results"], strict=True):
        assert result["tokens"] == expected[case["prompt"], str(case["params"])], case["limits"]
    results, reports = answer["results"], answer["reports"]
    if answer["exact_width"] > 1 or "deepseek2" not in kind:  # of which single rows are exact
        random = any(one in kind for one in ("head", "eagle", "blocks"))  # weights
        name = "issued" if random else "accepted"
        assert sum(result[f"{name}_speculative"] for result in results) > 0
    if place.widths:
        assert reports  # a member that is late at the end has none
        assert all(report["n_sums"] > 0 for report in reports.values())
