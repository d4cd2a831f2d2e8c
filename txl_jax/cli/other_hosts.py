"""Multi-host commands: detects whether this process is one of several, and joins the others.

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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import requests
from absl import flags

from txl_jax.config import config_tree
from txl_jax.errors import UserError, first_line
from txl_jax.runtime import distributed, output
from txl_jax.runtime.stop import METADATA_SERVER, named_metadata_server

# The flags, and the variables that a launcher sets instead of them.
_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
FLAG_NAMES = tuple(_VARIABLES)

# A host that dies silently holds up the others for this long: they wait in a collective, which may
# not have a timeout. With a much lower value, a host with a briefly slow network would be taken for
# dead.
LOSS_SECONDS = 60
# Startup timeout: hosts of one job may be ready minutes apart.
START_SECONDS = 300
# Exit code of a process that has lost another (75): nothing was wrong with the command, and
# rerunning it resumes.
LOST = os.EX_TEMPFAIL
RESUME = "Rerun the same command on all hosts to resume from the last checkpoint"
# Time within which `_watch` names the lost process after a collective has failed.
SECONDS_TO_NAME = 5
# A process that waits longer for the others prints a line.
_SILENT_SECONDS = 10
# A silent host counts as lost after this many unanswered probes.
_KEEPALIVE_PROBES = 3

_METADATA_SECONDS = 3
_METADATA_TRIES = 3
# Words in the errors of collectives when a process is gone: on CPUs, on GPUs, of JAX's own service.
_SIGNS_OF_LOSS = (
    "Gloo",
    "NCCL",
    "UNAVAILABLE",
    "Connection closed",
    "Connection reset",
    "coordination service",
)

# The index of this process, once it has joined the others.
_number = 0


class Processes(NamedTuple):
    """The processes of one run."""

    num_processes: int
    # The flags, variables or system that announced them.
    source: str
    # For `jax.distributed.initialize`.
    arguments: dict[str, Any]


def define_flags() -> None:
    """Defines the flags of a command that supports multiple hosts."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0 (or JAX_COORDINATOR_ADDRESS).")
    flags.DEFINE_integer("num_processes", None, "Number of processes (or JAX_NUM_PROCESSES).")
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0 (or JAX_PROCESS_ID).")


def environment() -> dict[str, str]:
    """Returns the environment variables, overridden by the flags for them."""
    variables = dict(os.environ)
    for name, variable in _VARIABLES.items():
        if name in flags.FLAGS and flags.FLAGS[name].present:
            variables[variable] = str(flags.FLAGS[name].value)
    return variables


def join(processes: Processes) -> None:
    """Joins the other processes, before JAX touches a device.

    All processes call it. Drops the standard output of all processes except the first, and of
    libraries (Gloo prints each connection).

    Raises:
      ConnectionError: If they do not all connect.
    """
    global _number
    # Libraries write to file descriptor 1, and this process from now on to a copy of it.
    sys.stdout = output.tolerant(os.dup(1), sys.stdout)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)

    _connect(processes)
    _outlast_cuts()
    if not distributed.is_primary():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    _number = jax.process_index()

    # Gloo gives up on processes that reach the first collective 30 s late. Later collectives have
    # no such limit.
    names = distributed.gather_texts(f"process {_number} on {socket.gethostname()}")
    coordinator = processes.arguments.get("coordinator_address")
    if coordinator is None:
        # Slurm and TPUs pass the address of process 0 only to JAX, but its name ends with its host.
        host = names[0].split()[-1]
    else:
        host = coordinator.rpartition(":")[0]
    _watch(names, host)


