"""On a CUDA device: placements give the same bits, copies and the allocator are in order, the link
carries what it should."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.core.errors import ParameterChangedError, ReleasedParameterError
from infinity.core.sizes import Tier
from infinity.hardware.device import CudaDevice
from infinity.params.param import ReleasedParameter

from .device_bits import CHECKS
from .lagging.cuda import lagging_cuda
from .models import Case, case
from .offloaded import ON_HOST, ON_NVME, assert_same, config_for, train_offloaded, wrap_adamw
from .reference import Run, batches_of, beyond, train_torch, two_groups
from .test_trace import trace_in

pytestmark = pytest.mark.gpu
#: What torch calls the device. "lagging" is a double of CUDA (tests/lagging), on which gpu_check.sh is tried:
#: then `Config` means it by "cuda".
DEVICE = os.environ.get("INFINITY_TEST_GPU", "cuda")
# cuBLAS reads it once, before the first product; recurrent networks need this one.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")

#: About a millisecond of a recent GPU's clock.
MILLISECOND = 1_500_000
STEPS = 12

VARIANTS: dict[str, dict[str, Any]] = {
    "device": {"parameters": "device", "optimizer_state": "device", "gradients": "device"},
    "host": ON_HOST,
    "nvme": ON_NVME,
    "nvme, tight": {**ON_NVME, "prefetch_memory": 0, "update_depth": 1, "aio_backend": "threads"},
    "state on nvme": {"parameters": "device", "optimizer_state": "nvme", "gradients": "host"},
    "state on host": {"parameters": "device", "optimizer_state": "host", "gradients": "device"},
    "state on device": {"parameters": "host", "optimizer_state": "device", "gradients": "nvme"},
    "split": {
        "parameters": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        "optimizer_state": {"device": 0.2, "host": 0.4, "nvme": 0.4},
        "gradients": {"device": 0.2, "host": 0.3, "nvme": 0.5},
    },
    "sync": {**ON_NVME, "update": "sync"},
}

#: model, its settings, training settings, variants (the first is what the others equal)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "gpt-fp32": ("gpt", {}, {}, list(VARIANTS)),
    "gpt-bf16-clip-accumulate": (
        "gpt",
        {"tied": True, "recompute": "non-reentrant"},
        {"dtype": "bf16", "max_grad_norm": 0.5, "accumulate": 3},
        list(VARIANTS),
    ),
    "gpt-fp16-reentrant": (
        "gpt",
        {"recompute": "reentrant"},
        {"dtype": "fp16", "loss_scale_window": 4},
        ["device", "nvme", "state on nvme", "state on host"],
    ),
    "moe-fp32": ("moe", {}, {"max_grad_norm": 0.5}, ["device", "nvme", "split"]),
    "lstm-bf16": ("lstm", {}, {"dtype": "bf16"}, ["host", "nvme, tight"]),
    "gpt2-bf16": ("gpt2", {}, {"dtype": "bf16", "max_grad_norm": 1.0}, ["device", "nvme", "split"]),
    "llama-fp32": ("llama", {}, {"accumulate": 2}, ["device", "nvme, tight"]),
}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with lagging_cuda("eager") if DEVICE == "lagging" else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """The same gradients whenever the same parameters are used, whatever cuBLAS and attention like."""
    backends = torch.backends.cuda
    before = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()
    tf32 = torch.backends.cudnn.allow_tf32, backends.matmul.allow_tf32
    backends.enable_flash_sdp(False)
    backends.enable_mem_efficient_sdp(False)
    torch.backends.cudnn.allow_tf32 = backends.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    backends.enable_flash_sdp(before[0])
    backends.enable_mem_efficient_sdp(before[1])
    torch.backends.cudnn.allow_tf32, backends.matmul.allow_tf32 = tf32


def on_device(made: Case) -> Case:
    """Return the case with its batches on the device; its model stays, for `wrap` to take over."""
    return dataclasses.replace(made, batches=[{k: v.to(DEVICE) for k, v in b.items()} for b in made.batches])


def train(kind: str, model: dict[str, Any], folder: Path, settings: dict[str, Any], **training: Any) -> Run:
    """Train with the engine on the device; `training` are settings of Config, and `accumulate`."""
    folder.mkdir(parents=True, exist_ok=True)
    accumulate, groups = training.pop("accumulate", 1), training.pop("groups", None)
    steps = training.pop("steps", STEPS)
    config = config_for(folder, **{"device": "cuda", "device_memory": "64MiB", **training, **settings})
    options = {"groups": groups} if groups is not None else {}
    return train_offloaded(
        on_device(case(kind, **model)), config, steps=steps, accumulate=accumulate, **options
    )


# -- bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_placement_never_changes_results(name: str, tmp_path: Path) -> None:
    kind, model, training, variants = CASES[name]
    first = train(kind, model, tmp_path / "first", VARIANTS[variants[0]], **training)
    assert all(math.isfinite(loss) for loss in first.losses)
    for number, variant in enumerate(variants[1:]):
        found = train(kind, model, tmp_path / str(number), VARIANTS[variant], **training)
        assert_same(found, first)


def test_a_run_can_be_repeated(tmp_path: Path) -> None:
    """Otherwise equal bits of placements would be luck, and different ones no fault of theirs."""
    runs = [train("gpt", {}, tmp_path / str(i), ON_NVME) for i in range(2)]
    assert_same(runs[0], runs[1])


@pytest.mark.parametrize("where", ["device", "nvme"])
def test_results_are_those_of_torch(where: str, tmp_path: Path) -> None:
    found = train("gpt", {}, tmp_path, VARIANTS[where], steps=30, groups=two_groups, max_grad_norm=0.5)
    runs = []
    for options in ({"foreach": True}, {"fused": True}):
        wanted = on_device(case("gpt"))
        wanted.model.to(DEVICE)
        runs.append(train_torch(wanted, steps=30, groups=two_groups, max_grad_norm=0.5, **options))
    foreach, fused = ({n: p.cpu() for n, p in run.params.items()} for run in runs)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(runs[0].losses), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(runs[0].norms), rtol=1e-4, atol=0)
    largest = max(float(g.abs().max()) for g in runs[0].first_gradients.values() if g is not None)
    for name, gradient in runs[0].first_gradients.items():
        if gradient is not None:
            mine = found.first_gradients[name]
            assert mine is not None
            torch.testing.assert_close(mine, gradient.cpu(), rtol=1e-5, atol=1e-7 * largest)
    params = {n: p.cpu() for n, p in found.params.items()}
    assert beyond(params, foreach) <= 2 * max(beyond(fused, foreach), 8)


@pytest.mark.parametrize("what", CHECKS)
def test_the_device_gives_the_bits_of_the_kernels(what: str) -> None:
    assert CHECKS[what](DEVICE) == []


# -- streams and the allocator ------------------------------------------------------------------


def late(call: Callable[..., Any], stream: str) -> Callable[..., Any]:
    """Return `CudaDevice.h2d` or `.d2h` whose copies begin a millisecond after all is ready."""

    def copy(self: CudaDevice, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(getattr(self, stream)):
            torch.cuda._sleep(MILLISECOND)
        return call(self, *args, **kwargs)

    return copy


@pytest.mark.parametrize("where", list(VARIANTS))
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_late_copies_change_nothing(
    direction: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = train("gpt", {}, tmp_path / "a", VARIANTS["device"], steps=4, accumulate=2, dtype="bf16")
    monkeypatch.setattr(CudaDevice, direction, late(getattr(CudaDevice, direction), f"_{direction}"))
    found = train("gpt", {}, tmp_path / "b", VARIANTS[where], steps=4, accumulate=2, dtype="bf16")
    assert_same(found, wanted)


def spoil() -> None:
    """Take what the allocator has free, of many sizes, fill it with NaN, give it back."""
    junk = [torch.empty(1 << k, device=DEVICE) for k in range(8, 19) for _ in range(3)]
    for tensor in junk:
        tensor.fill_(float("nan"))


def trouble(model: nn.Module) -> None:
    """Make every block's forward and backward slow on the device, and spoil freed memory beside it."""

    def slow(*_: Any) -> None:
        torch.cuda._sleep(MILLISECOND)
        spoil()

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            module.register_forward_pre_hook(slow)
            if not isinstance(module, nn.Embedding):
                module.register_full_backward_pre_hook(slow)


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("where", list(VARIANTS))
def test_a_device_that_lags_behind_the_host_changes_nothing(
    where: str, own_stream: bool, tmp_path: Path
) -> None:
    """The host frees and loads long before the device has computed: memory must not be reused early. Also
    where the user computes on a stream of their own."""
    dtype = {"dtype": "fp32" if own_stream else "bf16"}
    wanted = train("gpt", {}, tmp_path / "a", VARIANTS["device"], steps=4, **dtype)
    lagging = on_device(case("gpt"))
    trouble(lagging.model)
    torch.cuda.synchronize()
    (folder := tmp_path / "b").mkdir()
    settings = {"device": "cuda", "device_memory": "64MiB", **dtype, **VARIANTS[where]}
    with torch.cuda.stream(torch.cuda.Stream()) if own_stream else contextlib.nullcontext():
        found = train_offloaded(lagging, config_for(folder, **settings), steps=4)
    torch.cuda.synchronize()
    assert_same(found, wanted)


