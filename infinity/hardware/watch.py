"""Who of the ranks failed first, and who is gone.

[Note: who is gone] Every rank holds one TCP connection to the first. The kernel closes that of a process that
dies, whatever it died of, and keepalive finds a machine or a link that is gone within 10 s (tcp(7):
TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT). So nobody has to beat like a heart, and a rank
that only computes for long is not taken for dead: that is what deadlines are for. A connection that ends
without a word of farewell is a rank that is gone. Who fails says so over it; the first rank keeps what came
first, and tells all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
from typing import Any, Final

from infinity.core.errors import RankError
from infinity.core.locks import lock

_IDLE, _EVERY, _PROBES = 3, 2, 3  # seconds until the first probe, between probes; probes
_CONNECT: Final = 30.0  # seconds
_MOST: Final = 1 << 16  # bytes of a message


class Watch:
    """One rank's end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._first: dict[str, Any] | None = None  # what the first rank to fail said, or was found to be
        self._lock = lock("watch")
        self._links: dict[int, socket.socket] = {}  # by rank at the other end
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="infinity-watch", daemon=True)

    # -- how they find each other -----------------------------------------------------------

    def listen(self, address: str, world: int) -> tuple[socket.socket, dict[str, Any]]:
        """On the first rank: return a socket, and what the others need to know to `join`."""
        server = socket.create_server(("", 0), backlog=world)
        return server, {"address": address, "port": server.getsockname()[1], "token": secrets.token_hex(16)}

    def accept(self, server: socket.socket, told: dict[str, Any], world: int) -> None:
        """On the first rank: wait for all others.

        Raises:
            RankError: they have not come.
        """
        with server:
            server.settimeout(_CONNECT)
            while len(self._links) < world - 1:
                try:
                    link, _ = server.accept()
                except OSError as error:
                    raise _unreachable(
                        f"{world - 1 - len(self._links)} ranks have not come", error
                    ) from error
                hello = _first_line(link)
                if hello is not None and secrets.compare_digest(str(hello.get("token")), told["token"]):
                    self._links[int(hello["rank"])] = link
                else:
                    link.close()  # somebody else
        self._begin()

    def join(self, told: dict[str, Any]) -> None:
        """On another rank: connect to the first.

        Raises:
            RankError: it cannot be reached.
        """
        try:
            link = socket.create_connection((told["address"], told["port"]), timeout=_CONNECT)
            link.sendall(_line({"token": told["token"], "rank": self.rank}))
        except OSError as error:
            raise _unreachable(f"rank 0 at {told['address']}:{told['port']}", error) from error
        self._links[0] = link
        self._begin()

    def _begin(self) -> None:
        for link in self._links.values():
            link.settimeout(5.0)  # of a write: what is said is short, and the kernel takes it
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, _IDLE),
                (socket.TCP_KEEPINTVL, _EVERY),
                (socket.TCP_KEEPCNT, _PROBES),
                (socket.TCP_USER_TIMEOUT, 1000 * (_IDLE + _EVERY * _PROBES)),
            ):
                link.setsockopt(socket.IPPROTO_TCP, option, value)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether any rank has."""
        return self._first is not None

    def check(self) -> None:
        """Raise `RankError` if any rank has failed, or is gone."""
        if (said := self._first) is not None:
            raise RankError(
                f"rank {said['rank']} {said['kind']}",
                expected="all ranks doing the same, to the end",
                found=said["text"],
                cure="see to what that rank says, and start all ranks again",
            )

    # -- what is said -----------------------------------------------------------------------

    def post(self, kind: str, text: str) -> None:
        """This rank failed: tell the others, unless somebody was first."""
        self._learn({"rank": self.rank, "kind": kind, "text": text[:4096]})

    def close(self) -> None:
        """Say farewell. A second call does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            links = tuple(self._links.values())
        for link in links:
            with contextlib.suppress(OSError):
                link.sendall(_line({"farewell": self.rank}))
        self._wake.close()

    def _learn(self, said: dict[str, Any]) -> None:
        """Keep what was first; the first rank tells all, the others the first rank."""
        with self._lock:
            if self._first is not None or self._closing:
                return
            self._first = said
            links = [
                link for rank, link in self._links.items() if self.rank == 0 or said["rank"] == self.rank
            ]
        for link in links:
            with contextlib.suppress(OSError):
                link.sendall(_line(said))

    # -- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, (rank, bytearray()))
            while not self._closing:
                for key, _ in selector.select():
                    if key.data is None or not self._hear(key.fileobj, *key.data):
                        selector.unregister(key.fileobj)
        for link in (*self._links.values(), self._woken):
            link.close()

    def _hear(self, link: Any, rank: int, heard: bytearray) -> bool:
        """Take what has come from `rank`; return whether more may."""
        why = "its process ended without a word"
        try:
            data = link.recv(_MOST)
        except TimeoutError:
            return True
        except OSError as error:
            data, why = b"", f"its machine cannot be reached: {os.strerror(error.errno or 0)}"
        heard += data
        while b"\n" in heard:
            line, _, rest = bytes(heard).partition(b"\n")
            heard[:] = rest
            said = json.loads(line)
            if "farewell" in said:
                return False
            self._learn(said)
        if not data:
            self._learn({"rank": rank, "kind": "is gone", "text": why})
        return bool(data)


def address_of_first(local: bool) -> str:
    """Return the address at which the others reach this machine, where the first rank is; `local`: all are on
    it."""
    if local:
        return "127.0.0.1"
    for name in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(name) if name else ""
            if address and not address.startswith("127."):
                with socket.socket() as probe:
                    probe.bind((address, 0))  # it is one of ours
                return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent (RFC 5737)
        return str(probe.getsockname()[0])


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _first_line(link: socket.socket) -> dict[str, Any] | None:
    """Return what a caller says first; None: it is no rank of ours."""
    link.settimeout(_CONNECT)
    heard = b""
    with contextlib.suppress(OSError, ValueError):
        while not heard.endswith(b"\n") and len(heard) < 1024:
            byte = link.recv(1)  # no more than the line
            if not byte:
                return None
            heard += byte
        said = json.loads(heard)
        return said if isinstance(said, dict) else None
    return None


def _unreachable(what: str, error: OSError) -> RankError:
    return RankError(
        "the ranks do not find each other",
        expected=f"a connection within {_CONNECT:.0f} s",
        found=f"{what}: {error}",
        cure="MASTER_ADDR as an address of the first rank's machine that the others reach, and no firewall "
        "between them",
    )
