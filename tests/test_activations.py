"""The inputs of checkpointed layers go to the host and come back: same bits, less device memory."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.api.engine import engine_of
from infinity.autograd import activations
from infinity.core.errors import ClosedError
from infinity.core.sizes import GiB

from .models import case
from .offloaded import ON_HOST, assert_same, config_for, hooks_on_saved_tensors, train_offloaded, wrap_adamw
from .reference import two_groups

FORMS = ["non-reentrant", "reentrant"]
LAYERS, WIDTH, ROWS = 4, 64, 256  # a layer's input is 64 KiB: the smallest that is offloaded
NBYTES = WIDTH * ROWS * 4


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Iterator[None]:
    torch.set_num_threads(1)  # layers are small: on a busy machine threads only wait for each other
    yield
    assert not hooks_on_saved_tensors()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of any size are offloaded."""
    monkeypatch.setattr(activations, "SMALLEST", 1)


class Stack(nn.Module):
    """x (rows, width) → the same. `run` calls a layer with what `extra` makes of x; `None`: a layer
    that is not recomputed. `storages` has each layer's input, weakly."""

    def __init__(self, layers: int = 8, form: str = "non-reentrant") -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(layers)
        )
        self.form: str | None = form
        self.storages: list[StorageWeakRef] = []
        self.before: Callable[[int, torch.Tensor], torch.Tensor] = lambda i, x: x
        self.after: Callable[[int, torch.Tensor], None] = lambda i, x: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        self.storages.clear()
        for i, layer in enumerate(self.layers):
            x = self.before(i, x)
            self.storages.append(StorageWeakRef(x.untyped_storage()))
            y = layer(x) if self.form is None else checkpoint(layer, x, use_reentrant=self.form != FORMS[0])
            self.after(i, x)
            x = y + 1  # what autograd keeps of this needs neither tensor
            del y
        return x

    def alive(self) -> list[int]:
        """The layers whose inputs are in memory."""
        return [i for i, s in enumerate(self.storages) if not s.expired()]


def wrapped(model: nn.Module, folder: Path, **settings: Any) -> tuple[Any, Any]:
    config = config_for(folder, **{"activations": "host", **ON_HOST, **settings})
    _, optimizer = wrap_adamw(model, config, lr=1e-3)
    return optimizer, engine_of(model).activations


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: infinity.gradient(p) for n, p in model.named_parameters()}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def gradients_of(build: Callable[[], nn.Module], loss: Callable[[Any], Any], folder: Path) -> list[Any]:
    """The gradients after `loss(model)` with activations on the device and on the host."""
    found = []
    for where in ("device", "host"):
        torch.manual_seed(0)
        model = build()
        (folder / where).mkdir()
        optimizer, offload = wrapped(model, folder / where, activations=where)
        loss(model)
        found.append(grads(model))
        if offload is not None:
            assert offload.seen
            assert not offload.kept
            assert offload.peak > 0
            optimizer.zero_grad()
            gc.collect()
            assert offload.in_use == 0, "leases come home"
        infinity.close(optimizer)
    return found


# -- bits --------------------------------------------------------------------------------------


