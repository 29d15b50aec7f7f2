"""Texts that a tokenizer's native code does not survive cost one error, and nothing else."""

from __future__ import annotations

import os
import signal
import sys
import time

import gguf
import psutil
import pytest

from pipeinfer.errors import RequestError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text import helper
from pipeinfer.models.text.tokenizer import SAFE_CHARACTERS
from tests.kit import launch
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.sample import full, mostly_full
from tests.models.test_marks import folder_like, sentencepiece

pytestmark = pytest.mark.slow
#: the first name of each kind of pre-tokenizer in llama.cpp
PRE = ("default", "minicpm5", "llama3", "deepseek-llm", "deepseek-coder", "deepseek-v3", "youtu",
       "falcon", "mpt", "starcoder", "gpt-2", "jais-2", "refact", "command-r", "qwen2", "qwen35",
       "stablelm2", "olmo", "dbrx", "smaug-bpe", "poro-chat", "chatglm-bpe", "viking", "jais",
       "tekken", "smollm", "codeshell", "bloom", "gpt3-finnish", "exaone", "exaone-moe",
       "chameleon", "minerva-7b", "megrez", "gpt-4o", "tiny_aya", "superbpe", "trillion",
       "granite-docling", "bailingmoe", "seed-coder", "hunyuan", "hunyuan-dense", "joyai-llm",
       "kimi-k2", "grok-2", "afmoe", "minimax-m2", "solar-open")
WORST = ("gpt-4o", "deepseek-v3", "tekken")
RUNS = ("z", "Z", " ", ".", "\n", "9", "é", "漢", "'", "\u0301", "a ", "\u200b", "<|im_end|>")
SHORT = ("", "def f(x):\n    return 'ä'  # 漢 123\n", "We're  \t\n\n9999 <|im_end|> ZZz...",
         *(run * 40 for run in RUNS))
BODY = 4 << 20  #: the most bytes that a server takes unless --set max_body=says otherwise


def write_with(pre, path):
    """A model whose file names this pre-tokenizer."""
    plain = gguf.GGUFWriter.add_tokenizer_pre
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda self, _: plain(self, pre))
        return write_random_model(path, RandomSpec(n_layer=1))


@pytest.fixture
def tokenizer_of(tmp_path):
    """A tokenizer with a pre-tokenizer of this name."""
    made = []

    def open_it(pre):
        made.append(open_tokenizer(write_with(pre, tmp_path / f"{pre}.gguf")))
        return made[-1]

    yield open_it
    for tokenizer in made:
        tokenizer.close()


@pytest.mark.parametrize("pre", mostly_full(PRE, "gpt-4o", "llama3"))
def test_tokens_are_the_same_there_and_long_runs_have_some(tokenizer_of, pre):
    tokenizer = tokenizer_of(pre)
    for text in SHORT:
        for how, detail in (("split", False), ("split", True), ("guarded", "0123")):
            assert tokenizer.apart.tokens(how, text, detail) == tokenizer.tokens_here(
                how, text, detail)
    for run in RUNS:
        text = run * (25_000 // len(run))
        whole = tokenizer.decode(tokenizer.tokens_here("split", run, False)) == run
        if (pre, run) == ("superbpe", "9"):  # which counts digits from every digit on
            with pytest.raises(RequestError, match="takes longer than 10 s"):
                tokenizer.split(text, False)
            continue
        assert not whole or tokenizer.decode(tokenizer.split(text, False)) == text


@pytest.mark.parametrize("pre", mostly_full(PRE, "gpt-4o"))
def test_a_body_of_one_character_costs_at_most_an_error(tokenizer_of, pre):
    tokenizer = tokenizer_of(pre)
    reasons = []
    for run in ("z", " ", "."):
        try:
            tokens = tokenizer.encode(run * BODY)
        except RequestError as error:
            reasons.append(str(error))
        else:
            assert len(tokens) > BODY // 8
    assert tokenizer.encode("ok" * SAFE_CHARACTERS, add_bos=False)
    assert all("cannot split a text of 4194304 characters" in reason for reason in reasons)
    assert pre not in WORST or len(reasons) == 3


@pytest.mark.parametrize("write", [sentencepiece, folder_like])
def test_other_vocabularies_too(tmp_path, write):
    tokenizer = open_tokenizer(write(tmp_path / "m"))
    text = "ab a<|end|>s " * 9000
    assert tokenizer.split(text, False) == tokenizer.tokens_here("split", text, False)
    assert tokenizer.split(text, True) == tokenizer.tokens_here("split", text, True)
    tokenizer.close()


def test_whatever_ends_the_process_the_next_text_gets_its_tokens(tokenizer_of):
    tokenizer = tokenizer_of("gpt-2")
    tokenizer.keep_apart()
    wanted = tokenizer.encode("some words")
    for ending in (signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL):
        os.kill(tokenizer.apart._short._process.pid, ending)
        tokenizer.apart._short._process.wait()
        assert tokenizer.encode("some words") == wanted
    hung = psutil.Process(tokenizer.apart._short._process.pid)
    hung.suspend()
    while hung.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helper, "SHORT_SECONDS", 0.2)
        with pytest.raises(RequestError, match=r"longer than 0\.2 s"):
            tokenizer.encode("some words")
    assert tokenizer.encode("some words") == wanted


def test_a_file_that_is_another_one_now_is_no_vocabulary(tokenizer_of):
    tokenizer = tokenizer_of("gpt-2")
    os.utime(tokenizer.path, ns=(1, 1))
    with pytest.raises(RequestError, match="has changed since it was loaded"):
        tokenizer.encode("words " * 1000)
    os.unlink(tokenizer.path)
    with pytest.raises(RequestError, match="no such file"):
        tokenizer.encode("words " * 1000)


@pytest.mark.parametrize(("np", "run", "count", "code", "says"), [
    (1, "z", 2_000_000, 5, "the model's tokenizer cannot split a text of 2000000 characters"),
    full(1, " ", 25_000, 5, "25001 tokens"),
    full(2, ".", 2_000_000, 5, "cannot split a text"),
    full(2, "z", 25_000, 5, "25001 tokens"),
    full(1, "z", 2_000, 0, ""),
])
def test_a_prompt_from_a_file(tmp_path, np, run, count, code, says):
    file = tmp_path / "prompt.txt"
    file.write_text(run * count)
    done = launch.run(np, [
        sys.executable, "-m", "pipeinfer", "generate", "-md", "none", "-n", "1", "-f", str(file),
        "-m", str(write_with("gpt-4o", tmp_path / "m.gguf")), "--no-display-prompt"])
    assert done.returncode == code, done.stderr[-2000:]
    assert says in done.stderr
    assert "Traceback" not in done.stderr
