"""A device whose memory is not the host's, as far as a CPU can show it (tests/lagging): what crosses, by way
of what memory, and what waits for what. `--device lagging` runs others on it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import WrapError
from infinity.hardware import adam_reference
from infinity.hardware.device import CudaDevice, HostDevice

from .lagging.lane import lagging_lane, note_calls
from .models import case
from .offloaded import ON_DEVICE, ON_NVME, config_for
from .small_net import build, train

pytestmark = pytest.mark.lagging

WIDTH = 24
PLACES: dict[str, dict[str, Any]] = {
    "nvme": ON_NVME,
    "split": {
        "parameters": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        "optimizer_state": {"device": 0.4, "host": 0.3, "nvme": 0.3},
        "gradients": {"device": 0.4, "host": 0.3, "nvme": 0.3},
    },
}


def test_gradients_on_the_device_come_to_the_update_in_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = config_for(tmp_path, update="overlap", **{**ON_DEVICE, "optimizer_state": "nvme"})
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    engine = engine_of(model)
    pool = [range(begin, begin + nbytes) for begin, nbytes in engine.pool.buffers()]
    crossed: list[tuple[int, int]] = []
    d2h = CudaDevice.d2h

    def noted(self: CudaDevice, target: torch.Tensor, source: torch.Tensor, *args: Any, **more: Any) -> Any:
        crossed.append((target.data_ptr(), source.data_ptr()))
        return d2h(self, target, source, *args, **more)

    monkeypatch.setattr(CudaDevice, "d2h", noted)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)  # zeros do not cross
        optimizer.step()
        infinity.flush(model)
        assert not crossed
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        infinity.flush(model)
        wanted = {
            engine.store.view(c.id, "gradient").data_ptr()
            for u in engine.units
            for c in u.layout.trainable_chunks
        }
        assert {source for _, source in crossed} == wanted
        assert all(any(target in leased for leased in pool) for target, _ in crossed)
        crossed.clear()
        optimizer.zero_grad()
    infinity.close(optimizer)


def test_all_devices_have_the_same_interface() -> None:
    here, there = ({n for n in dir(kind) if not n.startswith("_")} for kind in (HostDevice, CudaDevice))
    assert here - {"pages"} == there


# -- what reading CUDA's path has found -----------------------------------------------------------


def test_a_unit_gets_its_memory_once_when_it_is_wrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives it back: `set_` would let the storage grow for each of its parameters."""
    sizes: list[tuple[int, int]] = []
    resize = torch.UntypedStorage.resize_

    def counted(self: torch.UntypedStorage, nbytes: int) -> Any:
        sizes.append((self.nbytes(), nbytes))
        return resize(self, nbytes)

    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", counted)
        model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    whole = [u.layout.gathered_nbytes for u in engine_of(model).units]
    assert sizes == [pair for nbytes in whole for pair in ((0, nbytes), (nbytes, 0))]
    infinity.close(optimizer)


@pytest.mark.parametrize("place", ["nvme", "split"])
def test_inference_mode_leaves_no_inference_tensors(place: str, tmp_path: Path) -> None:
    """Neither of `wrap` in that mode, nor of forwards in it, on the main thread and on another one: the
    engine's threads, which are not in it, change all of that."""
    runs = []
    for mode in (False, True):
        folder = tmp_path / str(mode)
        folder.mkdir()
        this = case("gpt", layers=2, width=32)
        model: Any = this.model
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with torch.inference_mode(mode):
            model, optimizer = infinity.wrap(model, adam, config_for(folder, dtype="bf16", **PLACES[place]))

        def look(model: Any = model, this: Any = this, mode: bool = mode) -> None:
            engine_of(model).residency.reshard_all()
            with torch.inference_mode(mode), torch.no_grad():
                this.loss(model, {name: value.to("lagging:0") for name, value in this.batches[0].items()})

        found = []
        for batch in this.batches[:3]:
            look()
            other = threading.Thread(target=look)
            other.start()
            other.join(60)
            loss = this.loss(model, batch)
            loss.backward()
            this.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        infinity.close(optimizer)
        runs.append(found)
    assert runs[0] == runs[1]


def test_norms_of_the_device_cost_few_launches_for_each_chunk() -> None:
    """Also where there is not the memory for that: their bits are the same."""
    chunk = torch.randn(4 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    (wanted,) = adam_reference.sums_of_squares_reference([(chunk, None)])
    with lagging_lane() as here:
        parts = [(chunk.to("lagging"), None)] * 12
        before = here.counts.copy()
        found = adam_reference.sums_of_squares_reference(parts)
        counts = here.counts - before
        assert [sums.tobytes() for sums in found] == [wanted.tobytes()] * len(parts)
        assert counts["launches"] <= 4 * len(parts)
        assert counts["copies that block"] == 1
        here.counts["allocations"], here.fails = 0, 3
        (found_with_less,) = adam_reference.sums_of_squares_reference(parts[:1])
        assert here.fails is None
        assert found_with_less.tobytes() == wanted.tobytes()


# -- pinned memory ------------------------------------------------------------


def assert_unpinned_last(calls: list[tuple[str, Any]]) -> None:
    """All of it, when no copy was under way any more."""
    ends = [name for name, _ in calls if name != "register"]
    assert ends[0] == "close"
    assert ends.count("unregister") == len(calls) - len(ends) >= 2


_PINNING = ("register", "unregister", "close")


def test_memory_is_unpinned_when_no_copy_can_read_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when `wrap` fails."""
    config = config_for(tmp_path, optimizer_state="host", parameters="host")
    with monkeypatch.context() as patch:
        calls = note_calls(patch, CudaDevice, *_PINNING)
        model, optimizer = infinity.wrap(*build(), config)
        train(model, optimizer, 1)
        infinity.close(model)
        assert_unpinned_last(calls)

    def fails(*_: Any) -> None:
        raise WrapError("what comes last")

    calls = note_calls(monkeypatch, CudaDevice, *_PINNING)
    monkeypatch.setattr("infinity.api.engine.install", fails)
    with pytest.raises(WrapError, match="comes last"):
        infinity.wrap(*build(), config)
    assert_unpinned_last(calls)


def test_the_activation_region_prefers_the_node_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("infinity.api.engine.node_for", lambda *_: 1)
    monkeypatch.setattr(
        "infinity.storage.memory.prefer_node", lambda _, nbytes, node: asked.append((nbytes, node))
    )
    config = config_for(tmp_path, activations="host", activation_memory="1MiB")
    infinity.close(infinity.wrap(*build(), config)[0])
    assert (1 << 20, 1) in asked
