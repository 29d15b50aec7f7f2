"""What a real target says and what its draft names on the way, for the emulator.

    python -m benchmarks.paper.record_texts smollm2 smollm2-draft.gguf OUT.npz
    python -m benchmarks.paper.record_texts smollm2 smollm2-draft.gguf OUT.npz paper

Greedy answers of the target to `prompts.CHATS`, or of up to 512 tokens to `prompts.PAPER`, and the
draft's four best tokens with its probabilities at each position of them. `emulation.recorded`
plays them back in virtual time. One context each, a row at a time, so that no setting of a
pipeline plays a part. A small model that decodes greedily ends up in circles, which are easy to
foresee: answers end where one begins.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.methods.prompts import CHATS, CONTINUED, PAPER
from pipeinfer.lab.emulation.recorded import NAMED, Text, save
from pipeinfer.models.locate import find, open_tokenizer
from tests.rig.plain_loop import PlainLoop

#: prompts by kind, and tokens of the longest answers
SETS = {"chats": (CHATS, 192), "paper": (PAPER, 512)}
_SHORTEST = 48  #: shorter answers say little
_CIRCLE = 24  #: tokens that come a second time within four times as many are a circle


def record(target: PlainLoop, draft: PlainLoop, kind: str, prompt: list[int],
           most: int = 192) -> Text | None:
    """The answer to one prompt, None where it is too short."""
    tokens = list(prompt)
    logits = target.decode(tokens, 0)
    while len(tokens) < len(prompt) + most:
        token = int(np.argmax(logits))
        if target.is_eog(token):
            break
        tokens.append(token)
        if circles(tokens[len(prompt):]):
            del tokens[-_CIRCLE:]
            break
        logits = target.decode([token], len(tokens) - 1)
    target.reset()
    if len(tokens) < len(prompt) + _SHORTEST:
        return None
    answers = list(draft.logits_after(prompt, tokens[len(prompt):]))[: len(tokens) - len(prompt)]
    names = np.zeros((len(answers), NAMED), np.int32)
    claims = np.zeros((len(answers), NAMED), np.float32)
    for row, scores in enumerate(answers):
        best = np.argsort(-scores, kind="stable")[:NAMED]
        shares = np.exp(scores - scores[best[0]])
        names[row], claims[row] = best, shares[best] / shares.sum()
    return Text(kind, np.array(prompt, np.int32), np.array(tokens[len(prompt):], np.int32), names,
                claims)


def circles(answer: list[int]) -> bool:
    """Whether the last `_CIRCLE` tokens repeat what was there shortly before."""
    end, at = answer[-_CIRCLE:], len(answer) - _CIRCLE
    return at > 0 and any(answer[k : k + _CIRCLE] == end
                          for k in range(max(0, at - 4 * _CIRCLE), at))


def main() -> None:
    """See the module docstring."""
    model, draft_path, out, name = [*sys.argv[1:], "chats"][:4]
    wishes_of, most = SETS[name]
    path = find(model).path
    target, draft = PlainLoop(path), PlainLoop(draft_path)
    tokenizer = open_tokenizer(path)
    texts = []
    for kind, wishes in wishes_of.items():
        for wish in wishes:
            prompt = tokenizer.encode(wish) if kind == CONTINUED else \
                tokenizer.encode_chat([{"role": "user", "content": wish}])
            text = record(target, draft, kind, list(prompt), most)
            if text is not None:
                texts.append(text)
                right = float(np.mean(text.names[:, 0] == text.answer))
                print(f"{kind}: {len(prompt)} tokens in, {len(text.answer)} out, {right:.2f} named "
                      f"by the draft: {tokenizer.decode(text.answer[:24].tolist())!r}", flush=True)
    save(out, texts)


if __name__ == "__main__":
    main()
