"""Object storage on loopback: an emulator of Google Cloud Storage with preconditions and faults.

The emulator ignores `ifGenerationMatch`. Here, as at Google, a request whose generation does not
match is answered with 412, and an object that is read comes with its generation. Faults are
answered before the emulator gets the request, or kill a process between two writes.
"""

import contextlib
import dataclasses
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

# A missing object is not an error here.
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
            status = self.server.intercepted(method, self.path)
            if status:
                self._answer_error(status)
                return
            # These errors mean that the client was killed.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                serve()
            if method != "GET":
                time.sleep(0.001)  # The emulator numbers generations by the clock.

    def _answer_error(self, status):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(status)
        body = b'{"error": {"code": %d, "message": "made by a test"}}' % status
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self):
        """Adds the generation of an object that is read. TensorStore needs it, and the emulator
        does not send it.
        """
        if self.command == "GET":
            match = _OBJECT.fullmatch(urlsplit(self.path).path)
            if match and match[2]:
                self.send_header("x-goog-generation", self.server.generation(unquote(match[2])))
        super().end_headers()


def _method_handler(method):
    """Returns what serves a method of HTTP: the emulator, or a fault before it."""
    serve = getattr(emulator.RequestHandler, f"do_{method}")
    return lambda handler: handler._handle(method, partial(serve, handler))


for _method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
    setattr(_Handler, f"do_{_method}", _method_handler(_method))


@dataclasses.dataclass
class _Failing:
    """Every request of this number fails."""

    number: int
    status: int
    n_request: int = 0

    def is_next(self):
        self.n_request += 1
        return self.n_request % self.number == 0


@dataclasses.dataclass
class _Refusal:
    """Requests that match the pattern fail, after some of them were served."""

    pattern: re.Pattern[str]
    status: int
    n_served_first: int


@dataclasses.dataclass
class _Kill:
    """The process is killed once there are more writes than these."""

    pid: int
    n_write_before: int


class ObjectStorage(http.server.ThreadingHTTPServer):
    """A server with one bucket, `BUCKET`. Use it as a context manager.

    Attributes:
      requests: (method, path with query) of all requests, in order.
      errors: The number of requests that were answered by `fail_every`.
      is_up: Whether the server answers at all.
    """

    # More than a run connects at once: connections beyond it are lost, and their clients wait.
    request_queue_size = 256

    def __init__(self):
        self.storage = emulator.Storage(use_memory_fs=True)
        emulator.buckets.create_bucket(BUCKET, self.storage)
        self.lock = threading.Lock()
        self.is_up = True
        self.requests = []
        self.errors = 0
        super().__init__(("localhost", 0), partial(_Handler, self.storage))
        self.calm()

    def handle_error(self, *unused):
        """Prints nothing about clients that were killed."""

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
        """Ends all faults, except that `is_up` stays."""
        self._failing = None
        self._refusal = None
        self._kill = None
        self.killed = False

    def fail_every(self, number, status=503):
        """Answers every request of this number, counted from here, with an error."""
        self._failing = _Failing(number, status)

    def refuse(self, pattern, status=403, *, after=0):
        """Answers requests whose method and path match a pattern with an error.

        So many of them are served first.
        """
        self._refusal = _Refusal(re.compile(pattern), status, after)

    def kill_at_write(self, pid, number):
        """Kills a process when its write of this number (from 0) arrives. The write is not done."""
        self._kill = _Kill(pid, len(self.writes) + number)

    def intercepted(self, method, path):
        """Returns the status of an error, or 0 if the emulator is to answer the request."""
        request = f"{method} {unquote(path)}"
        self.requests.append((method, unquote(path)))
        if self._kill and method != "GET" and len(self.writes) > self._kill.n_write_before:
            if not self.killed:
                os.kill(self._kill.pid, signal.SIGKILL)
                self.killed = True
            return 503
        if self._refusal and self._refusal.pattern.search(request):
            self._refusal.n_served_first -= 1
            if self._refusal.n_served_first < 0:
                return self._refusal.status
        if self._failing and self._failing.is_next():
            self.errors += 1
            return self._failing.status
        if not self._generation_matches(path):
            return 412
        return 0

    def _generation_matches(self, path):
        """Returns whether the object has the generation that the request requires, if any."""
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        match = _OBJECT.fullmatch(parts.path)
        if "ifGenerationMatch" not in query or not match:
            return True
        name = unquote(match[2]) if match[2] else query["name"][0]
        return query["ifGenerationMatch"][0] == self.generation(name)

    def generation(self, name):
        """The generation of an object as text, or "0" if the object does not exist."""
        try:
            return str(self.storage.get_file_obj(BUCKET, name)["generation"])
        except NotFound:
            return "0"

    def names(self):
        return sorted(item["name"] for item in self.storage.get_file_list(BUCKET)[0])
