"""Tests downloading, from a server on this machine: whole corpora in miniature, wrong files, and dead sources."""

import dataclasses
import hashlib
import http.server
import os
import re
import threading

import pytest
import requests

from support import miniature
from support.published_corpora import contents, read
from txl_jax.config import CorpusName
from txl_jax.data import prepare
from txl_jax.data.published import CORPORA, Remote
from txl_jax.errors import UserError

pytestmark = pytest.mark.full
PTB_FILES = {f"ptb.{split}.txt": text for split, text in miniature.texts(CorpusName.PTB).items()}


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the server's folder, and keeps what it was asked."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, directory=args[2].folder, **kwargs)

    def log_message(self, *args):
        pass

    def send_response(self, code, message=None):
        self.server.asked.append(f"{self.command} {self.path}")
        super().send_response(code, message)


@pytest.fixture
def server(tmp_path):
    """A running server of the folder `served`, with its URL and the requests that it had."""
    (tmp_path / "served").mkdir()
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.folder, running.asked = tmp_path / "served", []
    running.url = f"http://127.0.0.1:{running.server_port}/"
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """Requests to this machine go without the proxy that the environment may name, and nothing else is."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    send = requests.Session.send

    def local(session, request, **options):
        assert request.url.startswith("http://127.0.0.1:"), request.url
        return send(session, request, **options)

    monkeypatch.setattr(requests.Session, "send", local)


@pytest.fixture
def source(server, monkeypatch):
    """Serves files and makes them a corpus's sources."""

    def set_sources(name, *sources):
        row = dataclasses.replace(miniature.corpus(name), sources=sources)
        monkeypatch.setitem(CORPORA, name, row)

    return set_sources


def serve(server, file, content):
    (server.folder / file).write_bytes(content)
    return miniature.remote(file, content, server.url)


def left_in_the_cache(tmp_path):
    """Files that a download would leave."""
    found = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "txl" not in path.name]
    return [path for path in found if path.parent.name != "1.0.0"]


@pytest.mark.parametrize("name", miniature.NAMES)
def test_a_corpus_is_downloaded_once(name, server, source, tmp_path):
    file = miniature.OFFICIAL[name]
    source(name, (serve(server, file, miniature.official(name)),))
    assert contents(read(name, tmp_path)) == miniature.texts(name)
    assert server.asked == [f"HEAD /{file}", f"GET /{file}"]
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [f".txl_{name}.lock", f"txl_{name}"], "no copy is kept"
    assert not (tmp_path / "data").exists()
    read(name, tmp_path)
    assert len(server.asked) == 2


def test_a_source_of_several_files(server, source, tmp_path):
    source(CorpusName.PTB, tuple(serve(server, file, content) for file, content in PTB_FILES.items()))
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)
    assert sorted(server.asked) == sorted(["HEAD /ptb.train.txt", *(f"GET /{file}" for file in PTB_FILES)])


@pytest.mark.parametrize("dead", ["nothing listens", "not found", "other file", "other size", "no archive"])
def test_the_next_source_is_taken(dead, server, source, tmp_path):
    whole = miniature.official(CorpusName.ENWIK8)
    good = serve(server, "enwik8.zip", whole)
    bad = {
        "nothing listens": miniature.remote("enwik8.zip", whole),
        "not found": miniature.remote("absent.zip", whole, server.url),
        "other file": dataclasses.replace(serve(server, "other.zip", b"x" * len(whole)), sha256=good.sha256),
        "other size": Remote(serve(server, "short.zip", whole[:-1]).url, size=len(whole)),
        "no archive": Remote(serve(server, "page.zip", b"<html>sign in</html>").url),
    }[dead]
    source(CorpusName.ENWIK8, (bad,), (good,))
    assert contents(read(CorpusName.ENWIK8, tmp_path)) == miniature.texts(CorpusName.ENWIK8)
    assert "GET /enwik8.zip" in server.asked
    assert not left_in_the_cache(tmp_path)


def failure(name, tmp_path):
    with pytest.raises(UserError) as caught:
        read(name, tmp_path)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.array_record*"))
    return str(caught.value)


def test_a_wrong_checksum_is_reported_with_both(server, source, tmp_path):
    whole = miniature.official(CorpusName.TEXT8)
    served = serve(server, "text8.zip", whole[:-1] + bytes([whole[-1] ^ 1]))
    right = hashlib.sha256(whole).hexdigest()
    source(CorpusName.TEXT8, (dataclasses.replace(served, sha256=right),))
    message = failure(CorpusName.TEXT8, tmp_path)
    assert re.search(rf"{served.url}.*\b{served.sha256}\b.*\b{right}\b", message), "what came, then what should"
    assert not left_in_the_cache(tmp_path)
    assert server.asked == ["HEAD /text8.zip", "GET /text8.zip"]


def test_a_download_outlives_a_failure_that_came_after_it(server, source, tmp_path, monkeypatch):
    source(CorpusName.PTB, (serve(server, "simple-examples.tgz", miniature.official(CorpusName.PTB)),))

    def full(self, block):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(prepare.Tally, "add", full)
        # Rest of a killed download, which the next start removes.
        cut = tmp_path / "cache" / "tfds" / "txl_ptb_downloads" / "txl_ptb" / "x.tmp.123"
        cut.mkdir(parents=True)
        with pytest.raises(UserError, match=r"\bPenn Treebank\b.*\bNo space left on device\b.*--cache_dir\b"):
            read(CorpusName.PTB, tmp_path)
        assert not cut.exists()
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)
    assert [line for line in server.asked if line.startswith("GET")] == ["GET /simple-examples.tgz"]
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [".txl_ptb.lock", "txl_ptb"]


def test_what_came_and_is_not_the_corpus(server, source, tmp_path):
    """An unknown checksum lets it in, its content does not; the next start asks again instead of keeping it."""
    members = dict(miniature.files(CorpusName.PTB))
    members["./simple-examples/data/ptb.test.txt"] += b"more\n"
    serve(server, "simple-examples.tgz", miniature.archive(".tgz", members))
    source(CorpusName.PTB, (Remote(server.url + "simple-examples.tgz"),))
    row = CORPORA[CorpusName.PTB]
    known = row.facts["test"].tokens
    # The line that was added counts as a word and a line's end.
    with pytest.raises(UserError, match=rf"ptb\.test\.txt\b.*\b{known + 2:,}\b.*\b{known:,}\b.*{row.url}"):
        read(CorpusName.PTB, tmp_path)
    serve(server, "simple-examples.tgz", miniature.official(CorpusName.PTB))
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)


def test_a_download_that_is_cut_is_not_taken(server, source, tmp_path, monkeypatch):
    whole = miniature.official(CorpusName.ENWIK8)
    serve(server, "enwik8.zip", whole)

    def cut(self):
        if self.command == "HEAD":
            return http.server.SimpleHTTPRequestHandler.do_HEAD(self)
        self.send_response(200)
        self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        self.wfile.write(whole[: len(whole) // 2])
        self.close_connection = True

    monkeypatch.setattr(Handler, "do_GET", cut, raising=False)
    source(CorpusName.ENWIK8, (Remote(server.url + "enwik8.zip"),))
    assert f"{server.url}enwik8.zip" in failure(CorpusName.ENWIK8, tmp_path)
