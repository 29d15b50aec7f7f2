"""Nothing that is read can run code, nothing comes from elsewhere, secrets stay where they are."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import resource
import signal
import socket
import tempfile
import time
import tomllib
from pathlib import Path

import click
import pytest
import requests

from pipeinfer.cli.options import parse
from pipeinfer.errors import ModelError, RequestError, UsageError
from pipeinfer.models import llama_rules
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.text import chat_template, helper
from pipeinfer.server import middleware
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.server_peer import MODEL, Front, settings_of

ROOT = Path(__file__).resolve().parents[1]
WEB = ROOT / "pipeinfer" / "server" / "web"
SOURCES = sorted(path for folder in ("pipeinfer", "benchmarks", "launch")
                 for path in (ROOT / folder).rglob("*.py")
                 if ROOT / "benchmarks" / "results" not in path.parents)  # what benchmarks fetched
SECRET, KEY = "xyzzy-my-secret-prompt", "sk-plugh-0123456789"

# --- source -----------------------------------------------------------------------------------

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal",
           "pickletools", "copyreg", "xmlrpc", "telnetlib", "ftplib", "imp"}
CALLS = {"eval", "exec", "__import__", "os.system", "os.popen", "torch.load", "torch.save",
         "torch.jit.load", "yaml.load", "pd.read_pickle", "tempfile.mktemp"}
#: the same in a program that a source has as a text
IN_TEXT = re.compile(r"(?<![\w.])(?:exec|eval)\((?!\))")
#: methods of mpi4py that pickle; those that do not begin with a capital letter
PICKLING = {"send", "isend", "ssend", "bsend", "recv", "irecv", "sendrecv", "bcast", "scatter",
            "gather", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan", "mprobe",
            "improbe"}
COMMUNICATORS = {"comm", "_comm", "COMM_WORLD", "COMM_SELF", "world", "near", "intercomm"}


def dotted(node):
    """The name of what is called, like os.system, with ? for what has none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def dangers(source):
    """What in a source could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [
                node.module or ""]
            yield from (n for n in names if n.split(".")[0] in MODULES)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # for another process
            yield from (call[0] for call in IN_TEXT.finditer(node.value))
        if not isinstance(node, ast.Call):
            continue
        name, keywords = dotted(node.func), {k.arg: k.value for k in node.keywords}
        if name in CALLS or (name == "compile" and isinstance(node.func, ast.Name)):
            yield name
        if name in ("np.load", "numpy.load") and not _is(keywords.get("allow_pickle"), False):
            yield f"{name} without allow_pickle=False"
        if _is(keywords.get("allow_pickle"), True) or _is(keywords.get("shell"), True):
            yield f"{name}({', '.join(map(str, keywords))})"
        if "trust_remote_code" in keywords and not _is(keywords["trust_remote_code"], False):
            yield "trust_remote_code"
        owner, _, method = name.rpartition(".")
        if method in PICKLING and owner.split(".")[-1] in COMMUNICATORS:
            yield f"{name}, which pickles"


def _is(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def test_no_process_imports_from_the_current_folder():
    """Beside a checkout, such as in the home directory that has it, its folder would be taken for
    the package; and a folder that was downloaded could have a package of this name."""
    ours = [path for path in SOURCES if "benchmarks" not in path.parts]
    scripts = [path for path in (ROOT / "launch").iterdir() if path.is_file()]
    found = [path.name for path in ours if re.search(r'sys\.executable,\s+"-m"', path.read_text())]
    found += [path.name for path in scripts if re.search("python3? -m pipeinfer", path.read_text())]
    assert found == []


def test_the_sandboxes_do_not(tmp_path, monkeypatch):
    (tmp_path / "pipeinfer").mkdir()
    (tmp_path / "pipeinfer" / "__init__.py").write_text("raise SystemExit('from here')")
    monkeypatch.chdir(tmp_path)
    chat_template._helper.close()
    assert chat_template.render("{{ 1 + 1 }}", {}) == "2"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_source_runs_what_it_reads(path):
    assert list(dangers(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import joblib.x", "eval('1')", "exec(x)",
    "torch.load(p, weights_only=True)", "np.load(p)", "np.load(p, allow_pickle=True)",
    "subprocess.run(x, shell=True)", "A.from_pretrained(p, trust_remote_code=True)",
    "__import__(name)", "comm.send(x, 1)", "self.comm.bcast(x)", "MPI.COMM_WORLD.gather(x)",
    "os.system(x)", "yaml.load(f)", "run(f'import {name}\\nexec(compile(text))')",
])
def test_the_walk_finds_what_it_looks_for(source):
    assert len(list(dangers(source))) >= 1


def test_the_walk_lets_the_rest_pass():
    assert not list(dangers("np.load(p, allow_pickle=False)\ncomm.Isend([x], 1)\nport.send(1)\n"
                            "re.compile('x')\nmodel().eval()\nsubprocess.run(['ls'])"))


def test_weights_come_from_gguf_and_safetensors_alone():
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pytorch_model|\.ckpt\b|from_pretrained", text), path


# --- model files ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("tiny") / "m.gguf", RandomSpec(n_layer=2))


@pytest.mark.parametrize(("key", "value"), [
    ("llama.rope.dimension_count", 15), ("llama.attention.head_count", 3),
    ("llama.attention.head_count_kv", 3), ("llama.attention.head_count_kv", 0),
    ("llama.attention.head_count", 2**31), ("llama.context_length", 0),
])
def test_sizes_that_would_end_the_process_are_refused(tiny, tmp_path, key, value):
    raw, entry = tiny.read_bytes(), ModelFile(tiny).raw_entry(key)
    changed = entry[:-4] + value.to_bytes(4, "little")
    path = tmp_path / "changed.gguf"
    path.write_bytes(raw.replace(entry, changed, 1))
    with pytest.raises(ModelError, match=re.escape("changed.gguf")):
        llama_rules.check_file(path)
    llama_rules.check_file(tiny)


@pytest.mark.parametrize("path", sorted(MODEL.parent.glob("*.gguf")), ids=lambda p: p.name)
def test_the_embedded_models_pass(path):
    llama_rules.check_file(path)


# --- chat templates ---------------------------------------------------------------------------


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ 10 ** (10 ** 10) }}",
    "{{ 'a' * 10**9 }}", "{{ '%1000000000d' % 3 }}", "{{ '{:1000000000}'.format(3) }}",
    "{{ 'x'|center(10**9) }}", "{{ 'x'.ljust(10**9) }}", "{{ range(10**9) }}", "{{ [1] * 10**9 }}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}", "{{ 'aaaa'|replace('a', 'b' * 10**6)|replace('b', 'c' * 10**6) }}",
    "{% include '/etc/passwd' %}", "{{", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('no') }}",
])
def test_a_template_can_neither_reach_out_nor_fill_the_memory(template):
    start = time.monotonic()
    with pytest.raises(RequestError, match="chat template") as caught:
        chat_template.render(template, {"messages": []})
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 30


def test_a_template_that_goes_on_for_ever_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    with pytest.raises(RequestError, match="takes longer"):
        chat_template.render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
                         "{% endfor %}", {})


def test_a_template_that_ends_its_process_ends_nothing_else():
    with pytest.raises(RequestError, match="chat template"):
        chat_template.render("{{ [1] * 10**9 }}", {})
    assert chat_template.render("{{ x }}", {"x": "\ud83d"}) == "\ud83d"
    with pytest.raises(RequestError, match="exceeds"):
        chat_template.render("{{ 'ab' * n }}", {"n": 40 << 20})


def test_an_interrupt_leaves_no_answer_for_the_next(monkeypatch):
    receive = helper.Helper._receive

    def interrupted(self, seconds):
        raise KeyboardInterrupt

    assert chat_template.render("a", {}) == "a"
    monkeypatch.setattr(helper.Helper, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chat_template.render("b", {})
    monkeypatch.setattr(helper.Helper, "_receive", receive)
    assert chat_template.render("c", {}) == "c"


def test_what_templates_of_models_do_still_works():
    text = chat_template.render(
        "{% for m in messages %}{{ loop.index }} {{ m.role|upper }}: {{ m['content']|trim }}\n"
        "{% endfor %}{{ tools|tojson(indent=2) }} {{ '%02d' % 7 }} {{ '{:>4}'.format('x') }} "
        "{{ 'a-b'.split('-')|join('+') }} {{ 'abc'|replace('b', 'x') }} {{ strftime_now('%Y')|int "
        "> 2000 }} {{ 2 ** 10 }}",
        {"messages": [{"role": "user", "content": " é "}], "tools": [{"a": "ü"}]})
    assert text == ('1 USER: é\n[\n  {\n    "a": "ü"\n  }\n] 07    x a+b axc True 1024')


# --- the page ---------------------------------------------------------------------------------


def test_the_page_names_nothing_outside_itself():
    for path in (path for path in WEB.iterdir() if path.is_file()):
        text = path.read_text(encoding="utf-8")
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", text))
        assert not {url for url in found if "www.w3.org" not in url}, (path, found)
        assert not re.search(r"\beval\(|new Function|innerHTML|outerHTML|document\.write|@import|"
                             r"insertAdjacentHTML|javascript:", text), path
    for path in WEB.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        assert not re.search(r"\son\w+=|\sstyle=|<style|<iframe|<script>|<object|<embed", page)
        for name in re.findall(r'(?:src|href)="([^"]+)"', page):
            known = name.startswith(("#", "data:")) or name in (".", "status")
            assert known or (WEB / name).is_file(), name


def test_what_the_page_takes_from_others_is_as_it_was_published():
    vendored = WEB / "vendor"
    listed = tomllib.loads((vendored / "VENDORED.toml").read_text(encoding="utf-8"))
    assert set(listed) == {path.name for path in vendored.glob("*.js")}
    for name, about in listed.items():
        assert hashlib.sha256((vendored / name).read_bytes()).hexdigest() == about["sha256"], name
        assert (vendored / name).with_suffix(".LICENSE.txt").stat().st_size > 500


def test_the_policy_is_strict():
    rules = dict(rule.strip().split(" ", 1) for rule in middleware.POLICY.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["trusted-types"] == "dompurify"
    assert "unsafe" not in middleware.POLICY
    assert "*" not in middleware.POLICY


# --- a server's keys and prompts --------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded():
    """A server with a key. log: the file that its standard error goes to."""
    log = tempfile.TemporaryFile()
    kept = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        front = Front(MODEL, keys=[KEY, "other"], log_requests=True, client_timeout=2.0)
        front.ready()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    front.log = log
    yield front
    front.close()
    log.close()


def said(front):
    front.log.seek(0)
    return front.log.read().decode("utf-8", "replace")


def test_no_prompt_is_logged(guarded):
    right = {"Authorization": f"Bearer {KEY}"}
    bodies = [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 2}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": -1}),
        ("/v1/completions", {"prompt": SECRET, "unknown": SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}],
                                  "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
        ("/tokenize", {"content": SECRET}), ("/apply-template", {"messages": SECRET}),
    ]
    for path, body in bodies:
        assert guarded.post(path, body, headers=right).status_code in (200, 400)
    requests.post(guarded.url + "/tokenize", f'{{"content": "{SECRET}', headers=right, timeout=10)
    with guarded.connect() as sock:
        sock.sendall(f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{SECRET}\r\n\r\n".encode())
        sock.recv(4096)
    text = said(guarded)
    assert "POST /v1/completions 200" in text  # it does log, where it was asked to
    assert SECRET not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("headers", [
    {}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer "},
    {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"},
    {"Authorization": f"Bearer {KEY[:-1]}"}, {"Authorization": f"Bearer {KEY}x"},
    {"x-api-key": "wrong"}, {"x-api-key": ""},
    {"Authorization": "Bearer wrong", "x-api-key": KEY},
], ids=lambda headers: " ".join(headers))  # ids stand in the environment: no key in one
def test_only_a_whole_key_opens(guarded, headers):
    answer = guarded.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "wrong" not in answer.text


def test_a_key_opens_and_shows_nowhere(guarded):
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY},
                    {"authorization": "bearer other"}):
        assert guarded.get("/v1/models", headers=headers).status_code == 200
    assert [guarded.get(path).status_code for path in ("/", "/metrics", "/pipeline")] == [
        200, 401, 401]
    guarded.get("/v1/models", headers={"Authorization": f"Bearer {KEY}nearly"})
    shown = [said(guarded), guarded.get("/health").text]
    for path in ("/metrics", "/props", "/slots", "/openapi.json"):
        shown.append(guarded.get(path, headers={"x-api-key": KEY}).text)
    with contextlib.suppress(FileNotFoundError):
        process = Path("/proc") / str(guarded.child.process.pid)
        shown += [(process / name).read_bytes().decode() for name in ("cmdline", "environ")]
    assert all(KEY not in text for text in shown)
    assert KEY not in repr(settings_of("m", keys=(KEY,)))


def test_every_key_is_compared_in_whole_whatever_was_sent(monkeypatch):
    compared = []
    monkeypatch.setattr(middleware.hmac, "compare_digest",
                        lambda a, b: compared.append((a, b)) or a == b)
    guard = middleware.Guard(None, settings_of("m", keys=(KEY, "short")), frozenset(), {})
    for given in ({}, {b"x-api-key": b"short"}, {b"authorization": b"Bearer " + KEY.encode()}):
        compared.clear()
        with contextlib.suppress(middleware.ApiError):
            guard._check_key("/v1/models", given)
        assert len(compared) == 2
        assert {len(side) for pair in compared for side in pair} == {64}


def test_a_key_in_a_bad_place_is_not_repeated(tmp_path, monkeypatch):
    file = tmp_path / "p.toml"
    for text in (f'api-key = "{KEY}"', f'api-key = ["{KEY}", 5]', f'api-key = {{a = "{KEY}"}}',
                 f'api-key = ["{KEY}\\u0000"]'):
        file.write_text(text)
        with pytest.raises((UsageError, click.UsageError)) as caught:
            parse(["--config", str(file)])
        assert KEY not in f"{caught.value} {getattr(caught.value, 'message', '')}"
    file.write_text(f'api-key = ["{KEY}"]')
    assert KEY not in parse(["--config", str(file)]).show()
    monkeypatch.setenv("PIPEINFER_API_KEY", KEY)
    assert KEY not in parse([]).show()


# --- a client that takes its time -------------------------------------------------------------


@pytest.mark.parametrize(("begin", "answer"), [
    (b"", b""), (b"POST /tok", b""),
    (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nA: b\r\n", b""),
    (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nx-api-key: other\r\n"
     b"Content-Length: 99\r\n\r\n{", b"HTTP/1.1 408 "),
], ids=["nothing", "line", "headers", "body"])
def test_who_sends_nothing_more_is_let_go(guarded, begin, answer):
    assert guarded.raw(begin)[:13] == answer


@pytest.mark.parametrize("raw", [
    b"X: " + b"y" * 200_000 + b"\r\n\r\n", b"".join(b"X-%d: y\r\n" % i for i in range(20_000)),
], ids=["long", "many"])
def test_a_flood_of_headers_ends_the_connection(guarded, raw):
    with guarded.connect() as sock, \
            contextlib.suppress(ConnectionError):
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + raw)
        assert b" 400 " in sock.recv(4096).split(b"\r\n")[0]
    assert guarded.get("/health").status_code == 200


def test_chunks_that_lie_leave_no_traceback(guarded):
    for chunk in (b"zz\r\nx", b"-1\r\n", b"5\r\nab", b"f" * 40 + b"\r\n", b"1;" + b"x" * 99_999):
        with guarded.connect() as sock, \
                contextlib.suppress(ConnectionError):
            sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nx-api-key: other\r\n"
                         b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    assert "Traceback" not in said(guarded)


def test_connections_have_a_number():
    """Those that wait with nothing to say count, too."""
    most = 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < most + 500:
        pytest.skip(f"this user may open {hard} files")
    with contextlib.closing(Front(MODEL, client_timeout=60.0)) as front:
        front.ready()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most + 500), hard))
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(front.connect()) for _ in range(most)]
            assert len(opened) == most
            front.until(lambda: front.get("/health").status_code == 503)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        front.until(lambda: front.get("/health").status_code == 200)


# --- the table of threats ---------------------------------------------------------------------

ROWS = [re.split(r"(?<!\\)\|", line)[1:-1] for line in
        (ROOT / "docs" / "security.md").read_text(encoding="utf-8").partition("## Threats")[2]
        .partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]


def test_there_is_a_table_of_threats():
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_every_threat_names_a_test_that_is_there(row):
    nodes = re.findall(r"`([\w/.]+)::(\w+)`", row[-1])
    assert nodes, row
    for file, name in nodes:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        (found,) = [node for node in tree.body
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    and node.name == name]
        assert not [mark for mark in map(dotted, map(_called, found.decorator_list))
                    if mark in ("pytest.mark.skip", "pytest.mark.xfail",
                                "pytest.mark.full")]


def _called(decorator):
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def test_a_helper_that_does_not_read_is_late_and_replaced():
    """A pipe holds 64 KiB; more would be written for ever."""
    assert chat_template.render("a", {}) == "a"
    process = chat_template._helper._process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(helper.HelperLate, match="not taken within"):
        chat_template._helper.ask({"template": "x" * 400_000}, 0.2)
    assert process.poll() is not None
    assert chat_template.render("b", {}) == "b"