def test_what_goes_to_the_device_comes_back() -> None:
    device = CudaDevice(torch.device(DEVICE, 0))
    pinned = torch.randint(0, 256, (1 << 22,), dtype=torch.uint8).pin_memory()
    there, back = (
        torch.zeros(1 << 22, dtype=torch.uint8, device=DEVICE),
        torch.zeros_like(pinned).pin_memory(),
    )
    torch.cuda._sleep(MILLISECOND)
    there.fill_(7)  # on the compute stream; the copy comes after its mark
    event = device.h2d(there, pinned, device.mark())
    device.wait_on_device(event)
    there.add_(1)
    device.d2h(back, there, device.mark()).wait()
    assert torch.equal(back, pinned + 1)
    device.synchronize()
    assert event.done()
    device.close()


def test_a_trace_has_the_times_of_the_device(tmp_path: Path) -> None:
    """Copies and compute lie within the trace, in the order in which they happened."""
    made, optimizer, engine = wrapped(tmp_path / "run", VARIANTS["nvme"])
    one_step(made, optimizer)
    path = tmp_path / "t.json"
    with infinity.trace(optimizer, path):
        for step in range(1, 4):
            one_step(made, optimizer, step)
        engine.states.quiesce()
    content, spans = trace_in(path)
    last = content["otherData"]["duration_ns"] + 1_000_000
    for kind in ("h2d", "d2h", "device compute"):
        found = [s for s in spans if s.kind == kind]
        assert found, kind
        assert all(-1_000_000 <= s.begin <= s.end <= last for s in found), kind
    laps = sorted((s.begin, s.end) for s in spans if s.kind == "device compute")
    assert all(a[1] <= b[0] + 1000 for a, b in itertools.pairwise(laps))
    infinity.close(optimizer)


