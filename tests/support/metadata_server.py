"""A metadata server of Google Cloud on loopback: values that can be waited for."""

import contextlib
import functools
import http.server
import threading
import urllib.parse

ROOT = "/computeMetadata/v1/instance/"


class MetadataServer(contextlib.AbstractContextManager):
    """Values by key; `change` wakes up those who wait.

    Attributes:
      host: host:port, for GCE_METADATA_HOST.
      asked: path and query of each request.
      failures: so many requests are answered by an error first.
    """

    def __init__(self, failures=0, **values):
        self.values = {key.replace("_", "-"): value for key, value in values.items()}
        self.asked, self.failures = [], failures
        self._changed = threading.Condition()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def change(self, key, value):
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def wait(self, key, etag):
        """Returns the value of a key once its ETag is another than this one; None: there is no such key."""
        with self._changed:
            self._changed.wait_for(lambda: f"etag-{self.values.get(key)}" != etag, timeout=20)
            return self.values.get(key)

    def __exit__(self, *unused):
        with self._changed:
            self.values.clear()  # A thread that waits is answered 404 and ends; the port may be another test's next.
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, owner, *args):
        self._owner = owner
        super().__init__(*args)

    def do_GET(self):
        owner, url = self._owner, urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        owner.asked.append((url.path, query))
        if self.headers.get("Metadata-Flavor") != "Google":
            return self._answer(403, "")
        if owner.failures > 0:
            owner.failures -= 1
            return self._answer(503, "")
        value = owner.wait(url.path.removeprefix(ROOT), query.get("last_etag"))
        return self._answer(404, "") if value is None else self._answer(200, value)

    def _answer(self, status, text):
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("ETag", f"etag-{text}")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *unused):
        pass
