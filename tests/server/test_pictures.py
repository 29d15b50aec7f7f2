"""Pictures and sound over HTTP, with the official clients and a real engine: the answer is that of
one plain context, and what cannot be read is one sentence that names the part.

Projector and text model are random, so answers are noise; tests/kit/random_projectors.py says more.
"""

from __future__ import annotations

import base64
import http.server
import os
import signal
import threading
import time

import anthropic
import openai
import psutil
import pytest

from pipeinfer.models.locate import open_tokenizer
from tests.kit.picture_oracle import MARK, plain_tokens
from tests.kit.random_projectors import picture, png, sound, write_family
from tests.kit.served import serve

pytestmark = pytest.mark.slow
COUNT = 12
PICTURES = [picture(64, 48, k) for k in range(3)]
GREEDY = {"temperature": 0, "max_tokens": COUNT}
LESS = {"extra_body": {"temperature": 0}, "max_tokens": COUNT}  # Anthropic's client lacks it


def uri(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data):
    return {"type": "image_url", "image_url": {"url": uri(data), "detail": "auto"}}


def block(data):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                        "data": base64.b64encode(data).decode()}}


def chatml(*turns):
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{text}<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return write_family("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def server(family):
    with serve(1, "-m", str(family[0]), "-c", "2048", "--image-urls", "127.0.0.1",
               "--alias", "m") as served:
        served.wait_until_ready()
        yield served


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as opened:
        yield opened


def answer_of(family, text, data):
    """The text of one plain context's greedy tokens, up to the end of text."""
    tokenizer = open_tokenizer(family[0])
    tokens = plain_tokens(*family, text, data, COUNT)
    end = next((i for i, token in enumerate(tokens) if token in tokenizer.eog_ids), COUNT)
    found = tokenizer.decode(tokens[:end])
    tokenizer.close()
    return found


def same(got, wanted):
    """The end of the text may be a part of a character."""
    assert got.rstrip("\ufffd") == wanted.rstrip("\ufffd")


def ask(client, content, **more):
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": content}], **{**GREEDY, **more})


def figure(server, name):
    found = server.get("/metrics")[1].splitlines()
    return next(float(line.split()[-1]) for line in found if line.startswith(f"{name} "))


def projector_of(server):
    """The projector's process: it descends from the server's."""
    return next(one.pid for one in psutil.Process(server.process.pid).children(recursive=True)
                if "pipeinfer.models.projecting" in one.cmdline())


def test_a_picture_is_answered_as_by_one_plain_context(server, client, family):
    found = ask(client, [{"type": "text", "text": "Look at "}, part(PICTURES[0]),
                         {"type": "text", "text": " now."}])
    text = chatml(("user", f"Look at {MARK} now."))
    same(found.choices[0].message.content, answer_of(family, text, [PICTURES[0]]))
    assert found.usage.prompt_tokens > 16 + 30


def test_a_second_turn_computes_neither_the_picture_nor_its_cells(server, client, family):
    messages = [{"role": "user", "content": [part(PICTURES[1]), {"type": "text", "text": "Hi?"}]}]
    first = client.chat.completions.create(model="m", messages=messages, **GREEDY)
    computed = figure(server, "pipeinfer_pictures_computed_total")
    said = first.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
    second = client.chat.completions.create(model="m", messages=messages, **GREEDY)
    assert figure(server, "pipeinfer_pictures_computed_total") == computed
    assert second.usage.prompt_tokens_details.cached_tokens >= 16 + len("<start_of_image>")
    text = chatml(("user", f"{MARK}Hi?"), ("assistant", said), ("user", "And now?"))
    same(second.choices[0].message.content, answer_of(family, text, [PICTURES[1]]))


def test_equal_prompts_about_other_pictures_are_other_prompts(client, family):
    """Also where a client was answered about one picture just before."""
    found = {ask(client, [part(one), {"type": "text", "text": "?"}]).choices[0].message.content:
             one for one in (*PICTURES, *PICTURES)}
    for said, one in found.items():
        same(said, answer_of(family, chatml(("user", f"{MARK}?")), [one]))


def test_a_stream_begins_before_the_rows_are_there(server, client, family):
    pid = projector_of(server)
    data, text = picture(70, 48, 9), chatml(("user", f"{MARK}."))
    server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [
        block(data), {"type": "text", "text": "."}]}]})  # its size is known now
    os.kill(pid, signal.SIGSTOP)
    try:
        stream = ask(client, [part(data), {"type": "text", "text": "."}], stream=True)
        assert stream.response.status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    with stream:
        same("".join(one.choices[0].delta.content or "" for one in stream if one.choices),
             answer_of(family, text, [data]))


