"""PASTA's training: layouts by hand, the objective, annotation, stages on tiny models."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pipeinfer.errors import UsageError
from pipeinfer.lab.training.adapt.chats import read_chats, read_jsonl
from pipeinfer.lab.training.pasta import annotate, bonbon, pasta
from pipeinfer.lab.training.pasta.endpoint import Endpoint, EndpointError
from pipeinfer.lab.training.tasks import tasks

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from pipeinfer.lab.training.__main__ import main  # noqa: E402
from pipeinfer.lab.training.pair.loop import Plan  # noqa: E402
from pipeinfer.lab.training.pair.model import Llama, LlamaConfig  # noqa: E402
from pipeinfer.lab.training.pair.restore import restore  # noqa: E402
from pipeinfer.lab.training.pasta import finetune, verdicts  # noqa: E402
from pipeinfer.lab.training.pasta.pasta import IGNORE, Block, Flat  # noqa: E402
from pipeinfer.lab.training.pasta.preference import (  # noqa: E402
    Pool,
    Preference,
    pairs_of,
    prefer,
    sample,
)
from pipeinfer.lab.training.tasks import batches, formats, markup, pasta_plans  # noqa: E402
from pipeinfer.lab.training.tasks.circuits import lay_out  # noqa: E402
from pipeinfer.lab.training.tasks.markup import Codec  # noqa: E402
from pipeinfer.lab.training.tasks.programs import pasta_lang, start  # noqa: E402
from pipeinfer.lab.training.tasks.reference import Row, run, sampler  # noqa: E402
from pipeinfer.lab.training.tasks.task_model import (  # noqa: E402
    SHAPE,
    Settings,
    codec_at,
    export,
    fit,
    titles,
)

U, P, A, X, E, Y, S, Z = range(8)
#: u P1 A1 x E1 P2 A2 y E2 S z: one-token promises of length 1, then a sync.
A6 = Flat((U, P, A, X, E, P, A, Y, E, S, Z), 1, (Block(1, 2, 4, 10), Block(5, 6, 8, 10)), (9,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def codec(work: Path) -> Codec:
    return codec_at(work, 0)


def tiny(codec: Codec, seed: int = 0) -> Llama:
    vocabulary = codec.tokenizer.get_vocab_size()
    shape = LlamaConfig(vocabulary, n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=64)
    model = Llama(shape)
    model.reset(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in model.blk:
            block.attn_output.weight.normal_(0, 0.1, generator=generator)
    return model.eval()


def test_example_positions() -> None:
    assert pasta.positions(A6).tolist() == [0, 1, 2, 3, 4, 12, 13, 14, 15, 23, 24]


@pytest.mark.parametrize("blocks", [
    [[2, 6, 3, 1]], [[4, 5, 5, 1]], [[5, 5, 7, 1]], [[2, 3, 6, 1], [4, 5, 8, 1]]])
def test_layouts_with_blocks_that_no_answer_has(blocks: list[list[int]]) -> None:
    """Positions of the first would be sought for ever."""
    record = {**pasta.record_of(A6), "blocks": blocks, "syncs": []}
    with pytest.raises(ValueError, match="one behind the other"):
        pasta.flat_of(record)
    assert pasta.flat_of(pasta.record_of(A6)) == A6


def test_example_visibility() -> None:
    seen = {
        0: [0],
        1: [0, 1],
        2: [0, 1, 2],
        3: [0, 1, 2, 3],
        4: [0, 1, 2, 3, 4],
        5: [0, 1, 5],
        6: [0, 1, 5, 6],
        7: [0, 1, 5, 6, 7],
        8: [0, 1, 5, 6, 7, 8],
        9: list(range(10)),
        10: list(range(11)),
    }
    visible = pasta.visible(A6)
    assert {row: np.flatnonzero(visible[row]).tolist() for row in seen} == seen


def test_example_targets() -> None:
    wanted = [P, P, X, E, IGNORE, S, Y, E, IGNORE, Z, IGNORE]
    assert pasta.targets(A6).tolist() == wanted


def test_example_steps_and_parallelism() -> None:
    assert pasta.steps(A6).tolist() == [0, 1, 0, 2, 3, 2, 0, 3, 4, 3, 5]
    assert pasta.chain(A6) == 5
    assert pasta.parallelism(A6, {P, A, E, S}) == pytest.approx(0.6)
    assert 12 / pasta.chain(A6) == pytest.approx(2.4)


def test_text_decodes_in_one_step_per_token() -> None:
    assert pasta.chain(Flat((U, X, Y, Z), 1, (), ())) == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<async>Alice</async>", "no promise"),
        ('<promise topic="Alice"/><async>Alice</async>', "no promise"),
        ('<promise topic="Alice" tokens=2/><async>Alice', "not closed"),
        ('<promise topic="Alice" tokens=2/><async><sync/></async>', "inside"),
        ("Alice</async>", "closes no block"),
    ],
)
def test_malformed_responses_have_no_layout(codec: Codec, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        pasta.parse([0, *codec.encode(text)], 1, codec.tags, codec.digits)


def test_promise_lengths_of_several_digits(codec: Codec) -> None:
    ids = codec.encode('<promise topic="Alice Bob" tokens=120/>')
    assert pasta.promised_units(ids, codec.tags, codec.digits) == 120
    assert pasta.promised_units(ids[:-1], codec.tags, codec.digits) is None
    assert [pasta.attribute_of(n) for n in (2, 14, 15, 24, 25, 26)] == [1, 1, 2, 2, 3, 3]


def test_the_decoder_evaluates_just_what_training_lays_out(codec: Codec) -> None:
    """Every row of the interpreter has the position and the visible tokens of the flat layout."""
    rng = np.random.default_rng(3)
    for kind in ("retrieval", "totals"):
        for task in islice(tasks.stream(4, kind=kind), 12):
            text = codec.encode(pasta_plans.annotate(codec, task, rng))
            prompt = formats.prompt_ids(codec, "pasta", task.question)
            ids = [*prompt, *text, codec.tags["<|im_end|>"]]
            flat = pasta.parse(ids, len(prompt), codec.tags, codec.digits)
            outcome = follow(pasta_lang(codec, list(prompt)), flat)
            assert list(outcome.tokens) == ids[len(prompt) :]
            assert outcome.steps == pasta.chain(flat)


def follow(program, flat: Flat):
    """Answer a program with the flat response's tokens, checking every row against its layout."""
    places, visible, targets = pasta.positions(flat), pasta.visible(flat), pasta.targets(flat)
    cells: list[int] = []
    rows: list[Row] = next(program)
    while True:
        reply = []
        for row in rows:
            found = np.flatnonzero(
                (np.array(flat.tokens) == row.token) & (places == row.position)
            ).tolist()
            seen = [cells[cell] for cell in np.flatnonzero(row.view)]
            (at,) = [i for i in found if sorted([*seen, i]) == np.flatnonzero(visible[i]).tolist()]
            for store in row.store:
                store[len(cells)] = True
            cells.append(at)
            reply.append(max(0, int(targets[at])))
        try:
            rows = program.send(reply)
        except StopIteration as stop:
            return stop.value