@pytest.mark.first
@pytest.mark.parametrize(("form", "dtype", "accumulate"), [(FORMS[0], "bf16", 2), (FORMS[1], "fp16", 1)])
def test_whole_runs_have_the_same_bits_after_random_delays(
    form: str, dtype: str, accumulate: int, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for where in ("device", "host"):
        (tmp_path / where).mkdir()
        config = config_for(tmp_path / where, activations=where, dtype=dtype, max_grad_norm=0.5)
        this = case("gpt", recompute=form, layers=3)
        runs.append(train_offloaded(this, config, steps=2, accumulate=accumulate, groups=two_groups))
        monkeypatch.setenv("INFINITY_DELAY_SEED", "1")
    assert_same(runs[1], runs[0])
    for name, value in runs[0].first_gradients.items():
        assert torch.equal(value, runs[1].first_gradients[name])


class Mixed(Stack):
    """Both forms, a layer that is not recomputed, nested recomputation, an input that all layers
    share, views of it, and arguments of other kinds and dtypes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        shared = x * 2
        number = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
        few = torch.ones(3)
        nothing = torch.empty(0, WIDTH)

        def run(layer: nn.Module, scale: float, t: torch.Tensor, *rest: Any) -> torch.Tensor:
            other, index, some, none = rest
            t = layer(t) + other.reshape(t.shape) * scale
            return t + (index % 7).to(t.dtype) * 1e-3 + some.sum() + none.sum()

        for i, layer in enumerate(self.layers):
            other = [shared, shared.t(), shared.view(-1), shared][i % 4]
            if i % 4 == 3:
                x = layer(x) + other
            elif i % 4 == 2:

                def inner(t: torch.Tensor, *rest: Any, layer: nn.Module = layer) -> torch.Tensor:
                    t = checkpoint(layer, t, use_reentrant=False)
                    return checkpoint(run, layer, 0.5, t, *rest, use_reentrant=False)

                x = checkpoint(inner, x, other, number, few, nothing, use_reentrant=False)
            else:
                x = checkpoint(run, layer, 0.5, x, other, number, few, nothing, use_reentrant=bool(i % 2))
        return x


@pytest.mark.on_cpu
def test_mixed_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_DELAY_SEED", "1")
    device, host = gradients_of(lambda: Mixed(4), lambda m: m(data()).square().mean().backward(), tmp_path)
    assert same(host, device)


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_device_memory_is_let_go_between_forward_and_backward(form: str, tmp_path: Path) -> None:
    model = Stack(8, form)
    optimizer, offload = wrapped(model, tmp_path)
    most = 0

    def watch(i: int, x: torch.Tensor) -> None:
        nonlocal most
        most = max(most, len(model.alive()))

    model.after = watch
    out = model(data())
    engine_of(model).device.synchronize()
    assert model.alive() == [6, 7], "those that the backward needs first"
    assert most == 2
    assert offload.in_use == offload.peak == 8 * NBYTES
    out.sum().backward()
    del out
    gc.collect()
    assert model.alive() == []
    assert offload.in_use == 0
    infinity.close(optimizer)


def test_nothing_grows_over_steps(tmp_path: Path) -> None:
    model = Stack(6)
    optimizer, offload = wrapped(model, tmp_path)
    for grad in (torch.no_grad, torch.inference_mode):
        with grad():
            model(data())
    assert offload.peak == 0, "evaluation copies nothing"
    figures = []
    for step in range(3):
        for _ in range(2):
            model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(data(step))  # a graph that is dropped
        gc.collect()
        engine_of(model).device.synchronize()
        figures.append((offload.in_use, offload.peak, len(offload._home), len(offload._copies)))
    assert set(figures) == {(0, 6 * NBYTES, 0, 0)}
    assert infinity.metrics(optimizer)["activations/host(GiB)"] == 6 * NBYTES / GiB
    infinity.close(optimizer)


@pytest.mark.on_cpu
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_a_lease_comes_home_no_sooner_than_its_copies_are_done(direction: str, tmp_path: Path) -> None:
    """The graph is dropped while an input is on its way."""
    model = Stack(2 if direction == "d2h" else 4)
    optimizer, offload = wrapped(model, tmp_path)
    device = engine_of(model).device
    gate = threading.Event()
    if direction == "d2h":
        device._d2h.submit(lambda: gate.wait(60))
        out = model(data())
        waiting = 2
    else:
        out = model(data())

        def stop(*_: Any) -> None:
            raise KeyError("mine")

        # The first layer of the backward has asked for input 1; then it fails.
        handle = model.layers[3].register_forward_pre_hook(stop)
        with infinity.gathered(model):
            device._h2d.submit(lambda: gate.wait(60))
            with pytest.raises(KeyError, match="mine"):
                out.sum().backward()
        handle.remove()
        waiting = 1
    del out
    gc.collect()
    assert offload.in_use == waiting * NBYTES
    gate.set()
    device.synchronize()
    assert offload.in_use == 0
    infinity.close(optimizer)


def test_what_finds_no_room_stays_on_the_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack(8)
    optimizer, offload = wrapped(model, tmp_path, activation_memory=3 * NBYTES)
    with pytest.warns(RuntimeWarning, match="Raise host_memory"):
        model(data()).sum().backward()
    found = grads(model)
    assert offload.kept == 5
    assert infinity.metrics(optimizer)["activations/kept"] == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        optimizer.step()
        model(data()).sum().backward()
    infinity.close(optimizer)
    torch.manual_seed(0)
    model = Stack(8)
    (tmp_path / "device").mkdir()
    optimizer, _ = wrapped(model, tmp_path / "device", activations="device")
    model(data()).sum().backward()
    assert same(found, grads(model))
    infinity.close(optimizer)


# -- what autograd promises ------------------------------------------------------------------------


def _late_edit(model: Stack) -> None:
    kept: list[torch.Tensor] = []
    model.after = lambda i, x: kept.append(x)
    out = model(data())
    with torch.no_grad():
        kept[1].add_(1)
    out.sum().backward()


def _early_edit(model: Stack) -> None:
    """Right behind the layer, while its input is on its way to the host."""

    def edit(i: int, x: torch.Tensor) -> None:
        if i == 1:
            with torch.no_grad():
                x.view(-1)[:3].mul_(2)

    model.after = edit
    model(data()).sum().backward()


@pytest.mark.on_cpu
@pytest.mark.parametrize(("edit", "form"), [(_late_edit, FORMS[0]), (_early_edit, FORMS[1])])
def test_an_edit_in_place_raises_as_in_torch(edit: Callable[[Any], None], form: str, tmp_path: Path) -> None:
    model = Stack(4, form)
    optimizer, _ = wrapped(model, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        edit(model)
    infinity.close(optimizer)


def _twice(model: Any) -> None:
    loss = model(data()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def _several_forwards(model: Any) -> None:
    losses = [model(data(i)).square().mean() for i in range(3)]
    losses[1].backward()
    losses[0].backward()
    losses[2].backward()
    (model(data(3)).mean() + model(data(4)).square().mean()).backward()


def _exceptions(model: Any) -> None:
    calls = 0

    def fail(at: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyError("mine")

        return hook

    for at in (3, LAYERS + 2):  # in the forward of a layer; in its recomputation
        calls = 0
        handles = [layer.register_forward_pre_hook(fail(at)) for layer in model.layers]
        with pytest.raises(KeyError, match="mine"):
            model(data()).square().mean().backward()
        for handle in handles:
            handle.remove()
        engine_of(model).optimizer.zero_grad()
    assert not hooks_on_saved_tensors()
    model(data()).square().mean().backward()


def _interrupted(model: Any) -> None:
    def stop(i: int, x: torch.Tensor) -> torch.Tensor:
        if i == 2:
            raise KeyboardInterrupt
        return x

    before, model.before = model.before, stop
    with pytest.raises(KeyboardInterrupt):
        model(data())
    model.before = before
    model(data()).square().mean().backward()
    assert not hooks_on_saved_tensors()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", [_twice, _several_forwards, _exceptions, _interrupted])
def test_what_a_user_does_means_what_it_means_in_torch(
    loss: Callable[[Any], None], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINITY_DELAY_SEED", "3")
    device, host = gradients_of(lambda: Stack(LAYERS, form), loss, tmp_path)
    assert same(host, device)


def test_hooks_that_are_set_already_go_first(tmp_path: Path) -> None:
    """An outer recomputation, or the user's own hooks, must see what is saved."""
    model = Stack(4)
    optimizer, offload = wrapped(model, tmp_path)
    seen: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(1), t.detach())[1], lambda t: t):
        model(data()).sum().backward()
    assert seen
    assert offload.seen == 0
    x = data().requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    checkpoint(model, x, use_reentrant=True).sum().backward()
    assert offload.peak == 0, "what a recomputation saves is used at once"
    assert not hooks_on_saved_tensors()
    infinity.close(optimizer)


# -- settings ----------------------------------------------------------------------------------


def test_nothing_is_recomputed(tmp_path: Path) -> None:
    model = Stack(2)
    model.form = None
    optimizer, _ = wrapped(model, tmp_path)
    for expected in (True, False):
        model(data()).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [w.category for w in caught] == [RuntimeWarning] * expected
        assert all("torch.utils.checkpoint" in str(w.message) for w in caught)
    infinity.close(optimizer)


def test_a_backward_after_close_is_refused(tmp_path: Path) -> None:
    model = Stack(4)
    optimizer, _ = wrapped(model, tmp_path)
    out = model(data())
    infinity.close(optimizer)
    with pytest.raises(ClosedError, match="close"):
        out.sum().backward()
