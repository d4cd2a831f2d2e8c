r"""Serves a trained model over HTTP: OpenAI's completions, and sessions that keep their memory.

    pip install '.[serve]'
    python -m experiments.serve --model=runs/mine --port=8000
    TXL_API_KEYS=secret python -m experiments.serve --model=runs/mine --host=0.0.0.0

docs/serving.md describes the requests and the limits. On SIGTERM or Ctrl-C the server rejects new
requests and gives running ones --drain_seconds to finish before it cuts them off. A second signal
cuts them off immediately.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import math
import os
import signal
import socket
from typing import Any

from txl_jax import cli
from txl_jax.cli import setting
from txl_jax.config.config_tree import require
from txl_jax.errors import rephrased
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime import environment
from txl_jax.serving.engine import Engine, ServerLimits
from txl_jax.serving.rows import Step
from txl_jax.serving.sessions import SessionStore
from txl_jax.trained_model import load

# Environment variable with comma-separated keys.
_KEYS = "TXL_API_KEYS"
_USUAL = ServerLimits()
# Seconds that clients have to receive the answers to requests that were cut off. These answers are
# short.
_SECONDS_TO_LEAVE = 2.0
# Seconds after that until uvicorn stops waiting for anything that is still running.
_SECONDS_TO_END = 3
# Seconds for which a connection stays open without a request.
_KEEP_ALIVE_SECONDS = 30
# Bytes of a request body per token: an id has at most ten digits, a comma and a space.
_BYTES_PER_TOKEN = 12


@dataclasses.dataclass(frozen=True)
class Plan(cli.StoredTypes):
    """The model, the address and the limits."""

    model: str = setting("", "Workdir of a run, or portable checkpoint.", path=True, required=True)
    ensemble_member: str | None = setting(None, "Name of the ensemble member to use.")
    host: str = setting(
        "127.0.0.1", f"Address to listen on. An address other than loopback requires {_KEYS}."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Names to accept in the Host header, in addition to --host and loopback. "
        "If empty, a wildcard --host accepts any name.",
    )
    port: int = setting(
        8000, "Port to listen on. 0 picks a free port and prints it.", at_least=0, at_most=65535
    )
    rows: int = setting(8, "Texts generated in parallel, each with its own KV cache.", at_least=1)
    max_request_tokens: int = setting(
        _USUAL.tokens,
        "Maximum tokens per request: its prompts (n times with echo) plus max_tokens of each "
        "choice. With logprobs, each entry of a returned token counts too.",
        at_least=1,
    )
    max_new_tokens: int = setting(_USUAL.new_tokens, "Maximum value of max_tokens.", at_least=1)
    max_waiting: int = setting(
        _USUAL.waiting, "Maximum number of choices that wait for a row.", at_least=0
    )
    request_seconds: float = setting(
        float(_USUAL.seconds), "Request timeout in seconds.", at_least=0
    )
    max_sessions: int = setting(
        16,
        "Maximum number of sessions, each with a KV cache in host memory. API keys share it.",
        at_least=1,
    )
    max_session_gib: float = setting(
        4.0, "Maximum memory of all sessions in GiB, which may allow fewer.", at_least=0
    )
    session_seconds: float = setting(
        3600.0, "Seconds after which an unused session expires.", at_least=0
    )
    drain_seconds: float = setting(
        30.0, "Seconds that running requests have to finish after SIGTERM.", at_least=0
    )


def run(plan: Plan, _job: cli.Job) -> int:
    """Serves until a signal."""
    # Until the server listens, Ctrl-C ends the process immediately, because an exception can be
    # lost in a callback of XLA.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    variable = os.environ.get(_KEYS)
    keys = {key.strip() for key in (variable or "").split(",")} - {""}
    require(
        variable is None or keys,
        f"{_KEYS} must have at least one key, got {variable!r}. Set it to KEY[,KEY..], or unset it "
        "for no keys.",
    )
    require(
        "".join(keys).isascii(), f"{_KEYS} must be ASCII, like HTTP headers. Choose other keys."
    )
    require(
        _is_loopback(plan.host) or keys,
        f"--host must be loopback unless {_KEYS} is set, because other machines can reach "
        f"it, got {plan.host}. Set {_KEYS}=KEY[,KEY..], or omit --host.",
    )
    # The address is bound before the model is loaded, which takes longer.
    with _bind(plan.host, plan.port) as bound:
        return _serve(plan, keys, bound)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # It is a host name.
        return False


def _serve(plan: Plan, keys: set[str], bound: socket.socket) -> int:
    """Serves on a bound socket until a signal, and returns the exit code."""
    with rephrased("the server is not installed (%s). Run pip install '.[serve]'.", ImportError):
        import uvicorn

        from txl_jax.serving.app import make_app
        from txl_jax.serving.connections import ACCEPTED_AT_ONCE, Connections, most_connections
        from txl_jax.serving.middleware import LOOPBACK

    num_choices = plan.rows + plan.max_waiting
    max_connections = most_connections(num_choices)
    if max_connections < num_choices:
        print(
            f"note      at most {max_connections} connections, because of the limit of open files "
            "(ulimit -n)"
        )

    engine = _engine(plan, num_keys=len(keys))
    any_host = plan.host in ("0.0.0.0", "::", "") and not plan.allowed_hosts
    hosts = () if any_host else (*LOOPBACK, plan.host, *plan.allowed_hosts)
    app = make_app(engine, os.path.basename(plan.model), hosts=hosts, keys=sorted(keys))
    connections = Connections(max_connections, count=app.state.count)

    # The server's signal handler schedules calls on this loop. It is used until the process ends.
    loop = asyncio.new_event_loop()
    seconds_to_end = math.ceil(plan.drain_seconds + _SECONDS_TO_LEAVE) + _SECONDS_TO_END
    config = uvicorn.Config(
        app,
        http=connections.make,
        ws="none",
        log_level="warning",
        # asyncio also accepts as many connections at once, in one turn of its loop. The queue gets
        # its own length in `_make_server`.
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=seconds_to_end,
    )
    server = _make_server(plan, config, engine, connections, loop, bound)
    loop.run_until_complete(server.serve(sockets=[bound]))
    print("stopped", flush=True)
    return 1 if engine.failed or not server.started else 0


def _make_server(
    plan: Plan,
    config: Any,
    engine: Engine,
    connections: Any,
    loop: asyncio.AbstractEventLoop,
    bound: socket.socket,
) -> Any:
    """Returns uvicorn's server, which also stops with the engine, or some time after a signal."""
    import uvicorn

    from txl_jax.serving.connections import QUEUE

    def cut_off() -> None:
        engine.cut_off()
        loop.call_later(_SECONDS_TO_LEAVE, connections.abort)

    class Server(uvicorn.Server):
        """A server that cuts off running requests some time after a signal."""

        should_exit = False

        def handle_exit(self, _sig: int, _frame: Any) -> None:
            """Rejects new requests. A second signal ends the running ones immediately."""
            engine.refuse("the server is shutting down")
            seconds = 0.0 if self.should_exit else plan.drain_seconds
            loop.call_soon_threadsafe(loop.call_later, seconds, cut_off)
            # Not printed directly: the signal may have arrived in the middle of another print.
            if not self.should_exit:
                line = (
                    f"stopping  running requests have {seconds:g} s to finish, a second signal "
                    "ends them now"
                )
                loop.call_soon_threadsafe(lambda: print(line, flush=True))
            self.should_exit = True

        async def on_tick(self, counter: int) -> bool:
            """Stops if the engine has stopped, so that a supervisor can restart this process."""
            return await super().on_tick(counter) or engine.failed

        async def startup(self, sockets: Any = None) -> None:
            """Prints the address once it is open."""
            await super().startup(sockets)
            # uvicorn uses one number for the queue and for the connections accepted at once.
            bound.listen(QUEUE)
            for server in self.servers:
                host, port = server.sockets[0].getsockname()[:2]
                print(f"listening http://{host}:{port}", flush=True)

    return Server(config)


