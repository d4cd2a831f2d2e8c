"""A metadata server of Google Cloud on loopback: values that can be waited for."""

import contextlib
import http.server
import threading
import urllib.parse

ROOT = "/computeMetadata/v1/instance/"


class MetadataServer(http.server.ThreadingHTTPServer):
    """Values by key; `change` wakes up those who wait.

    Attributes:
      host: host:port, for GCE_METADATA_HOST.
      asked: path and query of each request.
      failures: so many requests are answered by an error first.
    """

    def __init__(self, failures=0, **values):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values = {key.replace("_", "-"): value for key, value in values.items()}
        self.host, self.asked, self.failures = f"127.0.0.1:{self.server_port}", [], failures
        self.changed = threading.Condition()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def change(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def __exit__(self, *unused):
        with self.changed:
            # A thread that waits is answered 404 and ends; the port may be another test's next.
            self.values.clear()
            self.changed.notify_all()
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, url = self.server, urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        server.asked.append((url.path, query))
        if self.headers.get("Metadata-Flavor") != "Google":
            return self._answer(403, "")
        if server.failures > 0:
            server.failures -= 1
            return self._answer(503, "")
        key = url.path.removeprefix(ROOT)
        with server.changed:
            server.changed.wait_for(
                lambda: f"etag-{server.values.get(key)}" != query.get("last_etag"), timeout=20
            )
            value = server.values.get(key)
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
