"""HTTPS: by files of one's own, and behind nginx with the lines of docs/serving.md."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import openai
import pytest
import requests

from pipeinfer.errors import UsageError
from pipeinfer.server import tls
from pipeinfer.server.frames import Abort
from pipeinfer.transport import http_client
from pipeinfer.transport.http_client import HttpFailure
from tests.kit import launch
from tests.kit.server_peer import MODEL, SECONDS, front

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "kit" / "tls"
KEY, FIRST, SECOND = FILES / "localhost.key", FILES / "localhost-1.pem", FILES / "localhost-2.pem"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
NAME = "llm.example.org"


@pytest.mark.slow
def test_https_by_files_and_nothing_in_plain():
    with front(MODEL, ssl_cert_file=str(FIRST), ssl_key_file=str(KEY), check_hosts=True,
               ready=False) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REQUESTS_CA_BUNDLE", str(FIRST))
            patch.setenv("SSL_CERT_FILE", str(FIRST))
            server.ready()
            answer = server.post("/v1/completions", {"prompt": "x"})
            assert answer.json()["choices"][0]["text"] == "ok"
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0,
                               timeout=SECONDS) as client:
                stream = client.completions.create(model="m", prompt="x", stream=True)
                assert "".join(c.choices[0].text for c in stream) == "ok"
            assert http_client.ask("GET", f"{server.url}/health", timeout=SECONDS).status == 200
            patch.setenv("SSL_CERT_FILE", str(SECOND))
            with pytest.raises(HttpFailure, match="its certificate is not trusted"):
                http_client.ask("GET", f"{server.url}/health", timeout=SECONDS)
        with pytest.raises(requests.exceptions.SSLError):
            requests.get(server.url + "/health", timeout=SECONDS, verify=str(SECOND))
        host, port = server.url.removeprefix("https://").split(":")
        with socket.create_connection((host, int(port)), SECONDS) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            try:
                said = plain.recv(4096)
            except ConnectionResetError:
                said = b""
        assert b"HTTP" not in said
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(FIRST)
        with socket.create_connection((host, int(port)), SECONDS) as raw, \
                old.wrap_socket(raw, server_hostname="localhost") as sock:
            assert sock.version() in ("TLSv1.2", "TLSv1.3")


@pytest.mark.parametrize(("certificate", "key", "says"), [
    (FIRST, "", "go together"), ("", KEY, "go together"),
    ("absent.pem", KEY, "absent.pem cannot be read: No such file"),
    (KEY, KEY, "no certificate with its key"), (FIRST, FIRST, "no certificate with its key"),
    (FIRST, FILES / "encrypted.key", "has a password: write it without one"),
])
def test_files_that_cannot_be_used_are_one_line(certificate, key, says):
    with pytest.raises(UsageError, match=says) as caught:
        tls.check(str(certificate), str(key))
    assert "\n" not in str(caught.value)


@pytest.mark.anyio
async def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(tmp_path, caplog):
    files = tls.Files(str(tmp_path / "c.pem"), str(tmp_path / "k.pem"))
    shutil.copy(FIRST, files.certificate)
    shutil.copy(KEY, files.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE

    async def shown(port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=asking)
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return ssl.DER_cert_to_PEM_cert(found).strip()

    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    renewing = asyncio.create_task(tls.renew(context, files, 0.01))
    async with asyncio.timeout(SECONDS):
        assert await shown(port) == FIRST.read_text().strip()
        Path(files.certificate).write_text("nothing")
        while "the certificate of before stays" not in caplog.text:
            await asyncio.sleep(0.01)
        assert await shown(port) == FIRST.read_text().strip()
        shutil.copy(SECOND, files.certificate)
        while await shown(port) != SECOND.read_text().strip():
            await asyncio.sleep(0.01)
    renewing.cancel()
    server.close()


def lines_of_nginx(server, port, folder):
    """The lines of docs/serving.md with addresses and files of this test, in a whole file."""
    text = (ROOT / "docs" / "serving.md").read_text()
    found = re.search(r"```nginx\n(.*?)```", text, re.S)[1]
    for before, now in (("127.0.0.1:8080", server.url.removeprefix("http://")),
                        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
                        ("/etc/ssl/llm.pem", str(FIRST)), ("/etc/ssl/llm.key", str(KEY))):
        assert before in found
        found = found.replace(before, now)
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in
                    ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    return (f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
            f"events {{}}\nhttp {{ access_log off; {paths}\n{found} }}\n")


def is_open(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_behind_nginx_with_the_lines_of_the_documentation(tmp_path):
    with front(MODEL, check_hosts=True, allow_host=(NAME,)) as server:
        port = launch.free_port()
        (tmp_path / "nginx.conf").write_text(lines_of_nginx(server, port, tmp_path))
        with subprocess.Popen([NGINX, "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path),
                               "-e", str(tmp_path / "error.log")]) as nginx:
            try:
                server.until(lambda: is_open(port))
                check_through(server, f"https://localhost:{port}")
            finally:
                nginx.terminate()
                nginx.wait(SECONDS)


def check_through(server, url):
    known = {"verify": str(FIRST), "timeout": SECONDS, "headers": {"Host": NAME}}
    assert requests.get(f"{url}/health", **known).json()["status"] == "ok"
    assert requests.get(f"{url}/metrics", **known).status_code == 403
    assert requests.get(f"{url}/health", **{**known, "headers": {"Host": "evil.example"}}
                        ).status_code == 403
    assert requests.post(f"{url}/tokenize", data=b"x" * (5 << 20), **known).status_code == 413
    server.peer.answer = lambda frame: server.peer.say(frame.id, "ok", None)  # and no end
    with requests.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}, stream=True,
                       **known) as answer:
        line = next(line for line in answer.iter_lines() if line)
        assert b'"ok"' in line  # though the answer goes on: nothing is held back
    assert server.peer.wait_for(Abort).reason == "disconnected"

