"""--set like_llama_cpp=true: the tokens of llama.cpp with its own defaults."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends.factory import llama_options
from pipeinfer.cluster.generate import run_request
from pipeinfer.cluster.launch import join
from pipeinfer.config import JobConfig, ModelConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.llama import short_runs
from tests.kit.launch import ROOT
from tests.kit.plain_loop import PlainLoop

TARGET = ROOT / "pipeinfer" / "models" / "embedded" / "target.gguf"
F16, AUTO = 1, -1


@pytest.fixture
def own_prompts():
    """Let our kernels multiply long runs again afterwards: it is a setting of the process."""
    yield
    short_runs.limit(short_runs.MOST_ROWS)


@pytest.mark.slow
@pytest.mark.usefixtures("own_prompts")
def test_a_long_prompt_and_its_answer_are_those_of_llama_cpps_defaults():
    text = (ROOT / "pipeinfer" / "host.py").read_text()[:1000]
    config = JobConfig.of(model=str(TARGET), like_llama_cpp=True, ctx=1024, threads=1)
    with join(config).lead() as session:
        prompt = session.tokenizer.encode(text)
        assert 256 < len(prompt) < 512  # more than pipeinfer's own chunk
        ours = run_request(session, prompt, SamplingParams(), 60, ignore_eos=True).tokens
        assert any("like llama.cpp" in note for note in session.notes)
    loop = PlainLoop(TARGET, n_ctx=1024, n_threads=1, type_k=F16, type_v=F16, flash=AUTO)
    path, theirs = list(prompt), []
    logits = loop.decode(path, 0)
    for _ in ours:
        theirs.append(int(np.argmax(logits)))
        path.append(theirs[-1])
        logits = loop.decode(path[-1:], len(path) - 1)
    loop.close()
    assert list(ours) == theirs


def test_the_draft_and_others_keep_their_cache():
    config = ModelConfig(like_llama_cpp=True)
    stage, draft = llama_options(config), llama_options(config, draft=True)
    assert (stage.type_k, stage.type_v, stage.flash_attn) == ("f16", "f16", "auto")
    assert not stage.own_prompts
    assert draft == llama_options(ModelConfig(), draft=True)
