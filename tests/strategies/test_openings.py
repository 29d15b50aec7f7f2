"""How responses in threads begin: once, with text; what goes on from there needs no template."""

from __future__ import annotations

import pytest

from pipeinfer.config import SpeculationConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.server.frames import FROM_CLIENT, HEADER, Submit, decode, encode
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers import pdos, prompts, skeleton
from pipeinfer.strategies.decomposers.base import MAIN, Fork, Specification
from pipeinfer.strategies.decomposers.prompts import (
    decomposer_factory,
    opening,
    texts_of,
    vocabulary_of,
)
from tests.kit.threaded import EOS, reference

QUESTION = "What {outline} is {point} and why?"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
OUTLINE = "1. First thing\n2. Second {index} thing"


@pytest.fixture(scope="module", params=["task", "target"])
def model(request):
    path = EMBEDDED / f"{request.param}.gguf"
    tokenizer = open_tokenizer(path)
    yield tokenizer, texts_of(path)
    tokenizer.close()


def sent(opened):
    """What arrives of an opening in rank 0's process."""
    frame = Submit(1, opened.prompt, 9, SamplingParams(), decompose=opened.decompose)
    got = decode(encode(frame)[HEADER.size :], FROM_CLIENT)
    assert got == frame
    return got.decompose


def as_text(tokenizer, texts, name, content, default="", begun=""):
    """Tokens of the conversation with this last message, rendered as a whole."""
    system = {"role": "system", "content": texts[name]} if name in texts else MESSAGES[0]
    chat = tokenizer.apply_chat([system, {"role": "user", "content": content + default}])
    chat += begun
    return tuple(tokenizer.encode(chat, special=True))


def test_prompts_ask_for_their_method(model):
    tokenizer, texts = model
    assert opening(tokenizer, texts, "", MESSAGES) == prompts.Opening(
        as_text(tokenizer, texts, "plain", QUESTION))
    for method in ("pasta", "pdos", "apar"):
        more = pdos.TEXT if method == "pdos" and method not in texts else ""
        assert "Otherwise, give a complete" in more or not more
        opened = opening(tokenizer, texts, method, MESSAGES)
        assert opened.prompt == as_text(tokenizer, texts, method, QUESTION, more)
        assert sent(opened) == Specification(method)
    assert opening(tokenizer, texts, "cod", MESSAGES) == prompts.Opening(
        as_text(tokenizer, texts, "cod", QUESTION, pdos.CHAIN_OF_DRAFT.text))  # an ordinary one
    drafts = opening(tokenizer, texts, "cod-pdos", MESSAGES)
    assert drafts.prompt == as_text(tokenizer, texts, "cod-pdos", QUESTION, pdos.DRAFTS.text)
    assert sent(drafts) == Specification("cod-pdos")
    plain = opening(tokenizer, texts, "pdos-plain", MESSAGES)  # the paper's "Normal"
    assert plain == prompts.Opening(opening(tokenizer, texts, "pdos", MESSAGES).prompt)
    with pytest.raises(UsageError, match="magic"):
        opening(tokenizer, texts, "magic", MESSAGES)


def test_a_skeletons_points_are_what_the_template_makes_of_them(model, monkeypatch):
    tokenizer, texts = model
    opened = opening(tokenizer, texts, "skeleton", MESSAGES)
    outline = texts.get("sot.outline", skeleton.OUTLINE).replace("{question}", QUESTION)
    lead = "sot.outline" not in texts  # the published prompts begin the answers
    assert opened.prompt == as_text(tokenizer, texts, "sot.system", outline,
                                    begun="1." * lead)
    wanted = []
    for index, point in ((1, "First thing"), (2, "Second {index} thing")):
        parts = {"question": QUESTION, "outline": OUTLINE, "index": str(index), "point": point}
        wanted.append(as_text(tokenizer, texts, "sot.system",
                              texts.get("sot.point", skeleton.POINT).format(**parts),
                              begun=f"{index}. {point}" * lead))
    plain = as_text(tokenizer, texts, "plain", QUESTION)
    monkeypatch.setattr(type(tokenizer), "apply_chat", None)  # nobody needs it any more
    specification = sent(opened)
    made = decomposer_factory(tokenizer, SpeculationConfig(), specification, len(opened.prompt),
                              n_ctx=512)()
    for token in tokenizer.encode(OUTLINE.removeprefix("1." * lead), add_bos=False):
        assert made.accepted(MAIN, token) == []
    forks = made.ended(MAIN)
    assert [fork.tokens for fork in forks if isinstance(fork, Fork)] == wanted
    assert specification.lead == lead
    assert specification.plain == plain


def test_a_method_needs_its_tokens(model):
    tokenizer, texts = model

    def factory(method):
        return decomposer_factory(tokenizer, SpeculationConfig(), Specification(method), 3,
                                  n_ctx=512)

    with pytest.raises(UsageError, match="it is a prompt"):
        factory("cod")
    for method, spec in registry.decomposers().items():
        if spec.make is None:
            continue
        if "sot.point" in texts or method != "apar":
            assert not factory(method)().complete
        else:
            with pytest.raises(ModelError, match="single tokens"):
                factory(method)
    with pytest.raises(UsageError, match="magic"):
        factory("magic")


def test_pdos_stage_by_stage_on_a_models_own_vocabulary(model):
    """The embedded target has no tokens for the markers: they take several each."""
    tokenizer, texts = model
    opened = opening(tokenizer, texts, "pdos", MESSAGES)
    vocabulary = vocabulary_of(tokenizer)
    marks = pdos.Markers.of(vocabulary)
    assert (len(marks.end) > 1) == ("sot.point" not in texts)
    made = decomposer_factory(tokenizer, SpeculationConfig(), sent(opened), len(opened.prompt),
                              n_ctx=4096)()

    def tokens(*parts):
        return [token for part in parts for token in vocabulary.encode(part)]

    scripts = {MAIN: iter(tokens("See.", "\n", "####", "Cost:", "Time:", "%%%%", " So.")),
               1: iter(tokens(" It is low.", "####")), 2: iter(tokens(" Long.", "####%%%%"))}
    _, text, graph = reference(
        None, opened.prompt, made, 900, 4096,
        lambda graph, row, thread, bans: next(scripts[thread], EOS))
    assert text == b"See.\n\n\n####Cost: It is low.\n\n####Time: Long. So."
    steps = tokens("\n\n", "####", "Cost:", " It is low.", "\n\n", "####", "Time:", " Long.",
                   " So.")
    last = [graph.tokens[cell] for cell in graph.seen[-1]]
    assert last == [*opened.prompt, *tokens("See.", "\n"), *steps]  # stage 3 reads this alone
