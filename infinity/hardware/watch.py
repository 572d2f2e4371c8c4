"""Who of the ranks is gone, and who failed first: a star of TCP connections to rank 0, one thread per rank.

[Note: the kernel is asked who lives] No rank sends heartbeats: a process that computes for minutes holds the
GIL or a stopped core, and a thread that should say "I live" would be late. The kernel answers for it. The
connections of a process that ends, however it ends, are closed: an end of the stream without a goodbye is a
rank that is gone. A host or a link that is gone answers no keepalive probe, which the kernel reports within
ten seconds. A process that is stopped is alive; for that one, waits have a deadline.

Messages are JSON, one per line. Nothing here takes a lock: `post` may run on any thread, in an exception hook
and after an interrupt. A message is one `send` to a socket whose buffer is empty but for a few others.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from infinity.core.errors import DivergenceError, RankError

_POLL: Final = 0.1  # seconds, at most, until an interrupt arrives
_HELLO_SECONDS: Final = 2.0  # for a connection to say who it is
_GRACE_SECONDS: Final = 5.0  # for rank 0 to say who has not come
_CLOSE_SECONDS: Final = 0.5  # for a rank to answer a goodbye
_TEXT: Final = 4000  # characters of an error's text that are sent
#: Keepalive: seconds until the first probe, between probes, and probes. TCP_USER_TIMEOUT is for data that is
#: not acknowledged, in ms.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 8000}


class Store(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Watch:
    """This rank's end of the star. `hosts`: where other ranks may reach this one; rank 0's are tried in turn.

    Collective: returns when all ranks are connected.

    Attributes:
        left: the ranks that have said goodbye.
        waits: rank → (number, what) of the collective that it last said to wait in.

    Raises:
        RankError: a rank has not come within `timeout` seconds, or is gone again.
    """

    def __init__(
        self, rank: int, world: int, store: Store, key: str, hosts: Sequence[str], timeout: float
    ) -> None:
        self.rank, self.world = rank, world
        self.left: set[int] = set()
        self.waits: dict[int, tuple[int, str]] = {}
        self._news: dict[str, dict[str, Any]] = {}  # "first": what ended the run; set once
        self._links: dict[int, socket.socket] = {}
        self._ready = False
        self._closed = False
        self._until = 0.0  # when the thread ends even if a rank has not answered the goodbye
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="infinity-watch", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + timeout
        try:
            if rank == 0:
                self._receive_all(store, key, hosts, deadline, timeout)
            else:
                self._reach(store, key, deadline, timeout)
        except BaseException as error:
            self.post(error)
            self.close()
            raise

    def post(self, error: BaseException) -> None:
        """Tell all ranks that this one failed, unless another failed before."""
        with contextlib.suppress(Exception):  # `str(error)` is anybody's code
            self._spread({"rank": self.rank, "type": type(error).__name__, "text": str(error)[:_TEXT]})

    def check(self) -> None:
        """Raise RankError if another rank failed, or is gone."""
        if self._news and self._news["first"]["rank"] != self.rank:
            raise self._error()

    def first(self, otherwise: int) -> tuple[int, bool]:
        """Return which rank failed first, and whether it is gone; `otherwise` where none is known."""
        news = self._news.get("first", {"rank": otherwise})
        return int(news["rank"]), "gone" in news

    @property
    def failed(self) -> bool:
        """Whether a rank, this one included, failed or is gone."""
        return bool(self._news)

    def waiting(self, number: int, what: str) -> None:
        """Tell all ranks that this one has come to collective `number`, and waits."""
        self._tell({"waits": [self.rank, number, what]})
        if self.rank == 0:
            self.waits[0] = number, what

    def missing(self, number: int, what: str) -> list[int]:
        """Return the ranks that have not said that they wait for this, too. Rank 0 echoes what it is told:
        if it does not, it is the one that is missing, and nothing is known of the others.
        """
        if self.waits.get(self.rank) != (number, what):
            return [0]
        return [r for r in range(self.world) if self.waits.get(r) != (number, what)]

    def late(self, number: int, what: str, timeout: float) -> RankError:
        """Return the error of a collective that some ranks have not come to in `timeout` seconds."""
        missing = self.missing(number, what)
        other = [f"rank {r} waits in: {w}" for r, (_, w) in sorted(self.waits.items()) if r in missing]
        who = f"{named(missing)} ha{'s' if len(missing) == 1 else 've'} not come" if missing else "no end"
        return RankError(
            f"{what}: {who} within {timeout:g} s",
            found="; ".join(other) or None,
            cure="look at what those ranks do; if they are only slow, a longer timeout",
        )

    def ended(self, what: str) -> RankError:
        """Return the error of a collective that ranks have left for good."""
        left = sorted(self.left)
        return RankError(
            f"{what}: {named(left)} ha{'s' if len(left) == 1 else 've'} closed the engine or ended",
            cure="every rank has to run the same steps: the same number of batches, of saves, of evaluations",
        )

    def close(self) -> None:
        """Say goodbye, and end the thread: within a second. A second call does nothing."""
        if self._closed:
            return
        self._tell({"left": self.rank})
        self._until = time.monotonic() + _CLOSE_SECONDS
        self._closed = True  # from here on a link that ends is an answer
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_WR)  # closing would drop the goodbye if something came unread
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _CLOSE_SECONDS)

    def abandon(self) -> None:
        """In a fork of the process: close its copies of the connections, or a rank whose children live on
        would not be gone. What the selector watches is the parent's.
        """
        self._closed = True
        for link in (*self._links.values(), self._wake):
            link.close()
        self._links.clear()

    # -- connecting

    def _receive_all(
        self, store: Store, key: str, hosts: Sequence[str], deadline: float, timeout: float
    ) -> None:
        token = secrets.token_hex(16)
        with _listener() as listener:
            address = {"hosts": list(hosts), "port": listener.getsockname()[1], "token": token}
            store.set(key, json.dumps(address))
            listener.settimeout(_POLL)
            while len(self._links) < self.world - 1:
                self.check()
                if time.monotonic() > deadline:
                    raise _late([r for r in range(1, self.world) if r not in self._links], timeout)
                try:
                    link, _ = listener.accept()
                except TimeoutError:
                    continue
                hello = _hello(link)
                rank = hello.get("rank")
                if hello.get("token") == token and isinstance(rank, int) and 0 < rank < self.world:
                    self._add(rank, link)
                else:
                    link.close()  # a port scanner
        self._ready = True
        self._tell({"ready": True})

    def _reach(self, store: Store, key: str, deadline: float, timeout: float) -> None:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise _late([0], timeout)
            time.sleep(0.01)
        address = json.loads(store.get(key))
        refused: list[str] = []
        for host in address["hosts"]:
            try:
                link = socket.create_connection((host, address["port"]), timeout=5.0)
                link.sendall(_line({"rank": self.rank, "token": address["token"]}))
                break
            except OSError as error:
                refused.append(f"{host}: {error}")
        else:
            raise RankError(
                f"rank {self.rank} cannot reach rank 0 on port {address['port']}",
                found="; ".join(refused),
                cure="set MASTER_ADDR to a name or address of rank 0's machine that every node can reach",
            )
        self._add(0, link)
        while not self._ready:
            self.check()
            if time.monotonic() > deadline + _GRACE_SECONDS:
                raise _late([0], timeout)
            time.sleep(0.002)

    def _add(self, rank: int, link: socket.socket) -> None:
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._links[rank] = link
        self._selector.register(link, selectors.EVENT_READ, (rank, bytearray()))

    # -- what is said

    def _tell(self, message: dict[str, Any]) -> None:
        """Send to all ranks that this one is connected to."""
        line = _line(message)
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # whoever reads that link learns of it
                link.send(line)

    def _spread(self, news: dict[str, Any]) -> None:
        """Rank 0 decides what came first, and tells it to all; other ranks ask it to."""
        if self.rank != 0 or self._news.setdefault("first", news) is news:
            self._tell({"news": news})

    def _error(self) -> RankError:
        news = self._news["first"]
        if "type" in news:
            return RankError(f"rank {news['rank']} failed: {news['type']}: {news['text']}")
        return RankError(f"rank {news['rank']} is gone: {news['gone']}")

    # -- the thread

    def _run(self) -> None:
        while not self._closed or (self._links and time.monotonic() < self._until):
            for key, _ in self._selector.select(_POLL if self._closed else None):
                if key.data is not None:
                    rank, rest = key.data
                    self._read(rank, rest, key.fileobj)  # type: ignore[arg-type]
        for link in list(self._links.values()):
            link.close()
        for key in list(self._selector.get_map().values()):
            if key.data is None:
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()

    def _read(self, rank: int, rest: bytearray, link: socket.socket) -> None:
        gone = "its process ended without a word"
        try:
            data = link.recv(65536)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        except OSError as error:  # ETIMEDOUT, EHOSTUNREACH: no answer to probes
            data, gone = b"", f"its machine does not answer ({error.strerror})"
        rest += data
        *lines, tail = bytes(rest).split(b"\n")
        rest[:] = tail
        for line in lines:
            self._hear(rank, json.loads(line))
        if not data:
            self._selector.unregister(link)
            self._links.pop(rank).close()
            if rank not in self.left and not self._closed:
                news = {"rank": rank, "gone": gone}
                if self.rank == 0:
                    self._spread(news)
                else:
                    self._news.setdefault("first", news)

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        if "news" in message:
            if self.rank == 0:
                self._spread(message["news"])
            else:
                self._news.setdefault("first", message["news"])
            return
        if "left" in message:
            self.left.add(message["left"])
        elif "waits" in message:
            of, number, what = message["waits"]
            self.waits[of] = number, what
        elif "ready" in message:
            self._ready = True
        if self.rank == 0:
            self._tell(message)


def _listener() -> socket.socket:
    """Return a socket that listens on a free port of all addresses."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _hello(link: socket.socket) -> dict[str, Any]:
    """Return who has connected; nothing if that is not said in time."""
    link.settimeout(_HELLO_SECONDS)
    said = b""
    try:
        while not said.endswith(b"\n") and len(said) < 1024:
            data = link.recv(1024)
            if not data:
                break
            said += data
        hello = json.loads(said)
    except (OSError, ValueError):
        return {}
    return hello if isinstance(hello, dict) else {}


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _late(ranks: list[int], timeout: float) -> RankError:
    have = "has" if len(ranks) == 1 else "have"
    return RankError(
        f"{named(ranks)} {have} not come within {timeout:g} s to connect",
        cure="look at the output of those ranks; every rank has to make its engine",
    )


def hosts(first: bool) -> list[str]:
    """Return under which names other ranks may reach this one. `first`: it is the one at MASTER_ADDR."""
    found = []
    if master := os.environ.get("MASTER_ADDR"):
        if first:
            found.append(master)
        with contextlib.suppress(OSError):
            # The address from which this machine would reach it; nothing is sent.
            for family, *_, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
    return list(dict.fromkeys([*found, socket.gethostname(), "127.0.0.1"]))


def named(ranks: Sequence[int]) -> str:
    """Return "rank 2" or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def diverged(said: Sequence[str]) -> DivergenceError:
    """Return the error that names what each rank is about to do; `said`: by rank."""
    sides: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        sides.setdefault(words, []).append(rank)
    return DivergenceError(
        "ranks do different things",
        found="; ".join(f"{named(ranks)}: {words}" for words, ranks in sides.items()),
        cure="run the same code in the same order on every rank; what differs may differ in data only",
    )


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Poll until `condition` holds, for `seconds` at most; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
