"""A metadata server of Google Cloud on loopback: values that can be waited for."""

import contextlib
import http.server
import threading
import urllib.parse

ROOT = "/computeMetadata/v1/instance/"


class MetadataServer(http.server.ThreadingHTTPServer):
    """Values by key. `change` wakes up the requests that wait.

    Attributes:
      host: host:port, for GCE_METADATA_HOST.
      asked: Path and query of each request.
      failures: The number of requests that are answered by an error first.
    """

    def __init__(self, failures=0, **values):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values = {key.replace("_", "-"): value for key, value in values.items()}
        self.host = f"127.0.0.1:{self.server_port}"
        self.asked = []
        self.failures = failures
        self.changed = threading.Condition()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def change(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def __exit__(self, *unused):
        with self.changed:
            # A request that waits is answered with 404: another test may get the port next.
            self.values.clear()
            self.changed.notify_all()
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        url = urllib.parse.urlsplit(self.path)
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
        if value is None:
            return self._answer(404, "")
        return self._answer(200, value)

    def _answer(self, status, text):
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("ETag", f"etag-{text}")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *unused):
        pass