def test_cells_give_the_logits_of_one_masked_pass(codec: Codec) -> None:
    """Sampled responses of an untrained model, step by step over cells and all at once."""
    model = tiny(codec)
    questions = [task.question for task in islice(tasks.stream(5), 3)]
    prompts = [formats.prompt_ids(codec, "plain", question) for question in questions]
    outcomes = run(model, [start("plain", codec, question) for question in questions])
    rows = [
        formats.sequence(prompt, outcome.tokens)
        for prompt, outcome in zip(prompts, outcomes, strict=True)
    ]
    for prompt, row in zip(prompts, rows, strict=True):
        batch = batches.collate([row])
        with torch.no_grad():
            states = model.masked(batch.tokens, batch.positions, batch.visible)
            best = model.logits(states)[0, len(prompt) - 1 : -1].argmax(-1)
        assert best.tolist() == row.tokens[len(prompt) :].tolist()


def test_padding_changes_no_loss(codec: Codec) -> None:
    model = tiny(codec)
    rng = np.random.default_rng(0)
    rows = [formats.make(codec, task, rng) for task in islice(tasks.stream(3), 5)]
    with torch.no_grad():
        together = batches.log_probabilities(model, batches.collate(rows))
        alone = [batches.log_probabilities(model, batches.collate([row]))[0] for row in rows]
        total, _ = batches.loss_sum(model, batches.collate(rows), bfloat16=False)
    assert torch.allclose(together, torch.stack(alone), atol=1e-2, rtol=1e-4)
    assert float(total) == pytest.approx(-float(together.sum()), rel=1e-4)


