"""Miniatures in place of the published corpora."""

import pytest
import requests

from support import miniature
from txl_jax.data.published import CORPORA

SEND = requests.Session.send


def only_to_this_machine(session, request, **options):
    if not request.url.startswith("http://127.0.0.1:"):
        raise requests.ConnectionError(f"no route to {request.url}")
    return SEND(session, request, **options)


@pytest.fixture
def miniatures(monkeypatch):
    """The table of the miniatures, and no network but this machine's."""
    for name in miniature.NAMES:
        monkeypatch.setitem(CORPORA, name, miniature.corpus(name))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # Without the proxy that the environment may name.
    monkeypatch.setattr(requests.Session, "send", only_to_this_machine)
