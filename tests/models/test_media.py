"""The projector in a process of its own: what it refuses, its end, and its rows of late."""

from __future__ import annotations

import os
import signal
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.config import JobConfig
from pipeinfer.core.types import Media
from pipeinfer.errors import ModelError, RequestError
from pipeinfer.llama import mtmd
from pipeinfer.models import locate, media
from pipeinfer.models.media import Pictures, ProjectorOptions, check, find, joined, nearest
from tests.kit.picture_oracle import MARK, WithHelper
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.random_projectors import (
    FAMILIES,
    SMOLLM2,
    picture,
    png,
    sound,
    write_family,
    write_projector,
)
from tests.kit.sample import examples


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return write_family("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def pictures(gemma):
    found = Pictures(ProjectorOptions(*map(str, gemma), n_ctx=512))
    yield found
    found.close()


def _bomb(n):
    squeeze, row = zlib.compressobj(9), b"\0" + bytes(3 * n)
    return png(n, n, b"".join(squeeze.compress(row) for _ in range(n)) + squeeze.flush())


_GOOD = picture(64, 64)
HOSTILE = {
    "empty": (b"", "not a JPEG"), "text": (b"hello world, no picture", "not a JPEG"),
    "cut": (_GOOD[: len(_GOOD) // 2], "cannot be decoded"), "header": (_GOOD[:18], "cut off"),
    "0 x 0": (png(0, 0, zlib.compress(b"")), "0 x 0 pixels"),
    "60000 x 60000": (png(60000, 60000, zlib.compress(b"x" * 100)), "60000 x 60000 pixels"),
    "bomb": (_bomb(8000), "8000 x 8000 pixels"),
    "noise as JPEG": (b"\xff\xd8\xff\xe0\x00\x10JFIF\0" + bytes(range(1, 250)), "cut off"),
    "JPEG of 40000 x 40000": (b"\xff\xd8\xff\xc0\x00\x11\x08" + struct.pack(">HH", 40000, 40000)
                              + bytes(20), "40000 x 40000"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a JPEG"),
    "PNM": (b"P6 1000000000 1000000000 255\n", "not a JPEG"),
    "GIF": (b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(200), "65535 x 65535"),
    "GIF cut": (b"GIF89a" + struct.pack("<HH", 100, 100) + bytes(9), "cannot be decoded"),
    "WebP": (b"RIFF\0\0\0\0WEBPVP8 ", "WebP picture"), "sound": (sound(0.2), "no sound"),
    "large": (bytes(media.MOST_BYTES + 1), "of 20 MB at most"),
    "BMP": (b"BM" + bytes(12) + struct.pack("<Iii", 40, -70000, 70000), "70000 x 70000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_the_reason(name, pictures):
    data, why = HOSTILE[name]
    with pytest.raises(RequestError, match=why):
        pictures.show(data)


def stop(process):
    """Return when it is stopped: until its other thread sees the signal, it may still answer."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def test_what_ends_the_process_costs_one_picture(pictures, monkeypatch):
    before = pictures.show(_GOOD)
    process = pictures._helper._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = pictures.show(picture(80, 64, 2))  # it is started again
    assert again[1].digest != before[1].digest
    stop(pictures._helper._process)
    monkeypatch.setattr(media, "SECONDS", 0.5)
    with pytest.raises(RequestError, match=r"longer than 0\.5 s"):
        pictures.show(picture(90, 64, 3))
    monkeypatch.undo()
    pictures._cache.clear()
    assert pictures.show(_GOOD)[1].digest == before[1].digest  # equal bits


def test_a_process_that_dies_over_a_picture_is_an_error_that_says_so(pictures):
    pictures.ready()
    stop(pictures._helper._process)  # or it could answer before it dies
    ask = pictures._helper._receive
    pictures._helper._receive = lambda seconds: (pictures.close(), ask(seconds))[1]
    with pytest.raises(RequestError, match="ended over it"):
        pictures.show(_GOOD)


@examples(60)
@given(st.data())
def test_damaged_pictures_never_end_this_process(pictures_of_module, data):
    broken = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 6))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    broken = bytes(broken[: data.draw(st.integers(1, len(broken)))])
    try:
        assert all(np.isfinite(one.rows).all() for one in pictures_of_module.show(broken)
                   if isinstance(one, Media))
    except RequestError:
        pass


@pytest.fixture(scope="module")
def pictures_of_module(gemma):
    found = Pictures(ProjectorOptions(*map(str, gemma), n_ctx=512))
    yield found
    found.close()


def test_rows_of_late_are_not_computed_again(pictures, monkeypatch):
    first = pictures.show(_GOOD)
    assert pictures.show(_GOOD) is first
    assert (pictures.computed, pictures.found) == (1, 1)
    monkeypatch.setattr(media, "_CACHE_BYTES", 1)
    pictures.show(picture(70, 64, 2))
    assert pictures.layout(_GOOD) == pictures.layout(_GOOD) == joined([first])[0]
    assert pictures.computed == 2


def test_a_picture_that_fills_the_context_is_refused_before_it_is_computed(gemma):
    small = Pictures(ProjectorOptions(*map(str, gemma), n_ctx=20))
    with pytest.raises(RequestError, match="places, of 20 that the context has"):
        small.show(_GOOD)
    small.close()


@pytest.mark.parametrize(("text", "kind", "why"), [
    (RandomSpec(n_embd=128), "gemma3", "cannot be the projector of .*n_embd = 128"),
    (None, "idefics3", "puts tokens around a picture that the vocabulary")])
def test_a_projector_of_another_model_is_one_clear_line(text, kind, why, tmp_path):
    shape = next(one.shape for one in FAMILIES.values() if one.shape.kind == kind)
    path = SMOLLM2 if text is None else write_random_model(tmp_path / "model.gguf", text)
    mmproj = write_projector(tmp_path / "mm.gguf", shape, 256 if text else 576)
    found = Pictures(ProjectorOptions(str(path), str(mmproj), n_ctx=512))
    with pytest.raises(RequestError, match=why):
        found.ready()
    found.close()


def test_a_library_without_projectors_is_one_clear_line(monkeypatch, gemma):
    monkeypatch.setitem(mtmd._FUNCTIONS, "no_such_function", (None, ()))
    mtmd._functions.cache_clear()
    try:
        assert "has no projectors" in mtmd.why_missing()
        with pytest.raises(Exception, match="has no projectors"):
            mtmd.Projector(str(gemma[1]), str(gemma[0]), mtmd.Sizes())
    finally:
        mtmd._functions.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "ultravox"])
def test_own_tokens_and_a_picture_alone_are_mtmds_prompt(family, tmp_path):
    from pipeinfer.models.locate import open_tokenizer

    path, mmproj = write_family(family, tmp_path)
    before, after = "Look at ", " and say more."
    with WithHelper(mmproj, path) as projector:
        want, found = projector.prompt(f"{before}{MARK}{after}", [_GOOD])
    pictures = Pictures(ProjectorOptions(str(path), str(mmproj), n_ctx=2048))
    tokenizer = open_tokenizer(path)
    prompt, own = joined([tokenizer.encode(before, special=True), pictures.show(_GOOD),
                          tokenizer.split(after, special=True)])
    pictures.close()
    assert prompt == want
    assert [(one.start, one.rows.tobytes()) for one in own] == [
        (one.start, one.rows.tobytes()) for one in found]


def test_the_nearest_projector_next_to_a_model_is_found(tmp_path):
    for name in ("gemma-3-4b-it-Q4_0.gguf", "mmproj-gemma-3-4b-it-BF16.gguf",
                 "mmproj-gemma-3-4b-it-F16.gguf", "mmproj-gemma-3-12b-it-F16.gguf"):
        (tmp_path / name).write_bytes(b"")
    model = tmp_path / "gemma-3-4b-it-Q4_0.gguf"
    assert find(model, "") == str(tmp_path / "mmproj-gemma-3-4b-it-F16.gguf")
    assert (find(model, "none"), find(model, "x.gguf")) == ("", "x.gguf")
    assert nearest("a.gguf", []) == ""


def test_a_model_whose_pictures_need_more_is_refused_by_name(tmp_path):
    model = write_random_model(tmp_path / "model.gguf", tiny("hunyuan_vl"))
    mmproj = tmp_path / "mmproj.gguf"
    mmproj.write_bytes(b"GGUF")
    config = JobConfig.of(model=str(model))
    assert locate.projector(config, model) is None  # found, and left out
    with pytest.raises(ModelError, match="HunyuanVL stand at a fourth position"):
        locate.projector(config.replace(mmproj=str(mmproj)), model)
    with pytest.raises(ModelError, match=r"missing\.gguf: no such file"):
        locate.projector(config.replace(mmproj="missing.gguf"), model)


@given(st.binary(max_size=64))
def test_headers_of_any_bytes_are_taken_or_refused(data):
    for head in (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM"):
        try:
            assert check(head + data) in ("image", "audio")
        except RequestError:
            pass