def test_bonbon_value_and_gradient() -> None:
    best = torch.tensor([-20.0], requires_grad=True)
    worst = torch.tensor([-30.0], requires_grad=True)
    value = bonbon.loss(best, worst, torch.tensor([9.0]), 10)
    assert bonbon.constant(10) == pytest.approx(25.4607, abs=1e-4)
    assert bonbon.constant(8) == pytest.approx(18.15, abs=1e-9)
    assert float(value.detach()) == pytest.approx(595.43, abs=0.01)
    value.backward()
    assert float(best.grad) < 0 < float(worst.grad)


def test_weight_decides_between_speed_and_quality() -> None:
    fast, right = bonbon.Scored((1,), 3.0, 0.5), bonbon.Scored((2,), 1.0, 1.0)
    assert bonbon.pair([fast, right], 1.0) == (fast, right)
    assert bonbon.pair([fast, right], 8.0) == (right, fast)
    assert bonbon.pair([fast, right], math.inf) == (right, fast)
    assert bonbon.pair([fast, fast], 1.0) is None

    # efficiency by the terms of section 6.3: one answer is short, the other parallel
    short, wide = (bonbon.Scored((1,), 4.0, 0.0, 1.0), bonbon.Scored((2,), 3.0, 0.0, 2.5))
    better = {term: bonbon.pair([short, wide], 0.0, term) for term in bonbon.TERMS}
    assert better == {"speedup": (short, wide), "harmonic": (wide, short),
                      "arithmetic": (wide, short), "parallelism": (wide, short)}
    assert [round(wide.score(2.0, term), 3) for term in bonbon.TERMS] == [3.0, 2.727, 2.75, 2.5]


def test_ratios_of_verdicts() -> None:
    assert bonbon.win_ratio([(True, 0.9), (True, 0.8)]) == 10
    assert bonbon.win_ratio([(True, 0.6), (False, 0.3)]) == pytest.approx(2)
    assert bonbon.win_ratio([]) == 1


def test_preference_moves_the_model_from_worst_to_best(codec: Codec) -> None:
    model = tiny(codec)
    task = next(tasks.stream(1, kind="plans"))
    prompt = tuple(formats.prompt_ids(codec, "pasta", task.question))
    rng = np.random.default_rng(0)
    cuts = [pasta_plans.cut(name, len(task.items), rng) for name in ("each", "text")]
    end = codec.tags["<|im_end|>"]
    texts = [(*codec.encode(pasta_plans.render(codec, task, cut)), end) for cut in cuts]
    pools = [
        Pool(
            prompt, tuple(bonbon.Scored(t, s, 1.0) for t, s in zip(texts, (3.0, 1.0), strict=True))
        )
    ]
    settings = Preference(weight=1.0, steps=12, rate=2e-4, bfloat16=False, samples=2)

    def margin() -> float:
        flats = [pasta.parse([*prompt, *t], len(prompt), codec.tags, codec.digits) for t in texts]
        batch = batches.collate([formats.pasta_example(flat) for flat in flats])
        with torch.no_grad():
            best, worst = batches.log_probabilities(model, batch).tolist()
        return best - worst

    before = margin()
    losses = prefer(model, codec, pools, settings, report=lambda line: None)
    # Nothing is gained before the first step: alpha times the best one's nats, and the constant.
    assert losses[0] > 0.995 * bonbon.constant(2) ** 2
    assert min(losses[6:]) < losses[0]
    assert margin() > before
    assert pairs_of(pools, math.inf) == []


