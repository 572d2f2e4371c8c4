"""`infinity generate`: text after prompts, by a model of any size, and what bounds its speed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import click

from infinity.api.engine import Engine
from infinity.api.wrap import close
from infinity.core.config import Config
from infinity.core.errors import ConfigError, DataError
from infinity.core.sizes import format_size
from infinity.core.spans import CAUSES

from .console import finish, gigabytes, seldom, status_line
from .settings import read_values, run_of
from .writer import Writer, open_writer

_EVERY: Final = 1.0  # seconds between two words of how far it is


def generate_command(
    directory: str,
    text: str | None,
    file: str | None,
    tokens: int,
    at_once: int,
    temperature: float,
    drawn: int,
    config_file: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Write as the parameters of the command say; return the exit code."""
    texts = [text] if text is not None else []
    texts += read_prompts(file) if file is not None else []
    for each in texts:
        try:
            each.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "a prompt is no text", expected="text in UTF-8", found=ascii(each), cure="--prompt TEXT"
            ) from None
    if not texts:
        raise ConfigError(
            "nothing to go on from",
            expected="a prompt, or a file of prompts",
            found="none",
            cure="--prompt TEXT",
        )
    config = Config(**run_of(read_values(config_file, given)).engine)
    stream = len(texts) == 1 and not as_json
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as status:
        say = status.enter_context(status_line(quiet=as_json))
        writer = open_writer(directory, config, _reading(seldom(say)))
        stack.callback(close, writer.model)
        task = _Task(writer, tokens, at_once, temperature, drawn)
        say(f"{writer.name}: {task.parameters:,} parameters")
        if stream:
            status.close()  # the text comes where it was
        result = task.run(texts, None if stream else seldom(say), _streamed if stream else None)
        if not stream and not as_json:
            for number, output in enumerate(result["outputs"]):
                click.echo(f"[{number + 1}] {output['prompt']}{output['text']}")
    return finish(result, lambda made: click.echo(made["sentence"], err=True), as_json=as_json)


def read_prompts(path: str) -> list[str]:
    """Return the prompts in a file: its lines without empty ones, or the strings of JSON lines.

    Raises:
        DataError: it cannot be read, or has none.
    """
    try:
        if path == "-":
            content = sys.stdin.read()
        else:
            with open(os.path.expanduser(path), encoding="utf-8") as file:
                content = file.read()
        lines = [line for line in content.splitlines() if line.strip()]
        found = [json.loads(line) for line in lines] if path.endswith(".jsonl") else lines
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"the prompts in {path!r} cannot be read",
            expected="text in UTF-8, one prompt a line; in a .jsonl, one JSON string a line",
            found=str(error),
            cure="check --prompts",
        ) from error
    found = [each.get("prompt") if isinstance(each, dict) else each for each in found]
    if not found or not all(isinstance(each, str) for each in found):
        raise DataError(
            f"the prompts in {path!r} are none",
            expected='a prompt a line; in a .jsonl, "text" or {"prompt": "text"}',
            found=repr(next((e for e in found if not isinstance(e, str)), "an empty file")),
            cure="check --prompts",
        )
    return found


def _reading(say: Callable[[str], None]) -> Callable[[int, int], None]:
    return lambda done, total: say(f"reading the model: {format_size(done)} of {format_size(total)}")


def _streamed(text: str) -> None:
    click.echo(text, nl=False)


class Figures(NamedTuple):
    """What a model had done at some moment. Times in seconds."""

    time: float
    stalls: Mapping[str, float]
    bytes_read: int
    reading: float  # in which the busiest drive was at work

    @classmethod
    def of(cls, engine: Engine) -> Figures:
        stats, rings = engine.store.stats(), engine.store.ring_stats()
        return cls(
            time.perf_counter(),
            {cause: ns / 1e9 for cause, ns in engine.recorder.stalls.items()},
            sum(s.bytes_read for s in stats),
            max((r.active_seconds for r in rings), default=0.0),
        )


