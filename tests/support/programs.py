"""Starts this project's programs without importing JAX again for each: most starts of the tests end in a second then.

`command("experiments.text", "--help")` is a command line for `subprocess`, as `python -m experiments.text --help` is.
It starts a small process, the client. A server, one per process of the tests, has imported the library and computed
nothing; it forks for each client. The fork gets the client's arguments, folder, environment and open files, becomes the
program, and ends as any other process does. SIGINT and SIGTERM are passed on to it; SIGKILL cannot be.

What JAX reads from the environment when it is imported is that of the first start; programs run on the CPU.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys

OPEN_FILES = 3
IMPORTED = ("experiments.cli.runner", "experiments.cli.studies", "txl_jax.paper.ablation", "txl_jax.paper.recl")


def command(module: str, *words: str) -> list[str]:
    """Returns the command line of a module with these words."""
    return [sys.executable, "-I", "-S", __file__, "client", _server(), module, *map(str, words)]


@functools.cache
def _server() -> str:
    """Starts the server; returns the address that it listens at."""
    import subprocess  # The client has no need of these two.
    import tempfile

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    address = os.path.join(folder.name, "programs")
    started = subprocess.Popen(
        [sys.executable, __file__, "server", address],
        cwd=root,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([root, os.path.join(root, "tests")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdout and started.stdout.readline() == b"ready\n"
    atexit.register(started.communicate)  # It ends when its input does.
    return address


def serve(address: str) -> None:
    """Forks for each client until the input is at its end; returns in the forks that are to become a program."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # So that the forks share the memory of what was imported.
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                if _keep(connection):
                    return
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # Earlier forks that have ended.
                    pass
    sys.exit()


def _keep(connection: socket.socket) -> bool:
    """Forks once more; waits for that fork, and reports to the client how it ended. Returns True in the fork."""
    message, files, _, _ = socket.recv_fds(connection, 8, OPEN_FILES)
    request = json.loads(connection.makefile("rb").read(int.from_bytes(message, "big")))
    pid = os.fork()
    if pid == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.path[0], sys.argv = request["folder"], request["words"]
        return True
    for file in (*files, *range(OPEN_FILES)):
        os.close(file)
    connection.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def ask(address: str, words: list[str]) -> int:
    """Has a program started with this process's files; returns its exit code, negative for a signal."""
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], range(OPEN_FILES))
        connection.sendall(message)
        answers = connection.makefile()
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        return int(answers.readline())


def _main() -> None:
    job, address, *words = sys.argv[1:]
    if job == "client":
        code = ask(address, words)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
    serve(address)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
