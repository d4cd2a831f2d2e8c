"""Serving: an HTTP server over a trained model, with continuous batching and sessions that keep their memory.

    rows.py       the rows: one token of R rows, a segment of one row, over `inference.decode`
    requests.py   a request, checked, and the limits of the server
    engine.py     the thread that owns the device: requests join and leave rows between calls
    sessions.py   memories that clients keep, with expiry, and their files
    protocol.py   OpenAI's JSON to requests, and results to JSON
    completion_run.py  the jobs of one request on the event loop
    app.py        routes; `prometheus.py`: figures for Prometheus; page.html: a page to type into

Only `app.py`, `completion_run.py` and `prometheus.py` need the extra `serve`.
"""