def test_samples_are_scored_and_repeat(codec: Codec) -> None:
    model = tiny(codec)
    questions = [task.question for task in islice(tasks.stream(6), 2)]
    kwargs = {"samples": 2, "seed": 4, "baseline": [100, 200]}
    first = sample(model, codec, questions, lambda prompt, text: len(text) / 9, **kwargs)
    assert first == sample(model, codec, questions, lambda prompt, text: len(text) / 9, **kwargs)
    for pool, length in zip(first, (100, 200), strict=True):
        for scored in pool.samples:
            flat = pasta.parse(
                [*pool.prompt, *scored.tokens], len(pool.prompt), codec.tags, codec.digits
            )
            assert scored.speedup == pytest.approx(length / pasta.chain(flat))
    other = run(model, [start("pasta", codec, q) for q in questions], sampler(5))
    assert other[0].tokens != first[0].samples[0].tokens


def settings_for(work: Path) -> Settings:
    shape = LlamaConfig(1, n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_ctx=1024)
    plan = Plan(steps=1, warmup_steps=2, bfloat16=False, matrix_lr=0.02, other_lr=5e-3)
    return Settings(work, work, steps=8, shape=shape, batch_tokens=900, plan=plan, circuits=False)


def test_training_on_tasks_learns_and_resumes(work: Path, codec: Codec) -> None:
    lines: list[str] = []
    settings = settings_for(work)
    model, progress = fit(settings, codec, lines.append)
    assert progress.step == 8
    assert progress.loss < math.log(codec.tokenizer.get_vocab_size())
    halves = settings_for(work / "halves")
    first, _ = fit(halves, codec, lines.append, stop_after=3)
    second, resumed = fit(halves, codec, lines.append)
    assert resumed.step == 8
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    assert not torch.equal(first.token_embd.weight, second.token_embd.weight)


def test_training_on_tasks_goes_on_from_a_file(work: Path, codec: Codec, tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "first")
    model, _ = fit(settings, codec, lambda _: None, stop_after=1)
    export(tmp_path / "task.gguf", model, codec)
    known = restore(tmp_path / "task.gguf")[0].state_dict()
    more = replace(settings_for(tmp_path / "more"), start=tmp_path / "task.gguf", one_each=True)
    begun, _ = fit(more, codec, lambda _: None, stop_after=0)
    for name, weight in begun.state_dict().items():
        assert torch.equal(weight, known[name]), name
    model, progress = fit(more, codec, lambda _: None, stop_after=1)
    assert progress.step == 1
    assert not torch.equal(model.token_embd.weight, known["token_embd.weight"])


def test_laid_out_heads_find_the_fact_of_the_latest_title(codec: Codec) -> None:
    """Before any training: after a grade's point its next digit, among a dozen grades."""
    shape = replace(SHAPE, n_vocab=codec.tokenizer.get_vocab_size())
    model = Llama(shape)
    model.reset(0)

    def accuracy() -> float:
        right = asked = 0
        for task in islice(tasks.stream(5, kind="retrieval"), 4):
            text = f"{task.question}\n{task.answer}"
            ids = codec.encode(text)
            with torch.no_grad():
                best = model(torch.tensor([ids]))[0].argmax(-1)
            point = codec.one(".")
            start = len(codec.encode(f"{task.question}\n"))
            for at in range(start, len(ids) - 1):
                if ids[at] == point and ids[at + 1] in codec.digits:
                    asked += 1
                    right += int(best[at]) == ids[at + 1]
        return right / asked

    before = accuracy()
    lay_out(model, *titles(codec), 0)
    assert accuracy() > 0.4 > 0.2 > before
    with pytest.raises(ValueError, match="width 192"):
        lay_out(tiny(codec), *titles(codec), 0)


