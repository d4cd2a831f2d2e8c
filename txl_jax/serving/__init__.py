"""HTTP server for a trained model, with continuous batching and sessions that keep their memory.

    rows.py        one token of R rows, a segment of one row, over `inference.decode`
    sessions.py    memories that clients keep
    engine.py      the thread that owns the device: texts join and leave rows between calls
    protocol.py    converts OpenAI's JSON to requests, and results to JSON
    completion.py  one request's choices on the event loop
    app.py         routes and metrics, with page.html to try the model in a browser

`protocol.py`, `completion.py` and `app.py` need the extra `serve`.
"""