def test_anthropics_client_shows_pictures_also_in_results_of_tools(server, family):
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        messages = [{"role": "user", "content": [
            {"type": "text", "text": "Look: "}, block(PICTURES[0])]}]
        found = client.messages.create(model="m", messages=messages, **LESS)
        text = chatml(("user", f"Look: {MARK}"))
        same(found.content[0].text, answer_of(family, text, [PICTURES[0]]))
        counted = client.messages.count_tokens(model="m", messages=messages)
        usage = found.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        call = {"type": "tool_use", "id": "a", "name": "shot", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": [
            {"type": "text", "text": "done"}, block(PICTURES[2])]}
        shown = client.messages.create(model="m", messages=[
            {"role": "user", "content": "Go"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]}], **LESS)
        other = client.messages.create(model="m", messages=[
            {"role": "user", "content": "Go"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{**result, "content": "done"}]}], **LESS)
        assert shown.usage.input_tokens > other.usage.input_tokens + 16


def test_responses_show_pictures(server, client, family):
    found = client.responses.create(model="m", temperature=0, max_output_tokens=COUNT, input=[
        {"role": "user", "content": [
            {"type": "input_text", "text": "See "},
            {"type": "input_image", "image_url": uri(PICTURES[1]), "detail": "auto"}]}])
    same(found.output_text, answer_of(family, chatml(("user", f"See {MARK}")), [PICTURES[1]]))


def test_no_text_becomes_a_picture(server, client, family):
    """Neither mtmd's mark, nor what the projector writes around a picture."""
    plain = ask(client, f"a {MARK} <start_of_image> b")
    assert plain.usage.prompt_tokens == len(_tokens(family, chatml(
        ("user", f"a {MARK} <start_of_image> b"))))
    found = ask(client, [{"type": "text", "text": f"a {MARK} b "}, part(PICTURES[0])])
    assert plain.usage.prompt_tokens < found.usage.prompt_tokens


def _tokens(family, text):
    tokenizer = open_tokenizer(family[0])
    found = tokenizer.encode(text, special=True)
    tokenizer.close()
    return found