def test_a_written_model_comes_back(work: Path, codec: Codec, tmp_path: Path) -> None:
    model = tiny(codec)
    export(tmp_path / "task.gguf", model, codec)
    back, words = restore(tmp_path / "task.gguf")
    text = markup.prompt_text("pasta", next(tasks.stream(3)).question) + "Alice\n\n####<sync/>"
    assert words.encode(text) == codec.encode(text)
    assert words.tags == codec.tags
    assert words.decode(words.encode(text)) == text
    tokens = torch.tensor([codec.encode(text)])
    with torch.no_grad():
        assert float((back(tokens) - model(tokens)).abs().max()) < 0.2


ANSWER = "First of all, the sky is blue.\nSecond of all, the grass is green.\nThat is all now."
GOOD = (
    "<async topic='sky'>First of all, the sky is blue.</async>"
    "<async topic='grass'>\nSecond of all, the grass is green.</async><sync/>\nThat is all now."
)


def test_rules_mark_lines_and_wait_before_what_leans_on_them() -> None:
    pieces = annotate.parse(annotate.by_rules("", ANSWER), ANSWER)
    assert [piece.kind for piece in pieces] == ["block", "block", "sync", "text"]
    for task in islice(tasks.stream(2), 60):
        pieces = annotate.parse(annotate.by_rules("", task.answer), task.answer)
        assert task.dependent != any(piece.kind == "block" for piece in pieces)


@pytest.mark.parametrize(
    ("annotated", "problem"),
    [
        (GOOD.replace("blue", "red"), "not the response"),
        (GOOD.replace("</async>", "", 1), "inside"),
        ("<async topic='a b c d'>" + ANSWER + "</async>", "topic"),
        (ANSWER + "</async>", "closes nothing"),
        ("<async topic='x'>" + ANSWER, "not closed"),
        (f"<async topic='x'>First of all,</async>{ANSWER[13:]}", "fewer"),
    ],
)
def test_malformed_annotations(annotated: str, problem: str) -> None:
    with pytest.raises(annotate.Malformed, match=problem):
        annotate.parse(annotated, ANSWER)


class _Chat(BaseHTTPRequestHandler):
    """Answers with the next of the server's texts; an integer is a status."""

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.server.asked.append(json.loads(self.rfile.read(size)))  # type: ignore[attr-defined]
        answer = self.server.answers.pop(0)  # type: ignore[attr-defined]
        if isinstance(answer, int):
            self.send_error(answer)
            return
        body = answer if isinstance(answer, bytes) else _wrapped(answer)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def _wrapped(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


@pytest.fixture
def chat() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Chat)
    server.answers, server.asked = [], []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def endpoint(server: HTTPServer) -> Endpoint:
    return Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "m", timeout=10, pause=0.0)


def test_annotation_asks_again_after_malformed_answers(chat, tmp_path: Path) -> None:
    chat.answers = ["Sure! " + ANSWER, 503, GOOD, "no", "never", "not at all"]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "p", "response": ANSWER}, {"prompt": "q", "response": ANSWER}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    annotator = annotate.by_endpoint(endpoint(chat))
    counts = annotate.annotate_file(source, out, annotator, report=lambda line: None)
    assert counts == {"annotated": 1, "given up": 1, "already there": 0}
    first, second = read_jsonl(out)
    assert first["annotated"] == GOOD
    assert "not the response" in second["problem"]
    assert "not the response" in chat.asked[1]["messages"][-1]["content"]
    again = annotate.annotate_file(source, out, annotator, report=lambda line: None)
    assert again["already there"] == 2
    assert len(list(read_jsonl(out))) == 2


def test_conversations_are_annotated_as_what_they_are(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."},
             {"role": "user", "content": "Two uses?"}, {"role": "assistant", "content": ANSWER}]
    source.write_text(json.dumps({"messages": turns}) + "\n"
                      + json.dumps({"messages": turns[3:]}) + "\n")
    shown = []

    def annotator(prompt: str, response: str) -> str:
        shown.append(prompt)
        return GOOD

    with pytest.raises(UsageError, match="record 2: begins with an answer"):
        annotate.annotate_file(source, out, annotator, report=lambda line: None)
    assert shown == ["user: Hi.\n\nassistant: Hello.\n\nuser: Two uses?"]
    (chat,) = read_chats(out)
    assert (list(chat.messages), chat.answer, chat.annotated) == (turns[:3], ANSWER, GOOD)


