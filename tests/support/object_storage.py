"""Object storage on this machine: the packages' emulator of Google Cloud Storage, with
preconditions and faults.

The emulator ignores `ifGenerationMatch`; here it is answered with 412 where it does not fit, as by
Google, and what is read has its generation. Faults are answered before the emulator sees the
request, or kill a process between two writes.
"""

import contextlib
import http.server
import json
import logging
import os
import re
import signal
import threading
import time
from functools import partial
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import NotFound

from support import BUCKET

# An object that is missing is no error here.
logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
_read_data = emulator._read_data
_OBJECT = re.compile(r"(?:/upload|/download)?/storage/v1/b/([^/]+)/o(?:/(.+))?")


def _read_upload(handler, query):
    """Reads a request's body.

    The emulator reads gcsfs's uploads as e-mail, and drops a final carriage return.
    """
    if "multipart/related" not in handler.headers.get("Content-Type", ""):
        return _read_data(handler, query)
    body = emulator._read_raw_data(handler)
    boundary = body.partition(b"\n")[0]
    _, metadata, content = body.removesuffix(b"\n" + boundary + b"--").split(boundary, 2)
    header, _, content = content.partition(b"\n\n")
    kind = header.decode().partition("Content-Type: ")[2]
    return {
        "meta": json.loads(metadata.partition(b"\n\n")[2]),
        "content": content,
        "content-type": kind,
    }


emulator._read_data = _read_upload


class _Handler(emulator.RequestHandler):
    def _handle(self, method, serve):
        if not self.server.is_up:
            self.connection.shutdown(2)
            return
        with self.server.lock:
            if status := self.server.intercepted(method, self.path):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(status)
                body = b'{"error": {"code": %d, "message": "made by a test"}}' % status
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            # The client was killed.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                serve()
            if method != "GET":
                time.sleep(0.001)  # The emulator numbers generations by the clock.

    def end_headers(self):
        """Adds the generation of what is read, which TensorStore relies on and the emulator leaves
        out.
        """
        if (
            self.command == "GET"
            and (match := _OBJECT.fullmatch(urlsplit(self.path).path))
            and match[2]
        ):
            self.send_header("x-goog-generation", self.server.generation(unquote(match[2])))
        super().end_headers()


def _served(method):
    return lambda handler: handler._handle(
        method, getattr(super(_Handler, handler), f"do_{method}")
    )


for _method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
    setattr(_Handler, f"do_{_method}", _served(_method))


class ObjectStorage(http.server.ThreadingHTTPServer):
    """A server with one bucket, `BUCKET`. Use it as a context manager.

    Attributes:
      requests: (method, path with query) of all requests, in order.
      errors: how many were answered by an injected error.
      is_up: whether it answers at all.
    """

    # More than a run connects at once: what is beyond it is lost, and its client waits.
    request_queue_size = 256

    def __init__(self):
        self.storage = emulator.Storage(use_memory_fs=True)
        emulator.buckets.create_bucket(BUCKET, self.storage)
        self.lock, self.is_up = threading.Lock(), True
        self.requests, self.errors = [], 0
        super().__init__(("localhost", 0), partial(_Handler, self.storage))
        self.calm()

    def handle_error(self, *unused):
        """Says nothing of clients that were killed."""

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *unused):
        self.shutdown()
        self.server_close()

    @property
    def environment(self):
        """Environment variables of a program that is to use this server, without a network."""
        url = f"http://localhost:{self.server_port}"
        return {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            # It asks Google about the kind of bucket.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "GCE_METADATA_HOST": "localhost:1",
            "GOOGLE_CLOUD_PROJECT": "test",
        }

    @property
    def writes(self):
        return [request for request in self.requests if request[0] != "GET"]

    # Faults

    def calm(self):
        self._every, self._seen, self._status = 0, 0, 0
        self._refuse, self._allowed = None, 0
        self._victim, self._kill_at, self.killed = None, -1, False

    def fail_every(self, number, status=503):
        self._every, self._seen, self._status = number, 0, status

    def refuse(self, pattern, status=403, *, after=0):
        """Answers requests whose method and path fit a pattern with an error, but for the first of
        them.
        """
        self._refuse, self._allowed = (re.compile(pattern), status), after

    def kill_at_write(self, pid, number):
        """Kills a process when its write of this number (from 0) arrives, which is not done any
        more.
        """
        self._victim, self._kill_at = pid, len(self.writes) + number

    def intercepted(self, method, path):
        """The status of an answer that the emulator is not asked for; 0: it is."""
        self.requests.append((method, unquote(path)))
        if method != "GET" and self._victim and len(self.writes) > self._kill_at:
            if not self.killed:
                os.kill(self._victim, signal.SIGKILL)
                self.killed = True
            return 503
        if self._refuse and self._refuse[0].search(f"{method} {unquote(path)}"):
            self._allowed -= 1
            if self._allowed < 0:
                return self._refuse[1]
        self._seen += 1
        if self._every and self._seen % self._every == 0:
            self.errors += 1
            return self._status
        return 0 if self._fits(path) else 412

    def _fits(self, path):
        """Returns whether the generation is the one that the request asks for."""
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        match = _OBJECT.fullmatch(parts.path)
        if "ifGenerationMatch" not in query or not match:
            return True
        name = unquote(match[2]) if match[2] else query["name"][0]
        return query["ifGenerationMatch"][0] == self.generation(name)

    def generation(self, name):
        """The generation of an object as text; "0" if there is none."""
        try:
            return str(self.storage.get_file_obj(BUCKET, name)["generation"])
        except NotFound:
            return "0"

    def names(self):
        return sorted(item["name"] for item in self.storage.get_file_list(BUCKET)[0])