def _bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address. Raises `UserError` if the address is unavailable."""
    message = (
        f"cannot listen on --host={host} --port={port} (%s). Choose another port, such as "
        "--port=0 for a free one, or another address of this machine."
    )
    with rephrased(message, OSError), contextlib.ExitStack() as on_error:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        # With its protocol: asyncio only sends small parts at once (TCP_NODELAY) on sockets that
        # are known as TCP.
        bound = on_error.enter_context(socket.socket(family, kind, protocol))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        on_error.pop_all()
        return bound


def _engine(plan: Plan, *, num_keys: int) -> Engine:
    """Returns the engine of the model.

    Raises `UserError` if the rows need more memory than the device has.
    """
    model = load(
        plan.model,
        member=plan.ensemble_member,
        weight_dtype=plan.weight_dtype,
        cache_dtype=plan.cache_dtype,
    )
    check_can_generate(model.config)
    # `components` is the model's `Built`.
    step = Step(model.components, batch_size=plan.rows)

    row_bytes = step.row_bytes(model.params)
    row_size = environment.megabytes(row_bytes)
    memory = environment.memory_bytes()
    require(
        plan.rows * row_bytes < memory,
        f"--rows must be at most {memory // row_bytes}, because each row has a KV cache of "
        f"{row_size}, got {plan.rows}",
    )
    dtypes = {"weights": model.config.eval.weight_dtype, "cache": model.config.eval.cache_dtype}
    shown = "".join(f", {dtype} {name}" for name, dtype in dtypes.items() if dtype)
    print(f"model     {plan.model}, step {model.step}{shown}, {plan.rows} rows of {row_size}")

    # Each key has room for a session, regardless of the others.
    num_owners = max(1, num_keys)
    num_sessions = min(plan.max_sessions, int(plan.max_session_gib * 2**30 / row_bytes))
    sessions_per_key = num_sessions // num_owners
    require(
        sessions_per_key,
        f"--max_sessions={plan.max_sessions} and --max_session_gib={plan.max_session_gib:g} allow "
        f"{num_sessions} sessions of {row_size}, but {num_owners} are required, one per key. "
        "Raise them.",
    )
    print(f"sessions  at most {num_sessions} of {row_size}, {sessions_per_key} per key")

    limits = ServerLimits(
        body_bytes=max(_USUAL.body_bytes, _BYTES_PER_TOKEN * plan.max_request_tokens),
        tokens=plan.max_request_tokens,
        new_tokens=plan.max_new_tokens,
        waiting=plan.max_waiting,
        seconds=plan.request_seconds,
    )
    store = SessionStore(
        limit=num_sessions, limit_per_owner=sessions_per_key, seconds=plan.session_seconds
    )
    return Engine(step, model.params, model.vocabulary, store, limits)


if __name__ == "__main__":
    cli.main(run, Plan)
