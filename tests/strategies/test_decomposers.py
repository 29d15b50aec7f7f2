"""The methods' own rules: the papers' examples, positions, attention graphs, odd programs."""

from __future__ import annotations

import pytest

from pipeinfer.errors import ModelError
from pipeinfer.strategies.decomposers.apar import Apar
from pipeinfer.strategies.decomposers.base import TokenVocabulary
from pipeinfer.strategies.decomposers.pasta import ASYNC, END_ASYNC, Pasta, Positions, Spacing
from pipeinfer.strategies.decomposers.pdos import Markers, Pdos
from pipeinfer.strategies.decomposers.skeleton import Prompts, Skeleton
from tests.kit.threaded import reference


class Texts:
    """A vocabulary that grows with what it is asked for; token 0 ends a text."""

    def __init__(self, *texts):
        self.texts = [b"", *texts]

    def token(self, text):
        text = text.encode() if isinstance(text, str) else text
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)

    def piece(self, token):
        return self.texts[token]

    def encode(self, text):
        return [self.token(text)]

    def vocabulary(self):
        return TokenVocabulary(self.piece, self.encode)


def scripted(texts, scripts):
    """A model that writes each thread's script, then ends it."""
    written = {}

    def choose(graph, row, thread, bans):
        del graph, row, bans
        at = written[thread] = written.get(thread, -1) + 1
        script = scripts[thread]
        return texts.token(script[at]) if at < len(script) else 0

    return choose


def play(decomposer, texts, prompt, scripts):
    tokens = [texts.token(word) for word in prompt]
    return reference(texts, tokens, decomposer, 10_000, 10_000, scripted(texts, scripts))


def promise(topic, tokens):
    return f'<promise topic="{topic}" tokens={tokens}/>'


def sees(graph, texts, row):
    return [texts.texts[graph.tokens[c]].decode() for c in graph.seen[row]]


# --- PASTA ------------------------------------------------------------------------------------


def test_the_flat_example_of_the_design():
    """docs/algorithms.md 7.5: positions and visible sets, token by token."""
    texts = Texts()
    pasta = Pasta(texts.vocabulary(), start=1, room=1000)
    _, text, graph = play(pasta, texts, ["u"], {
        0: [promise("p", 1), promise("q", 1), "<sync/>", "z"],
        1: ["x", "</async>"], 2: ["y", "</async>"]})
    # rows in the reference's order: a thread is written to its end as soon as it begins
    names = ["u", promise("p", 1), "<async>", "x", "</async>", promise("q", 1), "<async>", "y",
             "</async>", "<sync/>", "z"]
    assert [texts.texts[t].decode() for t in graph.tokens] == names
    assert graph.positions == [0, 1, 2, 3, 4, 12, 13, 14, 15, 23, 24]
    assert [sorted(seen) for seen in graph.seen] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 5], [0, 1, 5, 6],
        [0, 1, 5, 6, 7], [0, 1, 5, 6, 7, 8], list(range(10)), list(range(11))]
    assert text == b"xyz"


def test_a_promise_that_is_too_small_is_seen_all_the_same():
    """With tokens=0 blocks lie where the main thread goes on (docs/algorithms.md 7.4)."""
    texts = Texts()
    pasta = Pasta(texts.vocabulary(), start=1, room=1000)
    _, _, graph = play(pasta, texts, ["u"], {
        0: [promise("p", 0), promise("q", 0), "<sync/>", "z"],
        1: ["x", "</async>"], 2: ["y", "</async>"]})
    at = dict(zip([texts.texts[t].decode() for t in graph.tokens], graph.positions, strict=True))
    assert (at[promise("q", 0)], at["<sync/>"], at["z"], at["y"]) == (2, 3, 4, 4)
    assert sees(graph, texts, len(graph.tokens) - 1).count("</async>") == 2


def test_where_positions_must_rise_the_main_thread_moves_behind_what_it_joins():
    texts = Texts()
    pasta = Pasta(texts.vocabulary(), start=1, room=1000, overlap=False)
    _, _, graph = play(pasta, texts, ["u"], {
        0: [promise("p", 1), promise("q", 0), "<sync/>", "z", promise("r", 1), "<sync/>", "w"],
        1: ["x", "</async>"], 2: [*(f"y{k}" for k in range(9)), "</async>"], 3: ["</async>"]})
    names = [texts.texts[t].decode() for t in graph.tokens]
    at = dict(zip(names, graph.positions, strict=True))
    assert (at[promise("p", 1)], at[promise("q", 0)]) == (1, 12)
    last = max(p for n, p in zip(names, graph.positions, strict=True) if n.startswith("y")) + 1
    assert at["z"] == last + 2
    assert at["w"] == at[promise("r", 1)] + 12  # the last block kept within its promise


