"""Which ranks are gone, and which failed first: a star of TCP connections to rank 0, one thread per rank.

[Note: the kernel is asked who lives] No rank sends heartbeats: a process that computes for minutes may hold
the GIL, or have no core, and a thread that should send "I live" would be late. The kernel answers for it.
When a process ends, in whatever way, the kernel closes its connections: an end of the stream without a
goodbye means that the rank is gone. A host or a link that is gone answers no keepalive probe; the kernel
reports this within ten seconds. A stopped process is alive; for that case, waits have a deadline.

Messages are JSON, one per line. Nothing here takes a lock: `post` may run on any thread, in an exception hook
and after an interrupt. It puts the message into a queue for each connection; the thread sends the queues, and
continues a line that a full buffer has cut. A line that is not a message ends the run with an error.

[Note: alive and outside] A waiting rank asks the others, every few seconds, where they are. Their thread
answers, whatever the program does, unless the process is stopped or holds the GIL. If a rank answers
and none of its engines waits in a collective, it runs code of its own (a barrier, an evaluation, a download).
A wait for such a rank has no deadline. Both ranks log where the two are, first after `notice` seconds, then
after twice as many, and so on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from infinity.core.errors import DivergenceError, RankError
from infinity.core.stack import user_place
from infinity.core.threads import start

_log = logging.getLogger("infinity.ranks")

_POLL: Final = 0.1  # seconds, at most, until an interrupt arrives
_SHOWN: Final = 3  # differences that an error names
_HELLO_SECONDS: Final = 2.0  # for a connection to say who it is
_GRACE_SECONDS: Final = 5.0  # for rank 0 to say who has not come
_CLOSE_SECONDS: Final = 0.5  # for a rank to answer a goodbye
_POST_SECONDS: Final = 0.5  # for what ended a rank to leave it
_LINE: Final = 1 << 20  # bytes, at most, of a message
ASK_SECONDS: Final = 5.0  # between two questions to a rank that is waited for
NOTICE_SECONDS: Final = 30.0
_TEXT: Final = 4000  # characters of an error's text that are sent
#: Keepalive: seconds until the first probe, between probes, and probes. TCP_USER_TIMEOUT is for data that is
#: not acknowledged, in ms.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 8000}


class KeyValueStore(Protocol):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class Watch:
    """This rank's end of the star. `hosts`: where other ranks may reach this one; rank 0's are tried in turn.

    `look` raises RankError for a rank that has ended before it came. Collective: returns when all ranks are
    connected.

    Args:
        notice: seconds that a rank waits for another one until both are told: [Note: alive and outside].
        inside: returns the collective of any engine that this process waits in, in words; "" for none.

    Attributes:
        left: the ranks that have said goodbye.
        waits: rank → (number, what) of the collective that it last said to wait in.

    Raises:
        RankError: a rank has not come within `timeout` seconds, or is gone again.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: KeyValueStore,
        key: str,
        hosts: Sequence[str],
        timeout: float,
        look: Callable[[], None] = lambda: None,
        *,
        notice: float = NOTICE_SECONDS,
        inside: Callable[[], str] = lambda: "",
    ) -> None:
        self.rank, self.world = rank, world
        self._look = look
        self.notice, self._inside = notice, inside
        self._places: dict[int, str] = {}  # where ranks have said that they are
        self._outside: dict[int, float] = {}  # when they last said that they wait in no collective
        self._asked: dict[int, float] = {}  # of rank 0: when it last asked them
        self._next_notice: dict[tuple[int, str, int], float] = {}  # seconds of a wait
        self.left: set[int] = set()
        self.waits: dict[int, tuple[int, str]] = {}
        self._news: dict[str, dict[str, Any]] = {}  # "first": what ended the run; set once
        self._links: dict[int, socket.socket] = {}
        self._out: dict[int, deque[bytes]] = {}  # what is to be sent
        self._ready = False
        self._closed = False
        self._until = 0.0  # when the thread ends even if a rank has not answered the goodbye
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        self._wake.setblocking(False)
        woken.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="infinity-watch", daemon=True)
        start(self._thread)
        deadline = time.monotonic() + timeout
        try:
            if rank == 0:
                self._receive_all(store, key, hosts, deadline, timeout)
            else:
                self._reach(store, key, deadline, timeout)
        except BaseException as error:
            broken = isinstance(error, RuntimeError) and not isinstance(error, RankError)
            told = gone_early(error) if broken else error  # torch's own, of a store whose process has ended
            self.post(told)
            self.close()
            raise told from (error if told is not error else error.__cause__)

    def post(self, error: BaseException) -> None:
        """Tell all ranks that this one failed, unless another failed before."""
        with contextlib.suppress(Exception):  # `str(error)` is anybody's code
            self._spread({"rank": self.rank, "type": type(error).__name__, "text": str(error)[:_TEXT]})
        if self._thread is not threading.current_thread():
            until(lambda: not any(self._out.values()), _POST_SECONDS)

    def check(self) -> None:
        """Raise RankError if another rank failed, or is gone; or if others have lost this one."""
        if self._news and (self._news["first"]["rank"] != self.rank or "gone" in self._news["first"]):
            raise self._error()

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

    def ask(self, number: int, what: str, seconds: float, every: float) -> None:
        """Ask the ranks that have not come to a collective where they are; they show it, at times. This one
        has waited for `seconds`, and asks `every` so many seconds."""
        asks = [self.rank, number, what, seconds, user_place(), every]
        if self.rank == 0:
            self._pass_on(asks)
        else:
            self._tell({"asks": asks})

    def excused(self, number: int, what: str) -> float:
        """Return when, by `time.monotonic`, a rank that is missing last said that it is alive and outside of
        collectives; 0: none has."""
        return max((self._outside.get(r, 0.0) for r in self.missing(number, what)), default=0.0)

    def late(self, number: int, what: str, timeout: float) -> RankError:
        """Return the error of a collective that some ranks have not come to in `timeout` seconds."""
        missing = self.missing(number, what)
        other = [f"rank {r}: {self._places[r]}" for r in missing if r in self._places]
        known = [(r, w) for r, (_, w) in sorted(self.waits.items()) if r in missing]
        other += [f"rank {r} waits in: {w}" for r, w in known if r not in self._places]
        who = f"{named(missing)} ha{'s' if len(missing) == 1 else 've'} not come" if missing else "no end"
        return RankError(
            f"{what}: {who} within {timeout:g} s",
            found="; ".join(other) or None,
            cure="check what those ranks do; if they are only slow, raise rank_timeout",
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
        self._rouse()
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
        self, store: KeyValueStore, key: str, hosts: Sequence[str], deadline: float, timeout: float
    ) -> None:
        token = secrets.token_hex(16)
        with _listener() as listener:
            address = {"hosts": list(hosts), "port": listener.getsockname()[1], "token": token}
            store.set(key, json.dumps(address))
            listener.settimeout(_POLL)
            while len(self._links) < self.world - 1:
                self.check()
                self._look()
                if time.monotonic() > deadline:
                    raise not_come([r for r in range(1, self.world) if r not in self._links], timeout)
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

    def _reach(self, store: KeyValueStore, key: str, deadline: float, timeout: float) -> None:
        pause = 0.001
        while not store.check([key]):
            self._look()
            if time.monotonic() > deadline:
                raise not_come([0], timeout)
            time.sleep(pause := min(2 * pause, _POLL))
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
        looked = 0.0
        while not self._ready:
            if time.monotonic() - looked > _POLL:  # before `check`: rank 0 may hear of it first, and end
                self._look()
                looked = time.monotonic()
            self.check()
            if time.monotonic() > deadline + _GRACE_SECONDS:
                raise not_come([0], timeout)
            time.sleep(0.002)

    def _add(self, rank: int, link: socket.socket) -> None:
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._out[rank] = deque()
        self._links[rank] = link
        self._selector.register(link, selectors.EVENT_READ, (rank, bytearray()))
        self._rouse()

    # -- what is said

    def _tell(self, message: dict[str, Any]) -> None:
        """Send to all ranks that this one is connected to."""
        line = _line(message)
        for out in list(self._out.values()):
            out.append(line)
        self._rouse()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or has ended
            self._wake.send(b"x")

    def _spread(self, news: dict[str, Any]) -> None:
        """Rank 0 decides what came first, and tells it to all; other ranks ask it to."""
        if self.rank != 0 or self._news.setdefault("first", news) is news:
            self._tell({"news": news})

    def _error(self) -> RankError:
        news = self._news["first"]
        if "type" in news:
            return RankError(f"rank {news['rank']} failed: {news['type']}: {news['text']}")
        return RankError(
            f"rank {news['rank']} is gone: {news['gone']}",
            cure="look for what ended it (its output, the kernel's log of killed processes); then start all "
            "ranks again, from the last checkpoint",
        )

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._closed or (self._links and time.monotonic() < self._until):
                for key, _ in self._selector.select(_POLL if self._closed else None):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            key.fileobj.recv(4096)  # type: ignore[union-attr]
                    else:
                        rank, rest = key.data
                        self._read(rank, rest, key.fileobj)  # type: ignore[arg-type]
                for rank, link in list(self._links.items()):
                    self._write(rank, link)
        except Exception as error:  # a thread that has ended hears of nobody's death
            self._news.setdefault("first", {"rank": self.rank, "gone": f"its watch has ended: {error!r}"})
            raise
        for link in list(self._links.values()):
            link.close()
        self._out.clear()
        for key in list(self._selector.get_map().values()):
            if key.data is None:
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()

    def _write(self, rank: int, link: socket.socket) -> None:
        """Send what its buffer takes; the rest when it takes more."""
        if link not in self._selector.get_map():
            return  # it is being added
        out = self._out[rank]
        try:
            while out:
                sent = link.send(out[0])
                if sent < len(out[0]):
                    out[0] = out[0][sent:]
                else:
                    out.popleft()
            if self._closed:
                link.shutdown(socket.SHUT_WR)  # closing would drop the goodbye if something came unread
        except BlockingIOError:
            pass
        except OSError:  # whoever reads that link learns of it
            out.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0)
        key = self._selector.get_key(link)
        if key.events != events:
            self._selector.modify(link, events, key.data)

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
        try:
            if len(tail) > _LINE:
                raise ValueError(f"a line of more than {_LINE} bytes")
            for line in lines:
                self._hear(rank, json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            data, gone = b"", f"what came over its connection is no message ({error})"
        if not data:
            self._selector.unregister(link)
            if rank not in self.left and not self._closed:
                news = {"rank": rank, "gone": gone}
                if self.rank == 0:
                    self._spread(news)
                else:
                    self._news.setdefault("first", news)
                self._write_last(rank, link)
            self._out.pop(rank)
            self._links.pop(rank).close()

    def _write_last(self, rank: int, link: socket.socket) -> None:
        """Tell a rank that is given up why, if it takes that at once."""
        with contextlib.suppress(OSError):
            while self._out[rank]:
                link.send(self._out[rank].popleft())

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        if not isinstance(message, dict):
            raise TypeError("not an object")
        if "news" in message:
            news = message["news"]
            if type(news["rank"]) is not int or not ("gone" in news or ("type" in news and "text" in news)):
                raise ValueError("news without its parts")
            if self.rank == 0:
                self._spread(news)
            else:
                self._news.setdefault("first", news)
            return
        if "left" in message:
            self.left.add(message["left"])
        elif "waits" in message:
            of, number, what = message["waits"]
            self.waits[of] = number, what
        elif "asks" in message:
            self._pass_on(message["asks"])
            return
        elif "at" in message:
            self._note(*message["at"])
        elif "ready" in message:
            self._ready = True
        if self.rank == 0:
            self._tell(message)

    def _pass_on(self, asks: list[Any]) -> None:
        """Answer a rank that waits; as rank 0, also ask those that it waits for, no more often than that."""
        by, number, what, seconds, place, every = asks
        if self.rank == 0:
            now = time.monotonic()
            for rank, out in list(self._out.items()):
                missing = rank != by and self.waits.get(rank) != (number, what)
                if missing and now - self._asked.get(rank, 0.0) > every / 2:
                    self._asked[rank] = now
                    out.append(_line({"asks": asks}))
            self._rouse()
        if by == self.rank or self.waits.get(self.rank) == (number, what):
            return
        inside, mine = self._inside(), user_place()
        text = f"it waits in: {inside} ({mine})" if inside else f"it is in {mine}"
        self._say(
            by,
            (number, what, self.rank),  # once, however many wait for this one
            seconds,
            f"rank {by} has waited for {seconds:.0f} s in: {what} ({place}). This rank, {self.rank}, "
            + (f"waits in: {inside} ({mine})" if inside else f"is in {mine}"),
        )
        answer = [self.rank, not inside, text, number, what, seconds]
        if self.rank == 0:
            self._note(*answer)
        self._tell({"at": answer})

    def _note(self, rank: int, outside: bool, text: str, number: int, what: str, seconds: float) -> None:
        """Hear where a rank is that others wait for."""
        self._places[rank] = text
        if outside:
            self._outside[rank] = time.monotonic()
        else:
            self._outside.pop(rank, None)
        if rank != self.rank and self.waits.get(self.rank) == (number, what):
            self._say(
                rank,
                (number, what, rank),
                seconds,
                f"this rank, {self.rank}, has waited for {seconds:.0f} s in: {what}. Rank {rank}: {text}",
            )

    def _say(self, rank: int, key: tuple[int, str, int], seconds: float, text: str) -> None:
        """Show a notice, unless it comes too soon after the last one of the same wait."""
        after = self._next_notice.get(key, self.notice)
        if seconds >= after:
            same = {k: due for k, due in self._next_notice.items() if k[:2] == key[:2]}
            self._next_notice = {**same, key: 2 * seconds}  # of other waits nobody asks again
            _log.warning("%s", text)


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


def not_come(ranks: list[int], timeout: float) -> RankError:
    """Return the error of ranks that have not come to connect within `timeout` seconds."""
    have = "has" if len(ranks) == 1 else "have"
    return RankError(
        f"{named(ranks)} {have} not come within {timeout:g} s to connect",
        cure="check the output of those ranks; every rank has to call `wrap`",
    )


_ENDED: Final = "infinity/ended"  # in the store: which rank an exception ended before it came
_LEFT: Final = "infinity/left"  # which rank ended otherwise before it came
_HEARD: Final = "infinity/heard"  # how many ranks know of it


def say_early(store: KeyValueStore, rank: int, error: BaseException | None) -> None:
    """Tell the ranks that wait in `store` that this one ends before it has come. None: by no exception."""
    if error is None:
        store.set(_LEFT, json.dumps({"rank": rank, "why": "ended before its `wrap`, without an exception"}))
        return
    why = f"failed before its `wrap`: {type(error).__name__}: {str(error)[:_TEXT]}"
    said = {"rank": rank, "why": why}
    if not store.check([_ENDED]):
        store.set(_ENDED, json.dumps(said))
    store.add(_HEARD, 1)


def check_early(store: KeyValueStore, ranks: Sequence[int]) -> None:
    """Raise RankError if one of `ranks` has ended before it came."""
    for key in (_ENDED, _LEFT):
        said = json.loads(store.get(key)) if store.check([key]) else {}
        if said.get("rank") in ranks:
            store.add(_HEARD, 1)
            raise RankError(
                f"rank {said['rank']} {said['why']}",
                cure=f"fix the cause that ended rank {said['rank']}; all ranks have to come to `wrap`",
            )


def early_heard(store: KeyValueStore) -> int:
    """Return how many ranks know of one that ended early, that one included."""
    return store.add(_HEARD, 0)


def gone_early(error: BaseException) -> RankError:
    """Return the error of a store that answers no more: it is in the process of rank 0, or of torchrun."""
    return RankError(
        "rank 0 is gone: it ended before all ranks had come to `wrap`",
        found=str(error).partition("\n")[0],
        cure="check the output of rank 0, and of torchrun",
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


def by_rank(said: Sequence[str]) -> str:
    """Return "rank 0: this; ranks 1, 2: that"; `said`: by rank."""
    sides: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        sides.setdefault(words, []).append(rank)
    return "; ".join(f"{named(ranks)}: {words}" for words, ranks in sides.items())


def differences(told: Sequence[Mapping[str, str]]) -> str:
    """Return the first names of which ranks have different values, with these; `told`: by rank."""
    names = [n for n in {n: 0 for each in told for n in each} if len({each.get(n) for each in told}) > 1]
    found = [f"{n}: {by_rank([each.get(n, 'not there') for each in told])}" for n in names[:_SHOWN]]
    more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ". ".join(found) + more if names else "the same, in different orders"


def diverged(said: Sequence[str]) -> DivergenceError:
    """Return the error that names what each rank is about to do; `said`: by rank."""
    layers = any("of unit '" in words for words in said)
    return DivergenceError(
        "ranks do different things",
        found=by_rank(said),
        cure="run the same layers in the same order on every rank; where the data choose layers, as with "
        'experts, make all of these one unit: Config(units=["MoE"]) with the class of the module whose '
        'forward chooses, or units=["experts"] with the name of their ModuleList'
        if layers
        else "make the same calls in the same order on every rank",
    )


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Poll until `condition` holds, for `seconds` at most; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
