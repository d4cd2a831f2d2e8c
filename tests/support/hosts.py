"""Two hosts and a server as network namespaces: links can be cut, and packets lost.

It needs root, `ip` (iproute2), `nsenter` and `unshare` (util-linux), and `nft` (nftables) to lose
packets.
"""

import contextlib
import ctypes
import os
import re
import socket
import subprocess
import sys
import threading

from support import ON_PATH, ROOT
from support.xla_flags import xla_flags

# Address of the server, and addresses of the hosts host-0 and host-1.
SERVER = "10.77.0.1"
PORT = 8000
ADDRESSES = ("10.77.0.10", "10.77.0.11")
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class Hosts:
    """A context manager, which raises OSError if this computer or user cannot make namespaces.

    The server's namespace has a bridge, to which a link from each host leads.
    """

    def __init__(self, folder):
        self._folder = folder
        self._name = f"txl{os.getpid()}-"
        self._namespaces = ("server", "0", "1")

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for namespace in self._namespaces:
                _run("ip", "netns", "add", self._name + namespace)
                stack.callback(_run, "ip", "netns", "delete", self._name + namespace)
                self._ip(namespace, "link set lo up")
            self._ip("server", "link add bridge type bridge")
            self._ip("server", f"address add {SERVER}/24 dev bridge")
            self._ip("server", "link set bridge up")
            for number, address in enumerate(ADDRESSES):
                self._ip(
                    "server",
                    f"link add link{number} type veth peer eth0 netns {self._name}{number}",
                )
                self._ip("server", f"link set link{number} master bridge up")
                self._ip(number, f"address add {address}/24 dev eth0")
                self._ip(number, "link set eth0 up")
                (self._folder / f"hosts-{number}").write_text(
                    f"127.0.0.1 localhost\n{address} host-{number}\n"
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *unused):
        self._stack.close()

    def let_in(self, server):
        """Lets a threading server of this process answer at SERVER:PORT too."""
        opened = []

        def listen():  # A thread stays in the namespace that it enters, so this one ends.
            with open(f"/run/netns/{self._name}server") as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
            opened.append(socket.create_server((SERVER, PORT), backlog=256))

        def accept():
            with contextlib.suppress(OSError):  # It is closed.
                while True:
                    server.process_request(*opened[0].accept())

        opener = threading.Thread(target=listen)
        opener.start()
        opener.join()
        self._stack.callback(opened[0].close)
        threading.Thread(target=accept, daemon=True).start()

    def start(self, *words, **variables):
        """Starts Python with these words on both hosts.

        They are two processes of one run, with a CPU device each.
        """
        environment = os.environ | ON_PATH
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"{ADDRESSES[0]}:7000",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags(devices=1),
        }
        environment |= variables
        started = []
        for number in range(2):
            names = ["sh", str(self._folder / f"hosts-{number}"), f"host-{number}"]
            enter = ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, *names]
            process = subprocess.Popen(
                [*self._inside(number), *enter, sys.executable, *map(str, words)],
                cwd=ROOT,
                env=environment | {"JAX_PROCESS_ID": str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
        return started

    def cut(self, number):
        """Cuts the link of a host: nothing arrives, and nobody says so."""
        self._ip("server", f"link set link{number} down")

    def mend(self, number):
        self._ip("server", f"link set link{number} up")

    @contextlib.contextmanager
    def losing(self, percent):
        """Loses so many of the packets that arrive anywhere, and at least one in the block."""
        rule = f"iifname != lo numgen random mod 100 < {percent} counter drop"
        made = (
            "add table inet lossy; add chain inet lossy input { type filter hook "
            "input priority 0; }"
        )
        for namespace in self._namespaces:
            _run(*self._inside(namespace), "nft", f"{made}; add rule inet lossy input {rule}")
        yield
        for namespace in self._namespaces:
            counted = _run(*self._inside(namespace), "nft", "list table inet lossy")
            _run(*self._inside(namespace), "nft", "delete table inet lossy")
            assert int(re.search(r"packets (\d+)", counted)[1]) > 0, counted

    def _inside(self, namespace):
        return ["nsenter", f"--net=/run/netns/{self._name}{namespace}"]

    def _ip(self, namespace, words):
        _run("ip", "-n", f"{self._name}{namespace}", *words.split())


def _run(*words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