def test_figure_2_of_the_paper():
    """Two promises, a sync: who must see whom, and who must not (docs/algorithms.md 7.6)."""
    texts = Texts()
    one, two = promise("coordinates", 4), promise("formula", 2)
    pasta = Pasta(texts.vocabulary(), start=3, room=1000)
    chosen, text, graph = play(pasta, texts, ["Find", " the length of", " the segment?"], {
        0: [one, two, "<sync/>", " The length is", " 5."],
        1: ["To", " find", *(f" a{k}" for k in range(30)), "</async>"],
        2: ["The", *(f" b{k}" for k in range(18)), "</async>"]})
    assert [len(chosen[k]) for k in range(3)] == [5, 33, 20]
    names = [texts.texts[t].decode() for t in graph.tokens]
    row = {name: names.index(name) for name in ("To", " find", "The", two, "<sync/>")}
    prompt = ["Find", " the length of", " the segment?"]
    assert sees(graph, texts, row[" find"]) == [*prompt, one, "<async>", "To", " find"]
    assert sees(graph, texts, row["The"]) == [*prompt, one, two, "<async>", "The"]
    assert sees(graph, texts, row[two]) == [*prompt, one, two]
    everything = sees(graph, texts, row["<sync/>"])
    assert len(everything) == row["<sync/>"] + 1
    assert everything.count("</async>") == 2
    # positions: tags one token each, blocks right behind their promise, main 10 n further
    at = graph.positions
    assert at[names.index(one)] == 3
    assert at[row["To"]] == 5  # <async> stands at 4
    assert at[row[two]] == 3 + 1 + 40
    assert at[row["The"]] == 46
    assert at[row["<sync/>"]] == 44 + 1 + 20
    assert text.startswith(b"To find a0")
    assert text.endswith(b" b17 The length is 5.")


@pytest.mark.parametrize(("spacing", "expected"), [
    (Spacing(Positions.PRED_10X), [1, 12, 33]), (Spacing(Positions.PRED_1X), [1, 3, 6]),
    (Spacing(Positions.FIXED, 40), [1, 42, 83]),
    (Spacing(Positions.ORACLE, lengths=(3, 14)), [1, 5, 20]),
    (Spacing(Positions.ORACLE_10X, lengths=(3, 14)), [1, 12, 23])])
def test_where_the_main_thread_goes_on(spacing, expected):
    texts = Texts()
    pasta = Pasta(texts.vocabulary(), start=1, room=1000, spacing=spacing)
    _, _, graph = play(pasta, texts, ["u"], {
        0: [promise("p", 1), promise("q", 2), "end"], 1: ["x", "</async>"],
        2: [*(f"y{k}" for k in range(12)), "</async>"]})
    names = [texts.texts[t].decode() for t in graph.tokens]
    assert [graph.positions[names.index(name)]
            for name in (promise("p", 1), promise("q", 2), "end")] == expected
    assert pasta.lengths == (3, 14)


