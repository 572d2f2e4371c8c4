"""A closed engine, and one that is forgotten."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ClosedError

from .small_net import build, tokens, train


def test_after_close_everything_raises(config: infinity.Config) -> None:
    model, optimizer = infinity.wrap(*build(), config)
    train(model, optimizer, 1)
    infinity.close(model)
    for use in (lambda: model(tokens()), optimizer.step, optimizer.state_dict):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.first
@pytest.mark.parametrize("inside", ["nothing", "forward", "backward"])
def test_a_forgotten_model_gives_back_its_threads_and_its_arena(
    inside: str, config: infinity.Config, tmp_path: Path
) -> None:
    """Whatever an interrupt or an error has ended in the middle."""

    def raises(*_: Any) -> None:
        raise KeyboardInterrupt

    def use() -> weakref.ref[Any]:
        model, optimizer = infinity.wrap(*build(), config)
        train(model, optimizer, 1)
        block = model.blocks[1]
        if inside == "forward":
            block.up.register_forward_hook(raises)
        elif inside == "backward":
            block.up.register_forward_hook(lambda module, args, output: output.register_hook(raises) and None)
        if inside != "nothing":
            with pytest.raises(KeyboardInterrupt):
                model(tokens()).backward()
        return weakref.ref(engine_of(model))

    before = threading.active_count()
    engine = use()
    gc.collect()
    assert engine() is None
    until = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
    infinity.close(infinity.wrap(*build(), config)[1])  # the directory is free again


def test_an_optimizer_keeps_its_engine(config: infinity.Config) -> None:
    """A trainer may hold the model in a wrapper of its own, or not any more."""
    model, optimizer = infinity.wrap(*build(), config)
    train(model, optimizer, 1)
    del model
    gc.collect()
    assert infinity.metrics(optimizer)
    assert optimizer.state_dict()["state"]
    infinity.close(optimizer)
