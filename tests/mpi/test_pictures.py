"""`generate --image` over ranks: the tokens of a plain context that reads the same pieces, whatever
speculates, is wide, or is lost.

tests/backends/test_pictures.py compares that with mtmd's own helper, bit for bit.
"""

from __future__ import annotations

import pytest

from pipeinfer.cli.generate import generate as generate_command
from tests.kit import launch
from tests.kit.picture_oracle import MARK, plain_tokens
from tests.kit.random_projectors import FAMILIES, medium, write_family
from tests.kit.refusals import refusal
from tests.kit.sample import mostly_full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
TEXT = f"Look at {MARK} and {MARK} and say more, more, more."
COUNT = 24


def generate(np, model, files, *more):
    shown = [word for one in files for word in ("--image", str(one))]
    return launch.answered(np, "-m", model, *shown, "-p", TEXT, "-n", COUNT, "--temp", "0",
                           "--ignore-eos", "-c", "2048", "-t", "1", *more, timeout=150)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model, mmproj = write_family(family, folder)
            data = [medium(family), medium(family, 2)]
            files = [folder / f"{k}.bin" for k in range(2)]
            for file, one in zip(files, data, strict=True):
                file.write_bytes(one)
            made[family] = model, files, plain_tokens(model, mmproj, TEXT, data, COUNT)
        return made[family]

    return make


def check(found, wanted):
    assert found["tokens"] == wanted
    return found["stats"]


@pytest.mark.parametrize("family", mostly_full(FAMILIES, "gemma3", "qwen3vl", "qwen35"))
def test_ranks_give_the_tokens_of_one_context(family, shown):
    model, files, wanted = shown(family)
    check(generate(1, model, files, "--policy", "iterative"), wanted)
    ranks = 3 if family == "qwen35moe" else 4  # its stages begin at layers 0 and 4
    stats = check(generate(ranks, model, files, "--policy", "pipeinfer", "--proposer",
                           "prompt-lookup"), wanted)
    layers = [one["layers"] for one in stats["stages"].values()]
    assert len(layers) >= 2
    assert layers[0][1] > 2 * (FAMILIES[family].shape.deepstack != ())


@pytest.mark.parametrize("more", [
    ("--hook", "fault=kill@2:decode=8"), ("--hook", "fault=kill@1:prefill=2"),
    ("-md", "draft"), ("--grid", "1x2", "--slices", "2")],
    ids=["killed while it answers", "killed while it reads", "draft", "wide"])
@pytest.mark.parametrize("family", mostly_full(["gemma3", "qwen35", "smolvlm"], "gemma3"))
def test_a_lost_stage_a_draft_and_members_change_no_token(family, more, shown):
    model, files, wanted = shown(family)
    if "--grid" in more:
        if family != "gemma3":
            pytest.skip("its layers are not sliced into two here")
        wanted = generate(1, model, files, "--slices", "2")["tokens"]
    more = [str(model) if word == "draft" else word for word in more]
    stats = check(generate(3 if "--grid" in more else 4, model, files, *more), wanted)
    assert stats["recovered"] == ("--hook" in more)


def test_prompts_with_pictures_are_neither_stored_nor_read(shown, tmp_path):
    model, files, wanted = shown("gemma3")
    for _ in range(2):
        stats = check(generate(2, model, files, "--kv-disk", str(tmp_path)), wanted)
        assert stats["restored"] == 0


@pytest.mark.parametrize(("more", "why"), [
    (("--mmproj", "none"), "has no projector of pictures"),
    (("--mmproj", "missing.gguf"), "missing.gguf: no such file"),
    (("--image", __file__), "not a JPEG, PNG, GIF or BMP"),
    (("--image", "missing.png"), "cannot read missing.png"),
    (("--mmproj", "x", "--decomposer", "skeleton"), "cannot share pictures")])
def test_what_cannot_be_shown_is_one_clear_line(more, why, shown):
    model, files, _ = shown("gemma3")
    shown = [word for one in files for word in ("--image", str(one))]
    assert why in refusal(generate_command, ["-m", str(model), *shown, "-p", TEXT, *more])[1]