# -- memory and the link ---------------------------------------------------------------------------


def wrapped(folder: Path, settings: dict[str, Any], **sizes: Any) -> tuple[Case, Any, Engine]:
    """Return a case, its wrapped optimizer and the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    made = on_device(case("gpt", **sizes))
    config = config_for(folder, **{"device": "cuda", "device_memory": "64MiB", **settings})
    _, optimizer = wrap_adamw(made.model, config, lr=1e-3)
    return made, optimizer, engine_of(made.model)


def one_step(made: Case, optimizer: Any, step: int = 0) -> None:
    """One step of training, complete when it returns."""
    for batch in batches_of(made, step, 1):
        optimizer.scale(made.loss(made.model, batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


class Link:
    """Counts the bytes that copies carry, by direction."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = {"h2d": 0, "d2h": 0}
        for direction in self.bytes:
            monkeypatch.setattr(
                CudaDevice, direction, self._counted(getattr(CudaDevice, direction), direction)
            )

    def _counted(self, call: Callable[..., Any], direction: str) -> Callable[..., Any]:
        def copy(
            device: CudaDevice, target: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            assert target.nbytes == source.nbytes
            self.bytes[direction] += source.nbytes
            return call(device, target, source, *rest, **options)

        return copy

    def reset(self) -> None:
        """Count from here on."""
        self.bytes.update(h2d=0, d2h=0)


@pytest.mark.parametrize(
    ("where", "most_up"),
    [
        ({"parameters": "device", "gradients": "host", "optimizer_state": "host"}, 2),
        ({"parameters": "device", "gradients": "host", "optimizer_state": "nvme"}, 2),
        (ON_NVME, 4),
    ],
)
def test_the_link_carries_what_a_step_needs(
    where: dict[str, Any], most_up: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16: the gradient goes down once; the copy comes up once where it stays, else for the forward and,
    where it was let go meanwhile, for the backward."""
    link = Link(monkeypatch)
    made, optimizer, engine = wrapped(tmp_path, {**where, "dtype": "bf16", "update": "sync"}, layers=6)
    try:
        one_step(made, optimizer)
        link.reset()
        one_step(made, optimizer, 1)
        params = sum(s.spec.numel for s in engine.params.values())
        padded = sum(c.numel for u in engine.units for c in u.layout.chunks)
        assert link.bytes["d2h"] == 2 * params
        assert 2 * params <= link.bytes["h2d"] <= most_up * padded
    finally:
        infinity.close(optimizer)


def test_what_crosses_the_link_is_pinned(tmp_path: Path) -> None:
    """Copies from pageable memory would wait for the host, and be slow."""
    _, optimizer, engine = wrapped(tmp_path, ON_HOST)
    try:
        for unit in engine.units:
            for chunk in unit.layout.trainable_chunks:
                for part in ("copy", "gradient"):
                    if engine.store.tier(chunk.id, part) is Tier.HOST:
                        assert engine.store.view(chunk.id, part).is_pinned(), part
        for address, nbytes in engine.pool.buffers():
            assert nbytes
            assert address % 4096 == 0
    finally:
        infinity.close(optimizer)


def test_device_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks, sizes = [], []
    for layers in (4, 12):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        settings = {**ON_NVME, "prefetch_memory": 0, "chunk_elements": 1 << 18, "host_memory": "256MiB"}
        shape = {"width": 256, "layers": layers, "recompute": "non-reentrant"}
        made, optimizer, engine = wrapped(tmp_path / str(layers), settings, **shape)
        try:
            one_step(made, optimizer)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one_step(made, optimizer, 1)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            sizes.append(sum(s.spec.numel for s in engine.params.values()))
            # At rest nothing of the model is on the device but buffers and batches.
            assert before < 4 * max(u.layout.gathered_nbytes for u in engine.units)
        finally:
            infinity.close(optimizer)
        del made, optimizer, engine
    assert (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]) < 0.5


@pytest.mark.parametrize("form", ["non-reentrant", "reentrant"])
def test_inputs_of_recomputed_layers_leave_the_device(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twelve inputs three are on the device at once, and the host does not wait for that. The
    two that the backward needs first have not left: ten come back."""
    layers, width, batch = 12, 256, 256
    shape = {"width": width, "layers": layers, "recompute": form, "batch_size": batch}
    link = Link(monkeypatch)
    peaks, losses, up = [], [], []
    for where in ("device", "host"):
        settings = {**ON_HOST, "host_memory": "512MiB", "device_memory": "256MiB", "activations": where}
        made, optimizer, engine = wrapped(tmp_path / where, settings, **shape)
        nbytes = made.batches[0]["tokens"].numel() * width * 4
        try:
            one_step(made, optimizer)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            link.reset()
            loss = made.loss(made.model, made.batches[1])
            loss.backward()
            losses.append(loss.item())
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            up.append(link.bytes["h2d"])
            if engine.activations is not None:
                assert engine.activations.kept == 0
                assert engine.activations.peak == layers * nbytes
        finally:
            infinity.close(optimizer)
        del made, optimizer, engine, loss
    assert losses[0] == losses[1]
    assert peaks[0] - peaks[1] >= (layers - 4) * nbytes
    assert up[1] - up[0] <= (layers - 2) * nbytes


def test_activations_on_the_host_change_no_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the copies are."""
    shape = {"recompute": "non-reentrant", "layers": 6, "batch_size": 64}
    wanted = train("gpt", shape, tmp_path / "a", ON_NVME, steps=4, accumulate=2, dtype="bf16")
    for direction in ("h2d", "d2h"):
        with monkeypatch.context() as patch:
            patch.setattr(CudaDevice, direction, late(getattr(CudaDevice, direction), f"_{direction}"))
            settings = {**ON_NVME, "activations": "host"}
            found = train("gpt", shape, tmp_path / direction, settings, steps=4, accumulate=2, dtype="bf16")
            assert_same(found, wanted)


# -- what a user sees --------------------------------------------------------------------------------


def test_a_released_parameter_on_the_device(tmp_path: Path) -> None:
    made, optimizer, engine = wrapped(tmp_path, ON_NVME)
    try:
        weight = made.model.head.weight
        wanted = case("gpt").model.head.weight
        assert type(weight) is ReleasedParameter
        assert weight.device.type == DEVICE
        assert weight.is_cuda == (DEVICE == "cuda")
        assert weight.shape == wanted.shape
        held = engine.units[engine.params[weight].unit].storage.nbytes()
        assert held == 0
        assert weight.to(DEVICE) is weight
        for use in (lambda: weight + 1, lambda: weight.sum().item(), lambda: weight.clone()):
            with pytest.raises(ReleasedParameterError, match="head"):
                use()
        for move in (weight.cpu, weight.half, lambda: weight.to("cpu")):
            with pytest.raises(ParameterChangedError):
                move()
        with infinity.gathered(weight):
            assert torch.equal(weight.detach().cpu(), wanted.detach())
        assert type(weight) is ReleasedParameter
        with infinity.gathered(weight, write=True), torch.no_grad():
            weight.mul_(2)
        with infinity.gathered(weight):
            assert torch.equal(weight.detach().cpu(), 2 * wanted.detach())
        with pytest.raises(ReleasedParameterError):
            torch.matmul(torch.ones(1, weight.shape[0], device=DEVICE), weight)
        one_step(made, optimizer)
    finally:
        infinity.close(optimizer)


def test_state_dicts_go_to_torch_and_back(tmp_path: Path) -> None:
    made, optimizer, _ = wrapped(tmp_path / "a", {**ON_NVME, "host_memory": "128MiB"})
    try:
        for step in range(3):
            one_step(made, optimizer, step)
        model_state = {k: v.cpu().clone() for k, v in made.model.state_dict().items()}
        adam_state = optimizer.state_dict()
        one_step(made, optimizer, 3)
        wanted = {k: v.cpu().clone() for k, v in made.model.state_dict().items()}
    finally:
        infinity.close(optimizer)
    again, restored, _ = wrapped(tmp_path / "b", VARIANTS["device"])
    try:
        again.model.load_state_dict(model_state)
        restored.load_state_dict(adam_state)
        one_step(again, restored, 3)
        found = {k: v.cpu() for k, v in again.model.state_dict().items()}
    finally:
        infinity.close(restored)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