@pytest.mark.parametrize(("main", "blocks", "text", "forks"), [
    (["a", "<sync/>", "b"], {}, b"ab", 0),  # nothing to wait for
    (["a", promise("t", 1)], {1: ["x", "</async>"]}, b"ax", 1),  # a promise at the very end
    (["a", '<promise topic="t"', " b"], {}, b'a<promise topic="t" b', 0),  # never completed
    (["a", '<promise topic="t" tokens=x/>', "b"], {}, b'a<promise topic="t" tokens=x/>b', 0),
    (["a", "<promise tokens=1/>", "b"], {}, b"a<promise tokens=1/>b", 0),
    (["a", '<promise topic="t" tokens=9999/>', "b"], {},
     b'a<promise topic="t" tokens=9999/>b', 0),  # beyond the context
    (["a", promise("t", 1), "b"], {1: ["x", promise("u", 1), "<sync/>", "y", "</async>"]},
     b'ax<promise topic="u" tokens=1/><sync/>yb', 1),  # tags inside a block are text
    (["a", promise("t", 1), "b"], {1: ["x", "y"]}, b"axyb", 1),  # an unclosed block
    (["a", promise("t", 1), "b"], {1: ["</async>"]}, b"ab", 1),  # an empty one
    (["a <", 'promise topic="t t" ', "tokens=", "1", "0", "/", "> b"], {1: ["x", "</as", "ync>"]},
     b"a x b", 1),  # tags in pieces
    (["a", "</async>", "<async>", "b"], {}, b"a</async><async>b", 0),
    (["a", '<promise topic="t" tokens=2 />', "b"], {1: ["x", "</async>"]}, b"axb", 1),  # Figure 2
    (["a", '<promise topic="t"/>', "b"], {1: ["x", "</async>"]}, b"axb", 1),  # Figure 1
    (["a", "<promise topic='t' tokens='2'/>", "b"], {1: ["x", "</async>"]}, b"axb", 1),
    (["a", "<promise topic='t\"/>", "b"], {}, b"a<promise topic='t\"/>b", 0),
    (["a", *[promise("t", 1)] * 40, "<sync/>", "b"],
     {k: [f"x{k}", "</async>"] for k in range(1, 41)},
     b"a" + b"".join(b"x%d" % k for k in range(1, 41)) + b"b", 40),  # any number before a sync
])
def test_odd_programs_lose_nothing(main, blocks, text, forks):
    texts = Texts()
    pasta = Pasta(texts.vocabulary(), start=1, room=1000)
    chosen, found, _ = play(pasta, texts, ["u"], {0: main, **blocks})
    assert found == text
    assert len(chosen) == 1 + forks
    assert chosen[0] == [texts.token(word) for word in main]


@pytest.mark.parametrize(("spacing", "expected"), [
    (Spacing(), 42), (Spacing(Positions.PRED_1X), 42), (Spacing(Positions.FIXED, 7), 9),
    (Spacing(Positions.ORACLE, lengths=(302,)), 304)])
def test_a_promise_without_a_length(spacing, expected):
    """As in the paper's Figure 1 and its third oracle: 40 positions unless the rule says how many,
    and the block ends by itself."""
    texts = Texts()
    pasta = Pasta(texts.vocabulary(), start=1, room=9000, spacing=spacing)
    chosen, _, graph = play(pasta, texts, ["u"], {
        0: ['<promise topic="p"/>', "end"], 1: [*(f"w{k}" for k in range(300)), "</async>"]})
    assert len(chosen[1]) == 301
    assert graph.positions[[texts.texts[t] for t in graph.tokens].index(b"end")] == expected


@pytest.mark.parametrize(("attribute", "spacing", "most"), [
    (0, Positions.PRED_10X, 40), (1, Positions.PRED_10X, 40), (3, Positions.PRED_10X, 120),
    (30, Positions.PRED_1X, 120), (3, Positions.FIXED, 120)])
def test_a_block_that_runs_on_ends_at_four_times_its_promise(attribute, spacing, most):
    texts = Texts()
    pasta = Pasta(texts.vocabulary(), start=1, room=9000, spacing=Spacing(spacing))
    chosen, text, graph = play(pasta, texts, ["u"], {
        0: [promise("p", attribute), promise("q", 1), "<sync/>", "z"],
        1: [f"w{k} " for k in range(500)], 2: ["y ", "</async>"]})
    assert len(chosen[1]) == most - 1  # <async> is part of the block
    assert text.decode().split() == [*(f"w{k}" for k in range(most - 1)), "y", "z"]
    assert sees(graph, texts, len(graph.tokens) - 1).count("</async>") == 2


def test_a_block_does_not_go_on_with_the_rest_of_a_promise():
    """The task model wrote `" tokens=3/>` into blocks of answers with twelve items."""
    texts = Texts()
    pasta = Pasta(texts.vocabulary(), start=1, room=1000)
    (fork, _) = pasta.accepted(0, texts.token(promise("p", 1)))
    assert (-1, -1, texts.token('" tokens=')) in fork.bans
    assert (-1, -1, texts.token('" tokens=')) not in pasta.bans


def test_the_interpreter_never_lets_a_model_write_its_own_tags():
    texts = Texts(ASYNC, END_ASYNC)
    pasta = Pasta(texts.vocabulary(), start=1, room=100)
    assert {token for _, _, token in pasta.bans} == {texts.token(ASYNC), texts.token(END_ASYNC)}


# --- PDOS -------------------------------------------------------------------------------------

MARKS = (b"####", b"%%%%", b"......", b"...", b"\n\n", b":", b":\n")


