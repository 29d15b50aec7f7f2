"""PROVENANCE.md of the embedded pair, written from the training report.

Does not know: how the numbers came about; it only lays them out. Losses are nats per token,
agreement is the share of positions where the arg-max equals the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAD = """\
# Where the embedded models come from

`target.gguf` and `draft.gguf` were trained from random weights by `python -m pipeinfer.lab.training
embedded`, on two CPU cores, for this package. No other model's weights, outputs or tokenizer went
into them. They exist so that `pipeinfer` runs, and its acceptance is that of real models, without
a download. They complete Python in the manner of the standard library; they know nothing else,
and what they write is not to be relied on.

## Text and licence

The text is the standard library of CPython {python}: its modules, its tests, its language
reference (`pydoc_data/topics.py`), and exchanges made of its functions' docstrings and sources.
It is Copyright Python Software Foundation and contributors, used under the PSF License Version 2;
`LICENSE.txt` beside this file is the licence as that installation carries it. Generated tables,
files that are not UTF-8, and installed packages were left out.

| split/kind | documents | characters |
|---|---|---|
{counts}

The library's modules and topics appear twice in the training stream of {stream:,} tokens. A file
is held out when a hash of its path says so ({held} files, listed at the end); none of
them was trained on, nor a function taken from one.

## Models

| | target | draft |
|---|---|---|
{shapes}

The tokenizer is a byte-level BPE of 4,096 entries, trained on the training split without tests
(GGUF: model `gpt2`, pre-tokenizer `gpt-2`). Id 0 ends and begins a document, 1 and 2 frame a chat
message. Matrices are Q8_0, norms float32.

## Training

Seed {seed}, torch {torch}. Muon for matrices, AdamW for the embedding and norms, one cosine of
the spent time per stage; sequences of 512 tokens, then 1,024, then 2,048.

| stage | steps | tokens seen | minutes |
|---|---|---|---|
{stages}

`draft` trains a draft alone, from random weights: it is there for comparison. `distil` makes the
draft that is shipped. It begins as the target's embedding, final norm, first and last layer, and
trains on text for half of its time, then on text and the target's distribution (weights 0.3, 0.7).
`polish` goes on from there with half the learning rate and weights 0.1, 0.9 throughout.

## Held-out results

Float32 weights, windows of 512 tokens.

| text | tokens | target | draft alone | agreement | draft distilled | agreement |
|---|---|---|---|---|---|---|
{scores}
"""


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write the page for one report of :func:`pipeinfer.lab.training.pair.embedded.run`."""
    corpus = result["corpus"]
    counts = [
        f"| {name} | {row['documents']:,} | {row['characters']:,} |"
        for name, row in corpus.items()
        if isinstance(row, dict)
    ]
    stages = [
        f"| {name} | {row['step']:,} | {row['tokens']:,} | {row['seconds'] / 60:.1f} |"
        for name, row in result["training"].items()
    ]
    models = result["models"]
    shapes = [
        f"| {what} | {models['target'][what]:,} | {models['draft'][what]:,} |"
        for what in models["target"]
    ]
    scores = [
        f"| {kind} | {row['tokens']:,} | {row['target_nats']:.3f} | {row['draft_alone_nats']:.3f} "
        f"| {row['draft_alone_agreement']:.1%} | {row['draft_nats']:.3f} "
        f"| {row['draft_agreement']:.1%} |"
        for kind, row in result["held_out"].items()
        if row
    ]
    text = _HEAD.format(
        python=result["python"],
        torch=result["torch"],
        seed=result["seed"],
        stream=corpus["stream_tokens"],
        held=len(corpus["held_out"]),
        counts="\n".join(counts),
        stages="\n".join(stages),
        shapes="\n".join(shapes),
        scores="\n".join(scores),
    )
    names = "\n".join(f"- {name}" for name in corpus["held_out"])
    path.write_text(f"{text}\n## Held-out files\n\n{names}\n", encoding="utf-8")