def test_a_dead_endpoint_is_an_error(chat) -> None:
    chat.answers = [500, b"{}", b"no json", 400]
    with pytest.raises(EndpointError, match="JSONDecodeError"):
        endpoint(chat).ask([])
    with pytest.raises(EndpointError, match="400"):
        endpoint(chat).ask([])
    assert chat.answers == []


def test_a_judge_is_asked_in_both_orders(chat) -> None:
    chat.answers = ["A 0.9", "B, 0.5", "A 0.9", "A 0.9", "hm", "B"]
    assert verdicts.compare(endpoint(chat), "p", "mine", "other") == [(True, 0.9), (True, 0.5)]
    assert verdicts.compare(endpoint(chat), "p", "x", "y") == [(True, 0.9), (False, 0.9)]
    assert verdicts.compare(endpoint(chat), "p", "x", "y") == [(True, 1.0)]
    first, second = (asked["messages"][0]["content"] for asked in chat.asked[:2])
    assert first.index("mine") < first.index("other")
    assert second.index("other") < second.index("mine")


def annotated_tasks(tmp_path: Path) -> Path:
    source, out = tmp_path / "tasks.jsonl", tmp_path / "annotated.jsonl"
    annotate.write_tasks(source, 12, 0)
    annotate.annotate_file(source, out, annotate.by_rules, report=lambda line: None)
    return out


@torch.no_grad()
def mean_loss(model: Llama, rows: list[formats.Example]) -> float:
    """Nats per target over all rows."""
    found = [batches.loss_sum(model, batches.collate([row]), bfloat16=False) for row in rows]
    return sum(float(loss) for loss, _ in found) / sum(count for _, count in found)


def test_fine_tuning_learns_and_resumes(codec: Codec, tmp_path: Path) -> None:
    rows = finetune.examples_of(codec, annotated_tasks(tmp_path), 1024, lambda line: None)
    assert len(rows) == 12
    plan = finetune.plan_for(6, rate=5e-3, matrix_rate=0.02)
    whole, halves = tiny(codec), tiny(codec)
    before = mean_loss(whole, rows)
    quiet = {"report": lambda line: None, "batch": 3}
    finetune.finetune(whole, rows, plan, tmp_path / "a.pt", **quiet)
    assert mean_loss(whole, rows) < before - 0.2
    finetune.finetune(halves, rows, plan, tmp_path / "b.pt", stop_after=2, **quiet)
    again = tiny(codec, seed=9)
    finetune.finetune(again, rows, plan, tmp_path / "b.pt", **quiet)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_file_without_annotations_is_refused(codec: Codec, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text('{"prompt": "p", "response": "r", "problem": "x"}\n')
    with pytest.raises(UsageError, match="no usable"):
        finetune.examples_of(codec, path, 1024, lambda line: None)
    path.write_text("nonsense\n")
    with pytest.raises(UsageError, match="line 1"):
        finetune.examples_of(codec, path, 1024, lambda line: None)


def test_the_commands_run_one_after_the_other(codec: Codec, tmp_path: Path) -> None:
    export(tmp_path / "m.gguf", tiny(codec), codec)
    data = tmp_path / "data.jsonl"

    def call(*arguments: str) -> None:
        result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output

    call("annotate", "--rules", "--tasks", "8", "--out", str(data))
    assert len(data.read_text().splitlines()) == 8
    first, second = tmp_path / "sft", tmp_path / "bon"
    model = str(tmp_path / "m.gguf")
    call("pasta-sft", "--data", str(data), "--model", model, "--out", str(first), "--steps", "2")
    tuned = str(first / "pasta-sft.gguf")
    call(
        *("pasta-bonbon", "--model", tuned, "--out", str(second), "--prompts", "2"),
        *("--samples", "2", "--steps", "1", "--rounds", "2"),
    )
    assert restore(second / "pasta-bonbon-2.gguf")[1].tags == codec.tags
    with pytest.raises(UsageError, match="either"):
        CliRunner().invoke(main, ["annotate", "--out", str(data)], catch_exceptions=False)