def test_the_worked_example_of_pdos():
    """docs/algorithms.md 8.4: branch positions, common to all, and the sequence that goes on."""
    texts = Texts(*MARKS)
    prompt = [f"p{k}" for k in range(98)]
    pdos = Pdos(texts.vocabulary(), n_prompt=98)
    chosen, text, graph = play(pdos, texts, prompt, {
        0: ["See", ": ", "####", "T1", ":", "T2", "U2", ":", "%%%%", "Done"],
        1: [*(f"x{k}" for k in range(5)), "####"], 2: ["y0", "y1", "####"]})
    names = [texts.texts[t].decode() for t in graph.tokens]
    begin = 100
    first = names.index("x0")
    assert graph.positions[first] == begin + 3
    assert graph.positions[names.index("y0")] == begin + 4
    for name in ("x0", "y0"):
        assert sees(graph, texts, names.index(name))[:begin] == [*prompt, "See", ": "]
    assert not {"y0", "T2"} & set(sees(graph, texts, names.index("x4")))
    assert not {"x0", "T1"} & set(sees(graph, texts, names.index("y1")))
    tail = sees(graph, texts, names.index("Done"))[begin:]
    assert tail == ["\n\n", "####", "T1", ":", *(f"x{k}" for k in range(5)),
                    "\n\n", "####", "T2", "U2", ":", "y0", "y1", "Done"]
    assert len(tail) - 1 == 16
    assert text == b"See: \n\n####T1:x0x1x2x3x4\n\n####T2U2:y0y1Done"
    assert len(chosen) == 3


@pytest.mark.parametrize(("main", "branches", "text"), [
    (["a", ":", "b"], {}, b"a:b"),  # a colon in prose forces nothing
    (["a", "####", "T", "\n\n", "b"], {}, b"a####T\n\nb"),  # a title that does not end
    (["a", "####", "T"], {}, b"a####T"),
    (["a", "####", "%%%%", "b"], {}, b"a####%%%%b"),  # a block without steps
    (["a", "####", "T", ":"], {}, b"a####T:......\n\n####"),  # ends inside a skeleton
    (["a", "####", "T", ":", "%%%%", "b"], {1: ["x"]}, b"a\n\n####T:xb"),  # a step that just ends
    (["####", "T", ":", "%%%%", "b", "####", "S", ":", "%%%%"], {1: ["x", "####"], 2: ["%%%%"]},
     b"\n\n####T:xb\n\n####S:"),  # two blocks, and an empty step
    (["a", "##", "##", "T", ":", " S", " is:\n", "%%", "%%", "b"],
     {1: ["x", "\n##", "##"], 2: ["y", "##", "z", "%", "%%%"]},
     b"a\n\n####T:x\n\n#### S is:\ny##zb"),  # markers in pieces
    (["a", "####", "T", ":", "S", ":", "so", "\n", "b"], {1: ["x"], 2: ["y"]},
     b"a\n\n####T:x\n\n####S:yb"),  # a list of titles that goes over into prose
    (["a", "####", "T", ":", "S", ":", "T", ":", "b"], {1: ["x"], 2: ["y"]},
     b"a\n\n####T:x\n\n####S:yb"),  # one that goes round in circles
    (["#", " Head", "\n", "##", " b"], {}, b"# Head\n## b"),
    (["####", "T", ":", "%%%%", "\n\n####", "%%%%", " b"], {1: ["x"]},
     b"\n\n####T:x b"),  # an end that is written again is no text
])
def test_odd_skeletons_lose_nothing(main, branches, text):
    texts = Texts(*MARKS)
    _, found, _ = play(Pdos(texts.vocabulary(), n_prompt=1), texts, ["u"], {0: main, **branches})
    assert found == text


def test_pdos_says_what_a_vocabulary_lacks():
    class Letters(Texts):
        def encode(self, text):
            return [self.token(letter) for letter in text if letter not in "#%"]

    with pytest.raises(ModelError, match=r"'####', '%%%%';"):
        Markers.of(Letters().vocabulary())


# --- the baselines ----------------------------------------------------------------------------


def test_apar_children_see_earlier_items_and_no_details():
    texts = Texts(b"[Fork]", b"[Child]")
    chosen, text, graph = play(Apar(texts.vocabulary(), n_prompt=1), texts, ["u"], {
        0: ["1. a", "[Fork]", "\n2. b", "[Fork]", "\nend"], 1: [": x"], 2: [": y"]})
    names = [texts.texts[t].decode() for t in graph.tokens]
    assert sees(graph, texts, names.index(": y")) == [
        "u", "1. a", "[Fork]", "\n2. b", "[Fork]", "[Child]", ": y"]
    assert sees(graph, texts, names.index("\nend")) == [
        "u", "1. a", "[Fork]", "\n2. b", "[Fork]", "\nend"]
    assert text == b"1. a: x\n2. b: y\nend"
    assert len(chosen) == 3


