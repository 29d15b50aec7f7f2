"""Answers, byte for byte, as clients have always got them: recorded_answers.json.

Ids, times and seeds are fixed. After a change that is meant, write the file anew with
`python -m tests.server.test_recorded`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from unittest import mock

import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.models.text.text_stream import TextStream
from pipeinfer.server import schema_requests as schema
from pipeinfer.server import tools
from pipeinfer.server.answer_writer import AnswerWriter
from pipeinfer.server.answers import Answers
from pipeinfer.server.app import Server
from pipeinfer.server.choice import Generation, Reading
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.errors import ApiError, Failure, bad, for_failure
from pipeinfer.server.frames import Rebalanced
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.schema_replies import Reply
from pipeinfer.server.settings import Settings
from pipeinfer.server.streaming import event
from pipeinfer.server.tools import ToolUse

FILE = Path(__file__).parent / "recorded_answers.json"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
STATS = {"reused": 2, "drafted": 9, "accepted_speculative": 4, "runs": 7, "cancelled_runs": 1}
SHAPES = {
    "plain": {}, "n": {"n": 2}, "logprobs": {"logprobs": True}, "detail": {"detail": True},
    "usage": {"usage": True}, "everything": {
        "n": 2, "logprobs": True, "detail": True, "usage": True, "echo": True},
}


def writer(tokenizer, texts, *, is_chat, with_tools=False, reason="stop", prompts=1, **fields):
    """A AnswerWriter whose choices have said these texts, and the generations that say them."""
    asked = EngineRequest([[1, 2, 3]] * prompts, ["the prompt"] * prompts, n=fields.pop("n", 1),
                          max_tokens=9, params=SamplingParams(), seed=1,
                          tools=ToolUse([], 16) if with_tools else None, **fields)
    made = AnswerWriter(asked, "m", tokenizer, is_chat=is_chat, created=5)
    made.answer_id = "id"
    readings = []
    for index in range(asked.count):
        generation = Generation(index + 1, index, 3, lambda _: None,
                                TextStream(tokenizer, ["STOP"]))
        counts = generation.counts
        for i, token in enumerate(tokenizer.encode(texts[index % len(texts)], add_bos=False)):
            top = ((token, -0.25), (1, -3.0))
            generation.push((token, i % 2 == 1, None if i == 1 else -0.25, top, None))
        counts.submitted, counts.first, counts.last = 1.0, 1.5, 2.25
        if not counts.output:
            counts.first = counts.last = None
        generation.end(reason, STATS)
        readings.append(Reading(generation, TextStream(tokenizer, ["STOP"])))
        readings[-1].advance()
    made.start(readings)
    return made


def streamed(made):
    """The bytes of a stream."""
    out = [event(chunk) for chunk in made.opening()]
    for choice in made.choices:
        out += [event(chunk) for chunk in made.chunks(choice)]
    return b"".join(out + [event(chunk) for chunk in made.closing()]).decode()


def asking(tokenizer):
    """What the other routes answer."""
    hub = EngineClient(Settings("m.gguf", "m", parallel=2), Metrics())
    server = Server(Answers(hub))
    server.created = 5
    yield "health loading", server.health()
    hub.loading = {"1": {"phase": "loading", "done": 1, "total": 3}}
    yield "health stages", server.health()
    stages = [{"node": 1, "rank": 1, "host": "a", "layers": [0, 4]}]
    hub.state, hub.tokenizer = "ready", tokenizer
    hub.facts = {"n_ctx": 256, "stages": stages, "changes": [{"lost": [2], "message": "x"}],
                 "lost": [2]}
    hub.status = {"op": "status", "time": 1.5, "lanes": [{"request": 5}]}
    yield "health", server.health()
    yield "models", server.models()
    yield "model", server.model("m")
    yield "slots", server.slots()
    yield "props", server.props()
    yield "tokenize", server.tokenize(schema.TokenizeRequest(content="def é"))
    yield "pieces", server.tokenize(schema.TokenizeRequest(content="def é漢", with_pieces=True))
    yield "detokenize", server.detokenize(schema.DetokenizeRequest(tokens=[5, 6]))
    message = schema.Message(role="user", content="hi é")
    yield "template", server.apply_template(schema.TemplateRequest(messages=[message]))
    rebalanced = asyncio.sleep(0, Rebalanced(1, True, "dealt out"))
    with mock.patch.object(hub, "rebalance", mock.Mock(return_value=rebalanced)):
        yield "rebalance", server.rebalance(schema.RebalanceRequest())
    hub.fail("oh")
    yield "health failed", server.health()


def record():
    """Name to bytes of every answer."""
    tokenizer = open_tokenizer(EMBEDDED / "target.gguf")
    found = {}
    calls = itertools.count(1)
    with mock.patch.object(tools.secrets, "token_hex",
                           mock.Mock(side_effect=lambda _: f"{next(calls):04}")):
        for chat in (True, False):
            for name, fields in SHAPES.items():
                kinds = {"stop": ["ok é", "b STOP c"], "length": ["x" * 9], "context": [""]}
                if name not in ("plain", "everything"):
                    del kinds["length"], kinds["context"]
                for reason, texts in kinds.items():
                    def made(fields=fields, reason=reason, texts=texts, chat=chat):
                        return writer(tokenizer, texts, is_chat=chat, reason=reason,
                                      prompts=1 if chat else 2, **fields)
                    title = f"{'chat' if chat else 'text'} {name} {reason}"
                    found[title] = Reply(made().whole()).body.decode()
                    found[f"{title} stream"] = streamed(made())
        for name, text in (("calls", f"so {CALL}{CALL}"), ("call alone", CALL), ("none", "hm")):
            for fields in ({}, {"detail": True, "usage": True}):
                def made(fields=fields, text=text):
                    return writer(tokenizer, [text], is_chat=True, with_tools=True, **fields)
                title = f"tools {name} {sorted(fields)}"
                found[title] = Reply(made().whole()).body.decode()
                found[f"{title} stream"] = streamed(made())
    for name, error in {
        "bad": bad("oh \ud83d é", "prompt", "code"), "busy": ApiError(429, "busy"),
        "failed": for_failure(Failure("failed", "rank 1")), "odd": ApiError(418, "x"),
    }.items():
        found[f"error {name}"] = Reply(error.body(), error.status).body.decode()
        found[f"error {name} stream"] = event(error.body()).decode()
    half = schema.Message(role="user", content="\ud83d")
    hub = EngineClient(Settings("m.gguf", "m"), Metrics())
    hub.state, hub.tokenizer = "ready", tokenizer
    template = schema.TemplateRequest(messages=[half])
    answer = asyncio.run(Server(Answers(hub)).apply_template(template))
    found["template of half a pair"] = answer.body.decode()
    with mock.patch("pipeinfer.server.app.__version__", "0"):
        for name, answer in asking(tokenizer):
            found[name] = asyncio.run(answer).body.decode()
    tokenizer.close()
    return found


@pytest.mark.slow
def test_answers_are_byte_for_byte_what_they_were():
    wanted, found = json.loads(FILE.read_text()), record()
    assert set(found) == set(wanted)
    for name, text in wanted.items():
        assert found[name] == text, name


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=0) + "\n")
