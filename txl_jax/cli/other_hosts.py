"""One command on every host: detects whether this process is one of several, and joins them.

Multiple processes are announced by --coordinator, --num_processes and --process_id, or by the
environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, by a Slurm step
of multiple tasks, or by a TPU slice of multiple hosts. Otherwise there is one process, which starts
nothing and waits for nothing.
"""

import atexit
import contextlib
import glob
import importlib.util
import os
import re
import secrets
import socket
import stat
import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import requests
from absl import flags

from txl_jax.config import config_tree
from txl_jax.config.config_tree import require
from txl_jax.errors import UserError, first_line
from txl_jax.runtime import distributed, output

# The flags, and the variables that a launcher sets instead of them.
_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
FLAG_NAMES = tuple(_VARIABLES)

# A host that dies silently holds up the others for this long: they wait in a collective, which may
# have no timeout of its own. Much less, and a host whose network is slow for a moment is taken for
# dead.
LOSS_SECONDS = 60
START_SECONDS = 300  # Timeout of the start: hosts of one job may be ready minutes apart.
# Exit code of a process that has lost another: nothing was wrong with the command, and the same one
# resumes.
LOST = os.EX_TEMPFAIL  # 75
RESUME = "Rerun the same command on all hosts to resume from the last checkpoint"
# After a collective has failed: then `_watch` has named the process that is gone.
SECONDS_TO_NAME = 5
# A process that waits longer for the others prints a line.
_SILENT_SECONDS = 10

_METADATA_SECONDS, _METADATA_TRIES = 3, 3
# Words in the errors of collectives when a process is gone: on CPUs, on GPUs, of JAX's own service.
_SIGNS_OF_LOSS = (
    "Gloo",
    "NCCL",
    "UNAVAILABLE",
    "Connection closed",
    "Connection reset",
    "coordination service",
)

_number = 0  # The index of this process, once it has joined the others.


class Several(NamedTuple):
    """Multiple processes of one run."""

    num_processes: int
    source: str  # The flags, variables or system that announced them.
    arguments: dict[str, Any]  # For `jax.distributed.initialize`.