def test_the_template_is_shown_with_marks(server):
    found = server.post("/apply-template", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a "}, part(PICTURES[0])]}]})[1]
    assert found["prompt"] == chatml(("user", f"a {MARK}"))


def test_models_say_what_they_read(server):
    assert server.get("/v1/models")[1]["data"][0]["input_modalities"] == ["text", "image"]


BAD = {
    "no base64": ({"url": "data:image/png;base64,%%"}, "not valid base64"),
    "no data": ({"url": "data:image/png,abc"}, "of the form data:image/png;base64"),
    "a page": ({"url": uri(b"<html>")}, "not a JPEG, PNG, GIF or BMP"),
    "cut off": ({"url": uri(PICTURES[0][:200])}, "cannot be decoded"),
    "a bomb": ({"url": uri(png(60000, 60000, b""))}, "60000 x 60000 pixels"),
    "sound": ({"url": uri(sound(0.1), "audio/wav")}, "takes no sound"),
    "another host": ({"url": "http://169.254.169.254/latest"}, "fetches no pictures from 169"),
    "a file": ({"url": "file:///etc/passwd"}, "not valid base64"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_names_the_part(name, client):
    url, why = BAD[name]
    with pytest.raises(openai.BadRequestError, match=why) as caught:
        ask(client, [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": url}])
    assert "messages.0.content.1: " in caught.value.message


def test_so_many_pictures_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="17 pictures, of 16 at most"):
        ask(client, [part(PICTURES[0])] * 17)


def test_a_picture_that_ends_the_projector_costs_that_request(server, client, family):
    pid, data = projector_of(server), picture(90, 50, 7)
    ask(client, [part(PICTURES[0])])
    os.kill(pid, signal.SIGSTOP)
    failed = []

    def send():
        try:
            ask(client, [{"type": "text", "text": "?"}, part(data)])
        except openai.BadRequestError as error:
            failed.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(1.0)  # it is waited for by now; were it not, the picture would be read
    os.kill(pid, signal.SIGKILL)
    thread.join(30)
    assert "messages.0.content.1: the projector's process ended over it" in failed[0]
    same(ask(client, [{"type": "text", "text": "?"}, part(data)]).choices[0].message.content,
         answer_of(family, chatml(("user", f"?{MARK}")), [data]))


class _Files(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = {"/a.png": (200, PICTURES[0]), "/large": (200, bytes(25_000_000))}.get(
            self.path, (404, b""))
        self.send_response(302 if self.path == "/moved" else found[0])
        if self.path == "/moved":
            self.send_header("Location", "/a.png")
        self.end_headers()
        try:
            self.wfile.write(found[1])
        except OSError:
            pass

    def log_message(self, *_):
        pass


def test_pictures_are_fetched_from_named_hosts_alone(client, family):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{files.server_address[1]}"
        found = ask(client, [{"type": "image_url", "image_url": {"url": f"{base}/a.png"}}])
        same(found.choices[0].message.content,
             answer_of(family, chatml(("user", MARK)), [PICTURES[0]]))
        for path, why in (("gone", "status 404"), ("moved", "status 302"), ("large", "too large")):
            with pytest.raises(openai.BadRequestError, match=why):
                ask(client, [{"type": "image_url", "image_url": {"url": f"{base}/{path}"}}])
        files.shutdown()


def test_a_model_without_a_projector_says_so(family):
    with serve(1, "-m", str(family[0]), "--mmproj", "none", "-c", "512") as served:
        served.wait_until_ready()
        assert served.get("/v1/models")[1]["data"][0]["input_modalities"] == ["text"]
        status, found = served.post("/v1/chat/completions", {"messages": [
            {"role": "user", "content": [part(PICTURES[0])]}]})
        assert status == 400
        assert "messages.0.content.0: this model is served without a projector" \
            in found["error"]["message"]


def test_sound_is_answered_as_by_one_plain_context(tmp_path):
    family, data = write_family("ultravox", tmp_path), sound(0.5)
    with serve(1, "-m", str(family[0]), "-c", "2048") as served:
        served.wait_until_ready()
        assert served.get("/v1/models")[1]["data"][0]["input_modalities"] == ["text", "audio"]
        found = served.post("/v1/chat/completions", {**GREEDY, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Listen: "}, {
                "type": "input_audio", "input_audio": {
                    "data": base64.b64encode(data).decode(), "format": "wav"}}]}]})[1]
        same(found["choices"][0]["message"]["content"],
             answer_of(family, chatml(("user", f"Listen: {MARK}")), [data]))


def test_a_projector_of_another_model_stops_the_start_if_it_was_named(family, tmp_path):
    whole = write_family("ultravox", tmp_path)[1].read_bytes()
    (tmp_path / "mmproj.gguf").write_bytes(whole[:4096])
    with serve(1, "-m", str(family[0]), "--mmproj", str(tmp_path / "mmproj.gguf")) as served:
        assert served.end() != 0
        assert "mmproj.gguf cannot be the projector of" in "".join(served.log)