def _connect(processes: Processes) -> None:
    """Waits until all processes have connected. Prints a line if this takes long.

    Raises:
      ConnectionError: If they do not all connect in time.
    """
    # JAX aborts a process that waits in vain, without an exception.
    line = (
        f"waiting for {processes.num_processes} processes, announced by {processes.source}. "
        f"Start the same command on every host (timeout: {START_SECONDS} s)."
    )
    note = threading.Timer(_SILENT_SECONDS, print, [line], {"file": sys.stderr, "flush": True})
    note.start()
    try:
        jax.distributed.initialize(
            **processes.arguments,
            initialization_timeout=START_SECONDS,
            # If a process hangs, JAX aborts the others. `_watch` notices a silent host before that.
            heartbeat_timeout_seconds=2 * LOSS_SECONDS,
        )
    except (RuntimeError, ValueError) as error:  # JAX's own errors are RuntimeErrors.
        raise ConnectionError(
            f"{processes.num_processes} processes were announced by {processes.source}, but not "
            f"all of them connected ({first_line(error)}). Start the same command on every host, "
            "and check that all can reach process 0."
        ) from error
    finally:
        note.cancel()


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
            is_internet = opened.family in (socket.AF_INET, socket.AF_INET6)
            if not is_internet or opened.type != socket.SOCK_STREAM:
                continue
            limit = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            # Connections without this limit (their value is 0) are left unchanged.
            if 0 < limit < milliseconds:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _watch(names: list[str], host: str) -> None:
    """Starts to watch, in the background, whether another process is lost.

    If one is, this process prints an error that names it, and exits. All processes call this.

    Process 0 has a connection to each of the others and tells the rest which process it has lost. A
    connection breaks when a process ends, and the operating system breaks it if a host is silent.
    Without a connection, JAX ends this process.

    Args:
      names: "process N on HOST" of each process, in order.
      host: The host of process 0.
    """
    is_first = _number == 0
    if is_first:
        endpoint = socket.create_server(("", 0), backlog=len(names))
    else:
        endpoint = socket.socket()
    _notice_silence(endpoint)
    port, key = distributed.broadcast_from_primary(
        lambda: (endpoint.getsockname()[1], secrets.token_hex())
    )
    watch = _Watch(names, key)
    if is_first:
        _start_thread(watch.accept_all, endpoint)
    else:
        _start_thread(watch.connect, endpoint, (host, port))
    # In an orderly exit all processes wait for each other after this, and lost connections no
    # longer matter.
    atexit.register(watch.ending.acquire)