def define_flags() -> None:
    """Defines the flags of a command that supports multiple hosts."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0 (or JAX_COORDINATOR_ADDRESS).")
    flags.DEFINE_integer("num_processes", None, "Number of processes (or JAX_NUM_PROCESSES).")
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0 (or JAX_PROCESS_ID).")


def environment() -> dict[str, str]:
    """Returns the environment variables, overridden by the flags for them."""
    found = {
        variable: flags.FLAGS[name] for name, variable in _VARIABLES.items() if name in flags.FLAGS
    }
    return {
        **os.environ,
        **{variable: str(flag.value) for variable, flag in found.items() if flag.present},
    }


def join(found: Several) -> None:
    """Joins the other processes, before JAX touches a device.

    Raises `ConnectionError` if they do not all connect.

    Drops the standard output of all but the first, and of libraries (Gloo prints each connection).
    """
    global _number
    sys.stdout = output.tolerant(os.dup(1), sys.stdout)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    # JAX aborts a process that waits in vain, without an exception.
    waiting = f"waiting for {found.num_processes} processes, announced by {found.source}"
    line = f"{waiting}. Start the same command on every host (timeout: {START_SECONDS} s)."
    note = threading.Timer(_SILENT_SECONDS, print, [line], {"file": sys.stderr, "flush": True})
    note.start()
    try:
        jax.distributed.initialize(
            **found.arguments,
            initialization_timeout=START_SECONDS,
            # If a process hangs, JAX aborts the others.
            heartbeat_timeout_seconds=2 * LOSS_SECONDS,
        )
    except (RuntimeError, ValueError) as error:  # JAX's own errors are RuntimeErrors.
        raise ConnectionError(
            f"{found.num_processes} processes were announced by {found.source}, but not all of "
            f"them connected ({first_line(error)}). Start the same command on every host, and "
            "check that all can reach process 0."
        ) from error
    finally:
        note.cancel()
    _outlast_cuts()
    if not distributed.is_primary():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    _number = jax.process_index()
    # Gloo gives up on processes that come to the first collective 30 s late, and to none after it.
    names = distributed.gather_texts(f"process {_number} on {socket.gethostname()}")
    _watch(
        names,
        found.arguments.get("coordinator_address", f"{names[0].split()[-1]}:").rpartition(":")[0],
    )


def _outlast_cuts() -> None:
    """Lets the connections of this process survive a link that is cut for a moment.

    The server of JAX's coordination service, in process 0, closes a connection on which its data
    was not acknowledged for 20 s (gRPC's default, which JAX cannot set), and JAX then ends the
    other process. Data lost in a cut of 15 s is sent again after 25 s, because TCP doubles the time
    between its tries. A host that is silent is noticed by `_watch`.
    """
    if not os.path.isdir("/proc/self/fd"):  # Only Linux lists the open files there.
        return
    milliseconds = 2 * LOSS_SECONDS * 1000
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            opened = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # It was closed meanwhile.
            continue
        with opened:
            if (
                opened.family not in (socket.AF_INET, socket.AF_INET6)
                or opened.type != socket.SOCK_STREAM
            ):
                continue
            before = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            if 0 < before < milliseconds:  # Connections without this limit are left as they are.
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _watch(names: list[str], host: str) -> None:
    """Starts to wait, in the background, until another process is lost.

    This process then ends with a line that names the lost process.

    Process 0, on `host`, has a connection to each of the others and passes on whom it has lost. A
    connection breaks when a process ends, and the operating system breaks it if a host is silent.
    Without one JAX ends this process.
    """
    own = socket.socket() if _number else socket.create_server(("", 0), backlog=len(names))
    # The connections of a server inherit its options.
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {
        "KEEPIDLE": LOSS_SECONDS // 4,
        "KEEPINTVL": LOSS_SECONDS // 4,
        "KEEPCNT": 3,
    }.items():
        if hasattr(socket, f"TCP_{option}"):  # macOS lacks the first.
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
    port, key = distributed.broadcast_from_primary(
        lambda: (own.getsockname()[1], secrets.token_hex())
    )
    expected = {f"{key}{number}".encode(): number for number in range(1, len(names))}
    # Only the thread that ends this process acquires it.
    connections, ending = list[socket.socket](), threading.Lock()

    def follow(connection: socket.socket) -> None:
        # A stranger's, or process 0 cannot be reached.
        with connection, contextlib.suppress(OSError, KeyError):
            if _number:
                connection.connect((host, port))
                connection.sendall(f"{key}{_number}".encode())
            number = 0 if _number else expected.pop(connection.recv(100))
            connections.append(connection)
            try:
                loss = connection.recv(1000).decode() or f"{names[number]} has ended"
            except OSError as error:
                loss = f"{names[number]} is unreachable ({error.strerror})"
            ending.acquire()
            for each in connections:
                with contextlib.suppress(OSError):
                    each.sendall(loss.encode())
            print(f"{prefix()}error: {loss}. {RESUME}.", file=sys.stderr, flush=True)
            os._exit(LOST)

    def accept(server: socket.socket) -> None:
        with server:
            while expected:
                threading.Thread(target=follow, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=follow if _number else accept, args=(own,), daemon=True).start()
    atexit.register(ending.acquire)  # In an orderly end all wait for each other after this.


def check_same(plan: Any) -> None:
    """Raises `UserError` in all processes if one has another plan than the first.

    Directories may differ.

    Settings of `ExperimentConfig` are compared when training or scoring begins.
    """
    leaves = [leaf for leaf in config_tree.leaves(type(plan)) if not leaf.setting.path]
    values = {
        leaf.name: config_tree.get(plan, leaf.name)
        for leaf in leaves
        if leaf.name != "compilation_cache"
    }
    given = {f"--{name}": config_tree.format_value(value) for name, value in values.items()}
    distributed.assert_same_on_all(given, "start all processes with the same flags")


def leave(code: int, *, together: bool) -> int:
    """Ends this process if it is one of several.

    Returns the exit code if it is not, or if all end `together`.

    Otherwise it leaves at once, so that the others find it gone: an orderly end would wait for
    them, and they for it. If another process is lost, the error is raised unless the code says that
    one was printed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if not jax.distributed.is_initialized():
        return code
    if together:
        try:
            # Without a timeout. JAX's own barrier aborts those who wait long, and process 0 may
            # hash a last checkpoint for minutes.
            distributed.run_on_all(lambda: None)
            return code
        except Exception:  # One of them is gone.
            if not code:
                raise
    os._exit(code)


def prefix() -> str:
    """Returns the prefix of the errors that this process prints."""
    return f"process {_number}: " if _number else ""


def lost_another(error: BaseException) -> bool:
    """Returns whether an error means that another process is unreachable.

    The error may be of any type (Gloo raises ValueErrors).

    An error that all processes know has gone through collectives, so no process was lost. Files
    have separate connections.
    """
    origin = error
    while origin.__cause__ is not None:
        origin = origin.__cause__
    if not jax.distributed.is_initialized() or distributed.is_known_to_all(error):
        return False
    of_file = isinstance(error, OSError) or isinstance(origin, OSError)
    return not of_file and any(sign in str(origin) for sign in _SIGNS_OF_LOSS)


def announced(environment: Mapping[str, str]) -> Several | None:
    """Returns the processes that environment variables announce, or None if this is the only one.

    Raises `UserError` if only some of the three flags or variables are set, or they contradict each
    other.
    """
    return _from_flags(environment) or _from_slurm(environment) or _from_tpu(environment)


def _from_flags(environment: Mapping[str, str]) -> Several | None:
    missing = [
        f"--{name} (or {variable})"
        for name, variable in _VARIABLES.items()
        if not environment.get(variable)
    ]
    if len(missing) == len(_VARIABLES):
        return None
    announcing = "the three flags or variables that announce processes must be set together"
    require(not missing, f"{announcing}, but {' and '.join(missing)} is not set. Set all or none.")
    coordinator, count, number = (environment[variable] for variable in _VARIABLES.values())
    are_numbers = count.isdecimal() and number.isdecimal()
    require(
        are_numbers and int(number) < int(count) and re.fullmatch(r".+:\d+", coordinator),
        "the coordinator must be HOST:PORT of process 0, such as 10.0.0.1:1234, and process_id a "
        f"number from 0 to num_processes - 1, got coordinator {coordinator!r}, process_id "
        f"{number} and num_processes {count}",
    )
    if int(count) == 1:
        return None
    arguments = {
        "coordinator_address": coordinator,
        "num_processes": int(count),
        "process_id": int(number),
    }
    # Else JAX reads Slurm's variables all the same, and takes one GPU of this host.
    arguments["cluster_detection_method"] = "deactivate"
    return Several(int(count), "--num_processes or JAX_NUM_PROCESSES", arguments)


def _from_slurm(environment: Mapping[str, str]) -> Several | None:
    """Returns the tasks of this Slurm step.

    The job's tasks (SLURM_NTASKS) would be wrong: the shell of `salloc` and the script of `sbatch`
    have that number but are single processes, and would wait for tasks that nobody started.
    """
    count = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if count == 1 or not {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environment.keys():
        return None
    arguments: dict[str, Any] = {"num_processes": count, "cluster_detection_method": "slurm"}
    one_per_host = re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    one_device = "," not in environment.get("CUDA_VISIBLE_DEVICES", ",")
    if "JAX_LOCAL_DEVICE_IDS" not in environment and (one_per_host or one_device):
        # The task shares its visible devices with no other one: it takes all. JAX would take one
        # GPU for each task.
        arguments["local_device_ids"] = []
    return Several(count, "Slurm (SLURM_STEP_NUM_TASKS)", arguments)


def _from_tpu(environment: Mapping[str, str]) -> Several | None:
    if "tpu" not in environment.get("JAX_PLATFORMS", "tpu") or not _has_tpu():
        return None
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    slices = environment.get("MEGASCALE_NUM_SLICES")
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in environment:
        hosts = _metadata("worker-network-endpoints", environment)
        found = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", _metadata("tpu-env", environment))
        slices = slices or (found[1] if found else None)
    count = len((hosts or "").split(",")) * int(slices or 1)
    return Several(count, "the TPU slice", {}) if count > 1 else None


def _has_tpu() -> bool:
    """Returns whether JAX can use a TPU here, without starting it."""
    return importlib.util.find_spec("libtpu") is not None and bool(
        glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")
    )


def _metadata(name: str, environment: Mapping[str, str]) -> str:
    """Returns an attribute from a Cloud TPU machine's metadata server.

    Returns an empty string if the server does not have it.

    Raises `UserError` if the server does not answer: taken for one host, each host of a slice would
    wait for others.
    """
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    with requests.Session() as session:
        session.trust_env = False  # A proxy has another machine's metadata, or none.
        for _ in range(_METADATA_TRIES):
            try:
                answer = session.get(
                    url, headers={"Metadata-Flavor": "Google"}, timeout=_METADATA_SECONDS
                )
            except requests.RequestException as error:
                reason = first_line(error)
                continue
            # Colab's and GKE's servers have none.
            if answer.ok or answer.status_code == requests.codes.not_found:
                return answer.text if answer.ok else ""
            reason = f"HTTP {answer.status_code}"
    silent = (
        f"this machine has a TPU, but the metadata server at {server} did not report "
        f"its hosts ({reason})"
    )
    raise UserError(
        f"{silent}. Set TPU_WORKER_HOSTNAMES=localhost if it is the only host, or retry."
    )
