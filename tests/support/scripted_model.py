"""A model that writes an answer of forty items by every method, laid out by hand.

Its weights are a table: what follows a token is said by the token itself, and where that says
nothing by the token one, two or four positions before it, which three attention heads fetch. So a
branch that lacked what it has to see, or saw another thread's cells at those positions, would write
something else. Layers behind the first add nothing; they are there to be split over stages.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

ITEMS, LAYERS, WIDTH, HEADS, HEAD, CODE, CONSTANT = 40, 4, 320, 5, 64, 64, 319
OFFSETS = (1, 2, 4)  #: of the tokens that heads fetch; each has a slot of CODE dimensions
#: kinds of items, with their texts; skeleton's points are titles and what comes before them
KINDS = {"promise": '<promise topic="t{}" tokens=1/>', "body": "x{} ", "title": "title{}",
         "node": "n{} ", "point": "<p{}>", "number": "\n{}. "}
SINGLE = ("####", "%%%%", "......", "\n\n", ":", "<async>", "</async>", "<sync/>", "[Fork]",
          "[Child]", "end", "[pasta]", "[pdos]", "[apar]", "[sot]", "[plain]")
TEMPLATE = ("{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
            "{% for m in messages if m['role'] == 'system' %}{{ m['content'] }}{% endfor %}")
END = 0  #: the token that ends a text
#: what the reader gets
TEXTS = {
    "pasta": "".join(f"x{k} " for k in range(1, ITEMS + 1)) + "end",
    "pdos": "".join(f"\n\n####title{k}:x{k} " for k in range(1, ITEMS + 1)),
    "apar": "".join(f"n{k} x{k} " for k in range(1, ITEMS + 1)),
    "skeleton": "\n".join(f"x{k} " for k in range(1, ITEMS + 1)),
    "plain": "end",
}


def write(path: Path) -> Path:
    """The model as GGUF (float32)."""
    table = _Table()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("scripted")
    writer.add_vocab_size(len(table.tokens))
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(32)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(table.tokens)
    writer.add_token_types(table.kinds)
    writer.add_token_merges(["a a"])
    writer.add_bos_token_id(END)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    for name in ("pasta", "pdos", "apar", "plain", "sot.system"):
        writer.add_string(f"pipeinfer.decompose.{name}", f"[{name.removesuffix('.system')}]")
    writer.add_string("pipeinfer.decompose.sot.outline", "{question}")
    writer.add_string("pipeinfer.decompose.sot.point", "{outline}: {point}")
    for name, data in table.weights().items():
        writer.add_tensor(name, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class _Table:
    """The vocabulary, and what follows what."""

    def __init__(self) -> None:
        self.tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), "aa"]
        self.kinds = [int(gguf.TokenType.CONTROL)] + [int(gguf.TokenType.NORMAL)] * 257
        self._codes = np.zeros((len(self.tokens), CODE), np.float32)
        self._at: dict[object, int] = {"": END}
        for feature, text in enumerate(SINGLE, len(KINDS) + ITEMS):
            self._add(text, text, feature)
        for feature, (kind, text) in enumerate(KINDS.items()):
            for k in range(1, ITEMS + 1):
                self._add((kind, k), text.format(k), feature, len(KINDS) + k - 1)

    def _add(self, name: object, text: str, *features: int) -> None:
        if text not in self.tokens:  # as a colon is
            self.tokens.append(text)
            self.kinds.append(int(gguf.TokenType.USER_DEFINED))
            self._codes = np.concatenate([self._codes, np.zeros((1, CODE), np.float32)])
        self._at[name] = self.tokens.index(text)
        self._codes[self._at[name], list(features)] = 1.0

    def weights(self) -> dict[str, np.ndarray]:
        """The tensors."""
        vocab = len(self.tokens)
        embedding = np.zeros((vocab, WIDTH), np.float32)
        embedding[:, :CODE] = self._codes
        embedding[:, CONSTANT] = 8.0
        found = {"token_embd.weight": embedding, "output_norm.weight": np.ones(WIDTH, np.float32),
                 "output.weight": self._output()}
        for layer in range(LAYERS):
            blank = {"attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH),
                     "attn_output": (WIDTH, WIDTH), "ffn_gate": (32, WIDTH), "ffn_up": (32, WIDTH),
                     "ffn_down": (WIDTH, 32)}
            for name, shape in blank.items():
                found[f"blk.{layer}.{name}.weight"] = np.zeros(shape, np.float32)
            for name in ("attn_norm", "ffn_norm"):
                found[f"blk.{layer}.{name}.weight"] = np.ones(WIDTH, np.float32)
        self._fetch(found)
        return found

    @staticmethod
    def _fetch(weights: dict[str, np.ndarray]) -> None:
        """The first layer's heads look so many positions back, and bring what they find there."""
        query, key, value, output = (weights[f"blk.0.attn_{name}.weight"]
                                     for name in ("q", "k", "v", "output"))
        for head, offset in enumerate(OFFSETS):
            at = head * HEAD
            for pair in range(HEAD // 2):
                angle = offset * 10000.0 ** (-2 * pair / HEAD)
                query[at + 2 * pair, CONSTANT] = key[at + 2 * pair, CONSTANT] = 0.7
                key[at + 2 * pair, CONSTANT] *= math.cos(angle)
                key[at + 2 * pair + 1, CONSTANT] = 0.7 * math.sin(angle)
            for k in range(CODE):
                value[at + k, k] = 1.0
                output[CODE * (1 + head) + k, at + k] = 0.45  # what the norm has made larger

    def _output(self) -> np.ndarray:
        rules = np.zeros((len(self.tokens), WIDTH), np.float32)

        def rule(before: object, then: object, weight: float, slot: int = 0) -> None:
            code = self._codes[self._at[before]]
            row = rules[self._at[then], CODE * slot : CODE * (slot + 1)]
            np.maximum(row, weight * code, out=row)

        def chain(kind: str, last: object, weight: float, slot: int = 0) -> None:
            for k in range(1, ITEMS):
                rule((kind, k), (kind, k + 1), weight, slot)
            rule((kind, ITEMS), last, weight, slot)

        chain("promise", "<sync/>", 4.0)
        rule("<sync/>", "end", 4.0)
        chain("node", "", 1.0, slot=1)
        chain("title", "%%%%", 1.0, slot=3)
        for k in range(1, ITEMS + 1):
            body = ("body", k)
            rule(("promise", k), body, 1.0, slot=1)
            rule(("title", k), body, 1.0, slot=1)
            rule(("point", k), body, 1.0, slot=1)
            rule(("node", k), body, 1.0, slot=2)
            rule(("number", k), ("point", k), 4.0)
            rule(("point", k), ("number", k + 1) if k < ITEMS else "", 4.0)
        self._whole("title", ":", rules)
        self._whole("node", "[Fork]", rules)
        self._whole("body", "", rules)
        rule("<async>", "</async>", 20.0, slot=1)
        for text, then in (("[pasta]", ("promise", 1)), ("[pdos]", "####"), ("[apar]", ("node", 1)),
                           ("[plain]", "end"), ("[sot]", ("number", 1))):
            rule(text, then, 0.5 if text == "[sot]" else 8.0)
        rule("[pdos]", ("title", 1), 2.0, slot=1)
        rule("end", "", 8.0)
        return rules

    def _whole(self, kind: str, then: str, rules: np.ndarray) -> None:
        """After any item of a kind."""
        rules[self._at[then], list(KINDS).index(kind)] = 8.0
