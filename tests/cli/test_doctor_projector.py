"""`pipeinfer doctor --mmproj` measures what a user will wait for."""

from __future__ import annotations

import json
import re

from click.testing import CliRunner

from pipeinfer.cli.main import main
from tests.kit.random_projectors import write_family


def said(*args):
    done = CliRunner().invoke(main, ["doctor", "--json", *map(str, args)])
    found = {one["what"]: one for one in json.loads(done.stdout)["findings"]}
    return done.exit_code, found["projector"]


def test_a_picture_is_timed_and_a_wrong_projector_named(tmp_path):
    model, mmproj = write_family("gemma3", tmp_path)
    code, found = said("-m", model, "--mmproj", "auto")
    assert code == 0
    assert re.fullmatch(r"a picture of 640 x 480 becomes \d+ tokens in \d+\.\d s, in a process of "
                        r"about 0\.1 GB", found["detail"])
    other = tmp_path / "other"
    other.mkdir()
    _, wrong = write_family("qwen35", other)
    mmproj.unlink()
    assert said("-m", model, "--mmproj", "auto")[0] == 1
    code, found = said("-m", model, "--mmproj", wrong.with_name("missing.gguf"))
    assert (code, "no such file" in found["detail"]) == (1, True)
