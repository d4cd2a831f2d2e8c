r"""Serves a trained model over HTTP: OpenAI's completions, and sessions that keep their memory.

    pip install '.[serve]'
    python -m experiments.serve --model=runs/mine --port=8000
    TXL_API_KEYS=secret python -m experiments.serve --model=runs/mine --host=0.0.0.0

docs/serving.md has the requests and the limits. SIGTERM or Ctrl-C: no new requests are taken, those that run may end
for --drain_seconds, then the rest are cut off; a second signal cuts them off at once.
"""

import asyncio
import functools
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Any

from absl import flags

from txl_jax.cli import runner, stored_types
from txl_jax.errors import UserError
from txl_jax.runs.generate import check_can_generate
from txl_jax.serving.engine import Engine
from txl_jax.serving.requests import Limits
from txl_jax.serving.row_step import Step
from txl_jax.serving.sessions import SessionStore
from txl_jax.trained_model import load

FLAGS = flags.FLAGS
_KEYS = "TXL_API_KEYS"  # Environment variable: keys, with commas.


def main() -> None:
    """Parses the flags, and serves until a signal."""
    usual = Limits()
    flags.DEFINE_string("model", None, "Workdir of a run, or portable folder. Required.")
    flags.DEFINE_string("ensemble_member", None, "Member of an ensemble, by name.")
    stored_types.define()
    flags.DEFINE_string("host", "127.0.0.1", f"Address to listen on; others than loopback need {_KEYS}.")
    flags.DEFINE_list(
        "allowed_hosts",
        None,
        "Names in the Host header that are answered, besides --host and loopback. Any name is, if --host is a wildcard "
        "address and this is not set.",
    )
    flags.DEFINE_integer("port", 8000, "Port; 0: a free one, which is printed.", lower_bound=0, upper_bound=65535)
    flags.DEFINE_integer("rows", 8, "Texts that are written side by side; each needs a KV cache.", lower_bound=1)
    flags.DEFINE_integer(
        "max_prompt_tokens",
        usual.prompt_tokens,
        "Maximum prompt tokens per request, summed over its choices.",
        lower_bound=1,
    )
    flags.DEFINE_integer("max_new_tokens", usual.new_tokens, "Most that max_tokens may be.", lower_bound=1)
    flags.DEFINE_integer("max_waiting", usual.waiting, "Choices that may wait for a row.", lower_bound=0)
    flags.DEFINE_float("request_seconds", usual.seconds, "Time of a request.", lower_bound=0)
    flags.DEFINE_integer("max_sessions", 16, "Sessions at a time; each needs a KV cache on the host.", lower_bound=0)
    flags.DEFINE_float("session_seconds", 3600, "Time after its last use at which a session expires.", lower_bound=0)
    flags.DEFINE_float("drain_seconds", 30, "Time after SIGTERM in which running requests may end.", lower_bound=0)
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    if not FLAGS.model:
        raise UserError("no model was given; set --model=FOLDER, the workdir of a run or a folder of converted weights")
    try:
        import uvicorn

        from txl_jax.serving.app import LOOPBACK, Settings, make_app
    except ImportError as error:
        raise UserError(f"the server is not installed ({error}); run pip install '.[serve]'") from None
    keys = tuple(filter(None, (key.strip() for key in os.environ.get(_KEYS, "").split(","))))
    _check_host(FLAGS.host, keys)
    listening = _listen(FLAGS.host, FLAGS.port)  # Before the model is read, which takes longer.
    limits = Limits(
        prompt_tokens=FLAGS.max_prompt_tokens,
        new_tokens=FLAGS.max_new_tokens,
        waiting=FLAGS.max_waiting,
        seconds=FLAGS.request_seconds,
    )
    engine, settings = _engine(limits), Settings(Path(FLAGS.model).resolve().name, _hosts(LOOPBACK), keys, limits)

    class Server(uvicorn.Server):
        """A server that cuts off what has not ended some time after a signal."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            """Takes no new requests; a second signal ends the running ones at once."""
            del sig, frame
            engine.refuse("the server is shutting down")
            seconds = 0.0 if self.should_exit else FLAGS.drain_seconds
            loop.call_soon_threadsafe(loop.call_later, seconds, engine.cut_off)
            if not self.should_exit:  # Not printed here: the signal may have come in the midst of another print.
                line = f"stopping  running requests have {seconds:g} s to end; a second signal ends them now"
                loop.call_soon_threadsafe(functools.partial(print, line, flush=True))
            self.should_exit = True

        should_exit = False

        async def startup(self, sockets: Any = None) -> None:
            """Prints the address once it is open."""
            await super().startup(sockets)
            for server in self.servers:
                host, port = server.sockets[0].getsockname()[:2]
                print(f"listening http://{host}:{port}", flush=True)

    config = uvicorn.Config(
        make_app(engine, settings),
        log_level="warning",
        backlog=1024,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(FLAGS.drain_seconds) + 30,
    )
    loop = asyncio.new_event_loop()
    server = Server(config)
    loop.run_until_complete(server.serve(sockets=[listening]))
    print("stopped", flush=True)
    return 0 if server.started else 1


def _hosts(loopback: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names that clients may use for this server, or none if they may use any."""
    named = tuple(FLAGS.allowed_hosts or ())
    is_wildcard = FLAGS.host in ("0.0.0.0", "::", "")
    return () if is_wildcard and not named else (*loopback, FLAGS.host, *named)


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address; raises `UserError` for one that cannot be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise UserError(
            f"--host={host} --port={port} cannot be listened on ({error.strerror}); give another port, as --port=0 for "
            "a free one, or another address of this machine"
        ) from None
    return found


def _engine(limits: Limits) -> Engine:
    """Returns the engine of the model that the flags name."""
    model = load(FLAGS.model, member=FLAGS.ensemble_member, **stored_types.given())
    check_can_generate(model.config)
    step = Step(model.components, batch_size=FLAGS.rows)
    store = SessionStore(limit=FLAGS.max_sessions, seconds=FLAGS.session_seconds)
    named = "".join(
        f", {kind} {name}"
        for name, kind in (("weights", model.config.eval.weight_dtype), ("cache", model.config.eval.cache_dtype))
        if kind
    )
    print(f"model     {FLAGS.model}, step {model.step}{named}; {FLAGS.rows} rows")
    return Engine(step, model.params, model.vocabulary, store, limits)


def _check_host(host: str, keys: tuple[str, ...]) -> None:
    """Raises `UserError` for an address that others can reach, without a key."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback and not keys:
        raise UserError(
            f"--host is {host}, which other machines can reach, and no key is set; set {_KEYS}=KEY[,KEY..], or leave "
            "--host out"
        )


if __name__ == "__main__":
    main()