def test_a_skeleton_is_expanded_point_by_point():
    texts = Texts()
    asked = []

    def point(outline, number, title):
        asked.append((outline, number, title))
        return (texts.token(f"expand {number}"),)

    prompts = Prompts((texts.token("plain"),), point, lambda number, title: f"{number}. {title}: ")
    scripts = {0: ["1. a", "\n", "2. b b", "\n", "2. c"], 1: ["x"], 2: ["y", "z"]}
    _, text, graph = play(Skeleton(texts.vocabulary(), prompts), texts, ["u"], scripts)
    assert [(number, title) for _, number, title in asked] == [(1, "a"), (2, "b b")]
    assert asked[0][0] == "1. a\n2. b b\n2. c"
    assert text == b"1. a: x\n2. b b: yz"
    names = [texts.texts[t].decode() for t in graph.tokens]
    assert sees(graph, texts, names.index("z")) == ["expand 2", "y", "z"]


@pytest.mark.parametrize(("outline", "text"), [
    (["1. a\n", "2. b\n", *(f" w{k}" for k in range(200))], b"1:x\n2:y"),
    (["1. a", *(f" w{k}" for k in range(200))], b"x")])
def test_an_outline_whose_line_does_not_end_gives_up(outline, text):
    """The good points are expanded; without one the question is answered plainly."""
    texts = Texts()
    prompts = Prompts((texts.token("plain"),), lambda *_: (texts.token("expand"),),
                      lambda number, _: f"{number}:")
    chosen, found, _ = play(Skeleton(texts.vocabulary(), prompts), texts, ["u"],
                            {0: outline, 1: ["x"], 2: ["y"]})
    assert found == text
    assert len(chosen[0]) == 65 + (2 if text == b"1:x\n2:y" else 0)


@pytest.mark.parametrize(("written", "text"), [
    ({}, b"1.a\n2.b\n3.c"), ({2: ["y"]}, b"1.a\n2.by\n3.c"), ({3: ["z"]}, b"1.a\n2.b\n3.cz"),
    ({1: ["x"], 3: ["z"]}, b"1.ax\n2.b\n3.cz")])
def test_a_point_of_which_nothing_is_written_still_shows_its_title(written, text):
    texts = Texts()
    prompts = Prompts((), lambda *_: (texts.token("expand"),),
                      lambda number, title: f"{number}.{title}", "1.")
    scripts = {0: [" a", "\n2. b", "\n3. c"], 1: [], 2: [], 3: [], **written}
    _, found, _ = play(Skeleton(texts.vocabulary(), prompts), texts, ["u"], scripts)
    assert found == text


def test_every_point_of_a_long_outline_is_expanded():
    texts = Texts()
    prompts = Prompts((), lambda *_: (texts.token("expand"),), lambda number, _: f"{number}:")
    scripts = {0: [f"{k}. p\n" for k in range(1, 41)], **{k: [f"x{k}"] for k in range(1, 41)}}
    chosen, text, _ = play(Skeleton(texts.vocabulary(), prompts), texts, ["u"], scripts)
    assert text.decode().split("\n") == [f"{k}:x{k}" for k in range(1, 41)]
    assert len(chosen) == 41


def test_every_fork_gets_its_detail():
    texts = Texts(b"[Fork]", b"[Child]")
    main = [word for k in range(1, 41) for word in (f"n{k}", "[Fork]")]
    chosen, text, _ = play(Apar(texts.vocabulary(), n_prompt=1), texts, ["u"],
                           {0: main, **{k: [f"x{k} "] for k in range(1, 41)}})
    assert text.decode().split() == [f"n{k}x{k}" for k in range(1, 41)]
    assert len(chosen) == 41


def test_without_points_the_question_is_answered_plainly():
    texts = Texts()
    prompts = Prompts((texts.token("plain"),), lambda *_: (), lambda *_: "")
    _, text, graph = play(Skeleton(texts.vocabulary(), prompts), texts, ["u"],
                          {0: ["no list"], 1: ["answer"]})
    assert text == b"answer"
    assert sees(graph, texts, len(graph.tokens) - 1) == ["plain", "answer"]
