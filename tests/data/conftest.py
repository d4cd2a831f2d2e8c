"""Miniatures instead of the published corpora."""

import pytest
import requests

from support import miniature
from txl_jax.data.published import CORPORA

SEND = requests.Session.send


def only_to_this_machine(session, request, **options):
    """Sends a request as `requests` does, if it is for 127.0.0.1."""
    if not request.url.startswith("http://127.0.0.1:"):
        raise requests.ConnectionError(f"no route to {request.url}")
    return SEND(session, request, **options)


@pytest.fixture
def miniatures(monkeypatch):
    """The table of published corpora lists miniatures, and only servers on 127.0.0.1 can be
    reached.
    """
    for name in miniature.NAMES:
        monkeypatch.setitem(CORPORA, name, miniature.corpus(name))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # The environment may name a proxy.
    monkeypatch.setattr(requests.Session, "send", only_to_this_machine)