def _notice_silence(endpoint: socket.socket) -> None:
    """Lets connections break if the other host is silent for LOSS_SECONDS.

    The connections of a server inherit its options.
    """
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The first probe comes after a pause too.
    seconds = LOSS_SECONDS // (_KEEPALIVE_PROBES + 1)
    options = {"TCP_KEEPIDLE": seconds, "TCP_KEEPINTVL": seconds, "TCP_KEEPCNT": _KEEPALIVE_PROBES}
    for name, value in options.items():
        # macOS has no TCP_KEEPIDLE.
        if hasattr(socket, name):
            endpoint.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _start_thread(target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()


class _Watch:
    """The connections by which this process notices that another one is lost.

    Process 0 is connected to all others, and each of them to process 0. A process that connects
    sends a key that only the run's processes know, and its number.
    """

    def __init__(self, names: list[str], key: str):
        # "process N on HOST" of each process.
        self._names = names
        self._key = key
        # Process 0: the greetings of processes that have not connected yet, with their numbers.
        self._expected = {self._greeting(number): number for number in range(1, len(names))}
        self._connections: list[socket.socket] = []
        # The thread that ends this process acquires it and never releases it, so that only one
        # thread does.
        self.ending = threading.Lock()

    def _greeting(self, number: int) -> bytes:
        """Returns what the process with this number sends when it connects."""
        return f"{self._key}{number}".encode()

    def accept_all(self, server: socket.socket) -> None:
        """Process 0: accepts connections until all other processes have one."""
        with server:
            while self._expected:
                connection, _ = server.accept()
                _start_thread(self._admit, connection)

    def _admit(self, connection: socket.socket) -> None:
        """Follows a connection to process 0, unless a stranger has sent another key."""
        with connection, contextlib.suppress(OSError, KeyError):
            number = self._expected.pop(connection.recv(100))
            self._follow(connection, number)

    def connect(self, connection: socket.socket, address: tuple[str, int]) -> None:
        """Other processes: connects to process 0, if it can be reached, and follows it."""
        with connection, contextlib.suppress(OSError):
            connection.connect(address)
            connection.sendall(self._greeting(_number))
            self._follow(connection, 0)

    def _follow(self, connection: socket.socket, number: int) -> None:
        """Waits until the process at the other end is lost or passes on a loss.

        Then passes it on to all connected processes, and ends this one.
        """
        self._connections.append(connection)
        try:
            # Nothing is received when the other end is closed.
            loss = connection.recv(1000).decode() or f"{self._names[number]} has ended"
        except OSError as error:
            loss = f"{self._names[number]} is unreachable ({error.strerror})"

        self.ending.acquire()
        for other in self._connections:
            with contextlib.suppress(OSError):
                other.sendall(loss.encode())
        print(f"{prefix()}error: {loss}. {RESUME}.", file=sys.stderr, flush=True)
        os._exit(LOST)


def check_same(plan: Any) -> None:
    """Checks that all processes have the same plan, except for directories. All of them call it.

    Settings of `ExperimentConfig` are compared when training or scoring begins.

    Raises:
      UserError: In all processes, if one has another plan than the first.
    """
    settings = {}
    for leaf in config_tree.leaves(type(plan)):
        if not leaf.setting.path and leaf.name != "compilation_cache":
            value = config_tree.get(plan, leaf.name)
            settings[f"--{leaf.name}"] = config_tree.format_value(value)
    distributed.assert_same_on_all(settings, "start all processes with the same flags")


def leave(code: int, *, together: bool) -> int:
    """Ends this process if it is one of several.

    Unless all processes end together, it exits immediately, so that the others notice: in an
    orderly exit, it and the others would wait for each other.

    Args:
      code: The exit code. If it is not 0, an error was printed.
      together: Whether all processes end. If so, they wait for each other in this function.

    Returns:
      The exit code, if this is the only process, or if all end together.

    Raises:
      Exception: If all should end together, another process is lost, and the code is 0.
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
        except Exception:
            # Another process is gone.
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
    if not jax.distributed.is_initialized() or distributed.is_known_to_all(error):
        return False
    origin = error
    while origin.__cause__ is not None:
        origin = origin.__cause__
    if isinstance(error, OSError) or isinstance(origin, OSError):
        return False
    return any(sign in str(origin) for sign in _SIGNS_OF_LOSS)


def announced(environment: Mapping[str, str]) -> Processes | None:
    """Returns the processes that environment variables announce, or None if this is the only one.

    Raises:
      UserError: If only some of the three flags or variables are set, or they contradict each
        other, or if a TPU's metadata server does not answer.
    """
    return _from_flags(environment) or _from_slurm(environment) or _from_tpu(environment)


def _from_flags(environment: Mapping[str, str]) -> Processes | None:
    """Returns the processes that the three flags or variables announce."""
    missing = []
    for name, variable in _VARIABLES.items():
        if not environment.get(variable):
            missing.append(f"--{name} (or {variable})")
    if len(missing) == len(_VARIABLES):
        return None
    if missing:
        raise UserError(
            "the three flags or variables that announce processes must be set together, but "
            f"{' and '.join(missing)} is not set. Set all three, or remove the others."
        )

    coordinator = environment[_VARIABLES["coordinator"]]
    count = environment[_VARIABLES["num_processes"]]
    number = environment[_VARIABLES["process_id"]]
    are_numbers = count.isdecimal() and number.isdecimal()
    is_address = re.fullmatch(r".+:\d+", coordinator) is not None
    if not are_numbers or int(number) >= int(count) or not is_address:
        raise UserError(
            "the coordinator must be HOST:PORT of process 0, such as 10.0.0.1:1234, and process_id "
            f"a number from 0 to num_processes - 1, got coordinator {coordinator!r}, process_id "
            f"{number} and num_processes {count}"
        )
    # A single process has no others to join.
    if int(count) == 1:
        return None
    arguments: dict[str, Any] = {
        "coordinator_address": coordinator,
        "num_processes": int(count),
        "process_id": int(number),
        # Otherwise JAX would still read Slurm's variables, and take only one GPU of this host.
        "cluster_detection_method": "deactivate",
    }
    return Processes(int(count), "--num_processes or JAX_NUM_PROCESSES", arguments)


def _from_slurm(environment: Mapping[str, str]) -> Processes | None:
    """Returns the tasks of this Slurm step.

    The job's tasks (SLURM_NTASKS) would be wrong: the shell of `salloc` and the script of `sbatch`
    have that number but are single processes, and would wait for tasks that nobody started.
    """
    count = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    # JAX reads the index of this task and the host of process 0 from these two variables.
    if count == 1 or not {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environment.keys():
        return None
    arguments: dict[str, Any] = {"num_processes": count, "cluster_detection_method": "slurm"}

    # A task that does not share its visible devices with another task takes all of them. JAX would
    # take one GPU per task. Slurm writes 1 for one task on one host, and 1(x4) on each of four.
    tasks_per_host = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    is_alone_on_host = re.fullmatch(r"1(\(x\d+\))?", tasks_per_host) is not None
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    has_one_device = devices is not None and "," not in devices
    if "JAX_LOCAL_DEVICE_IDS" not in environment and (is_alone_on_host or has_one_device):
        # An empty list means all visible devices.
        arguments["local_device_ids"] = []
    return Processes(count, "Slurm (SLURM_STEP_NUM_TASKS)", arguments)


def _from_tpu(environment: Mapping[str, str]) -> Processes | None:
    """Returns the hosts of this TPU slice, or of all slices that are connected.

    If no variable lists the hosts, the metadata server is asked for them and for the number of
    slices. If a variable lists them, the server is not asked at all. TPU_WORKER_HOSTNAMES=localhost
    therefore helps if the server does not answer, as the error of `_metadata` advises.
    """
    # JAX_PLATFORMS may keep JAX off the TPU.
    if "tpu" not in environment.get("JAX_PLATFORMS", "tpu") or not _has_tpu():
        return None
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    slices = environment.get("MEGASCALE_NUM_SLICES")
    # An empty TPU_WORKER_HOSTNAMES counts as a list. With TPU_SKIP_MDS_QUERY, JAX does not ask the
    # server either.
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in environment:
        hosts = _metadata("worker-network-endpoints", environment)
        # The attribute is a list of lines such as MEGASCALE_NUM_SLICES: '2'.
        line = re.search(r"MEGASCALE_NUM_SLICES: *'?(\d+)", _metadata("tpu-env", environment))
        # A variable takes precedence, unless it is empty.
        if line is not None and not slices:
            slices = line[1]
    # Without a list there is a single host.
    hosts_per_slice = len((hosts or "").split(","))
    count = hosts_per_slice * int(slices or 1)
    if count <= 1:
        return None
    # JAX finds the address of process 0, and this process's index, itself.
    return Processes(count, "the TPU slice", {})


def _has_tpu() -> bool:
    """Returns whether JAX can use a TPU on this machine, without starting it."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*"))


def _metadata(name: str, environment: Mapping[str, str]) -> str:
    """Returns an attribute from a Cloud TPU machine's metadata server.

    Returns an empty string if the server does not have it.

    Raises:
      UserError: If the server does not answer. Assuming a single host would be wrong: each host of
        a slice would wait for the others.
    """
    server = named_metadata_server(environment) or METADATA_SERVER
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    with requests.Session() as session:
        # A proxy would return another machine's metadata, or fail.
        session.trust_env = False
        for _ in range(_METADATA_TRIES):
            try:
                answer = session.get(
                    url, headers={"Metadata-Flavor": "Google"}, timeout=_METADATA_SECONDS
                )
            except requests.RequestException as error:
                reason = first_line(error)
                continue
            if answer.ok:
                return answer.text
            # Colab's and GKE's servers do not have the attributes.
            if answer.status_code == requests.codes.not_found:
                return ""
            reason = f"HTTP {answer.status_code}"
    raise UserError(
        f"this machine has a TPU, but the metadata server at {server} did not report its hosts "
        f"({reason}). Set TPU_WORKER_HOSTNAMES=localhost if it is the only host, or retry."
    )
