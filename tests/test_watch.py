"""The watch between ranks: what is said arrives whole, and what is no message ends the run with an error."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from infinity.core.errors import RankError
from infinity.hardware.watch import Watch, until


class Store:
    """Torch's store, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        value = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(value).encode()
        return value


class Peer:
    """A rank that says what a test says, over a buffer that takes little."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.link.settimeout(20)

    def lines(self, count: int) -> list[dict[str, object]]:
        data = b""
        while data.count(b"\n") < count:
            came = self.link.recv(1 << 16)
            assert came, data[-200:]
            data += came
        return [json.loads(line) for line in data.splitlines()[:count]]


def joined(world: int) -> tuple[Watch, list[Peer]]:
    """Return rank 0's watch and its peers."""
    store, peers = Store(), []

    def come() -> None:
        assert until(lambda: store.check(["key"]), 10)
        address = json.loads(store.get("key"))
        for rank in range(1, world):
            link = socket.socket()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            link.connect(("127.0.0.1", address["port"]))
            link.sendall(json.dumps({"rank": rank, "token": address["token"]}).encode() + b"\n")
            peers.append(Peer(link))

    thread = threading.Thread(target=come)
    thread.start()
    watch = Watch(0, world, store, "key", ["127.0.0.1"], 20.0)
    thread.join()
    return watch, peers


@pytest.fixture
def make() -> Iterator[Callable[[int], tuple[Watch, list[Peer]]]]:
    made: list[tuple[Watch, list[Peer]]] = []

    def one(world: int) -> tuple[Watch, list[Peer]]:
        made.append(joined(world))
        return made[-1]

    yield one
    for watch, peers in made:
        for peer in peers:
            peer.link.close()
        watch.close()


def test_a_full_buffer_cuts_no_line(make: Callable[[int], tuple[Watch, list[Peer]]]) -> None:
    """What does not fit goes on where it was cut, when the other end reads again."""
    watch, (peer,) = make(2)
    (link,) = watch._links.values()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    words = "a long name " * 400
    for number in range(200):
        watch.waiting(number, words)
    watch.post(ValueError("the last word"))
    lines = peer.lines(202)
    assert lines[0] == {"ready": True}
    assert lines[1:-1] == [{"waits": [0, number, words]} for number in range(200)]
    assert lines[-1] == {"news": {"rank": 0, "type": "ValueError", "text": "the last word"}}


GARBAGE = (
    b"\xff\xfe\n",
    b"5\n",
    b'{"news": {"rank": 1}}\n',
    b'{"waits": [1]}\n',
    b"[" * 100_000 + b"\n",
    b"x" * (3 << 20),
)


@pytest.mark.parametrize("said", GARBAGE, ids=lambda said: repr(said[:20]))
def test_what_is_no_message_ends_the_run(
    said: bytes, make: Callable[[int], tuple[Watch, list[Peer]]]
) -> None:
    watch, (one, two) = make(3)
    sender = threading.Thread(target=_send, args=(one.link, said))
    sender.start()
    assert until(lambda: watch.failed, 10)
    with pytest.raises(RankError, match="rank 1 is gone: what came over its connection is no message"):
        watch.check()
    for peer in (one, two):  # all are told, the one itself too
        (_, news) = peer.lines(2)
        assert news["news"]["rank"] == 1  # type: ignore[index]
    sender.join()
    assert watch._thread.is_alive()


def _send(link: socket.socket, said: bytes) -> None:
    try:
        link.sendall(said)
    except OSError:  # the other end has heard enough
        time.sleep(0)