class _Task:
    """Prompts on their way to text."""

    def __init__(self, writer: Writer, tokens: int, batch: int, temperature: float, seed: int) -> None:
        self._writer = writer
        self._tokens, self._batch = tokens, batch
        self._temperature, self._seed = temperature, seed
        self.parameters = sum(s.spec.numel for s in writer.engine.params.values())
        self._pieces: list[tuple[Figures, Figures]] = []  # from one token to the next

    def run(
        self,
        texts: Sequence[str],
        say: Callable[[str], None] | None,
        streamed: Callable[[str], None] | None,
    ) -> dict[str, Any]:
        """Return what was written, and figures. `say`: is told how far it is; `streamed`: the text, as it
        comes, of a single prompt."""
        rows = [self._writer.encode(text) for text in texts]
        self._writer.check(rows, self._tokens)
        began = time.perf_counter()
        written: list[list[int]] = []
        if streamed is not None:
            streamed(texts[0])
        for number, begin in enumerate(range(0, len(rows), self._batch)):
            batch = rows[begin : begin + self._batch]
            with self._told(number, len(batch), -(-len(rows) // self._batch), say, streamed) as told:
                written += self._writer.write(
                    batch, self._tokens, temperature=self._temperature, seed=self._seed + number, told=told
                )
        if streamed is not None:
            streamed("\n")
        seconds = time.perf_counter() - began
        outputs = [
            {"prompt": text, "text": self._writer.text_of(row), "tokens": len(row)}
            for text, row in zip(texts, written, strict=True)
        ]
        tokens = sum(map(len, written))
        figures = per_forward([(a, b) for a, b in self._pieces])
        return {
            "model": self._writer.name,
            "parameters": self.parameters,
            "outputs": outputs,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            **figures,
            "sentence": sentence(tokens, seconds, figures),
        }

    @contextlib.contextmanager
    def _told(
        self,
        number: int,
        rows: int,
        batches: int,
        say: Callable[[str], None] | None,
        streamed: Callable[[str], None] | None,
    ) -> Iterator[Callable[[list[int]], None]]:
        engine, decoded = self._writer.engine, self._writer.decoder()
        last: list[Figures] = []
        said = [0.0]

        def told(tokens: list[int]) -> None:
            now = Figures.of(engine)
            if last:  # the first token is that of the prompt, whose forward is another
                self._pieces.append((last[-1], now))
            last.append(now)
            if streamed is not None:
                streamed(decoded(tokens[0], len(last) == self._tokens))
            if say is not None and (now.time - said[0] > _EVERY or len(last) == self._tokens):
                said[0] = now.time
                speed = rows / (now.time - last[-2].time) if len(last) > 1 else 0.0
                say(
                    f"batch {number + 1} of {batches}: {len(last)} of {self._tokens} tokens"
                    + (f", {speed:.3g} tokens/s" if speed else "")
                )

        yield told


def per_forward(pieces: Sequence[tuple[Figures, Figures]]) -> dict[str, Any]:
    """Return what a forward that makes one token of each row took, on the mean: seconds, bytes read, the
    rate of the drives while they were at work, and what each resource needed. Without pieces: None."""
    count = len(pieces)
    if not count:
        return {"forwards": 0, "seconds_per_forward": None, "bound": None}
    seconds = sum(b.time - a.time for a, b in pieces) / count
    stalls = {c: sum(b.stalls[c] - a.stalls[c] for a, b in pieces) / count for c in CAUSES}
    nbytes = sum(b.bytes_read - a.bytes_read for a, b in pieces) / count
    reading = sum(b.reading - a.reading for a, b in pieces) / count
    needs = {"nvme": reading, "link": stalls["h2d"], "compute": max(0.0, seconds - sum(stalls.values()))}
    return {
        "forwards": count,
        "seconds_per_forward": seconds,
        "bytes_read_per_forward": nbytes,
        "nvme_bytes_per_second": nbytes / reading if reading > 0 else None,
        "seconds_needed": needs,
        "bound": max(needs, key=lambda name: needs[name]),
    }


def sentence(tokens: int, seconds: float, figures: Mapping[str, Any]) -> str:
    """Say how fast it was, and why."""
    said = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.3g} tokens/s"
    if figures["bound"] is None:
        return said + "."
    needs, whole = figures["seconds_needed"], figures["seconds_per_forward"]
    reads = f"{format_size(figures['bytes_read_per_forward'])} read"
    if figures["nvme_bytes_per_second"]:
        reads += f" at {gigabytes(figures['nvme_bytes_per_second'])} GB/s"
    hidden = {"nvme": f"{needs['compute']:.3g} s of compute", "compute": f"{needs['nvme']:.3g} s of reads"}
    of = {"nvme": "NVMe reads", "link": "copies to the device", "compute": "compute"}[figures["bound"]]
    said += f". Bound by {of}: {needs[figures['bound']]:.3g} of the {whole:.3g} s of a forward; {reads}"
    more = hidden.get(figures["bound"])
    return said + (f", with {more} beside." if more and needs["nvme"] else ".")
