"""What several tests of training use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from pipeinfer.models.locate import EMBEDDED, open_tokenizer


@pytest.fixture(scope="module")
def words() -> Iterator[Any]:
    """The tokenizer of the embedded draft."""
    tokenizer = open_tokenizer(EMBEDDED / "draft.gguf")
    yield tokenizer
    tokenizer.close()


def do(*args: object) -> str:
    """What a command of training says; it must not fail."""
    from pipeinfer_lab.training.__main__ import main

    done = CliRunner().invoke(main, list(map(str, args)))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output
