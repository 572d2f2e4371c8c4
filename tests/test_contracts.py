"""What holds for every way to train and every placement: results are those of plain torch, a run resumes bit
for bit, signals save and end it, and a full disk costs no checkpoint. adapters.py has the ways. A resume on
another number of ranks is in test_rank_checkpoints.py.

The settings of parity are covering pairs, not a product: each case trains once per variant, and every variant
must equal the first bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.core.errors import BudgetError, InfinityError
from infinity.core.signals import ignore
from infinity.hardware import cpu_adam

from . import adapters
from .adapters import Ended, Found
from .command_line import mounted
from .models import case
from .offloaded import ON_DEVICE, ON_HOST, assert_same, config_for, train_offloaded
from .quick import quick
from .reference import Run, beyond, train_master, train_torch, two_groups

pytestmark = pytest.mark.usefixtures("one_thread", "as_before")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)

#: placements, chunk sizes, depths, pool sizes, backends and instruction sets
VARIANTS: dict[str, dict[str, Any]] = {
    "host": {**ON_HOST, "update": "sync"},
    "device": ON_DEVICE,
    "nvme": {"aio_backend": "threads", "update_depth": 1, "host_memory": "least", "read_ahead_memory": 0},
    "nvme, tight": {"aio_backend": "libaio", "device_memory": "least", "queue_depth": 1},
    "nvme, sync": {"update": "sync"},
    "state on nvme": {
        "parameters": "device",
        "optimizer_state": "nvme",
        "gradients": "host",
        "chunk_elements": 131072,
        "block_bytes": 65536,
    },
    "split": {
        "parameters": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        "optimizer_state": {"host": 0.5, "nvme": 0.5},
        "gradients": {"device": 0.2, "host": 0.3, "nvme": 0.5},
        "aio_backend": "syscall",
    },
    "scalar": {**ON_HOST, "isa": "scalar"},
    "avx2, two directories": {"isa": "avx2", "directories": 2, "prefetch_memory": 0},
}


@pytest.fixture
def as_before() -> Iterator[None]:
    """Whoever runs these tests may have been told to ignore signals. Lightning leaves its process group, and
    the address of it in the environment."""
    environment = dict(os.environ)
    before = [signal.getsignal(number) for number in SIGNALS]
    for number in SIGNALS[:3]:
        signal.signal(number, signal.SIG_DFL)
    yield
    now = [signal.getsignal(number) for number in SIGNALS[:3]]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert all(handler in (signal.SIG_DFL, ignore) for handler in now), "more than one SIGHUP comes"


# -- parity with plain torch ----------------------------------------------------------------------


#: model, training settings, variants (beside the first)
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gpt-bf16-reentrant": (
        "gpt",
        {"dtype": "bf16", "clip": 0.5, "model": {"recompute": "reentrant"}},
        ["nvme", "device", "scalar"],
    ),
    "cnn-fp32": ("cnn", {"clip": 1.0}, ["nvme", "device", "split"]),
    "moe-fp32": ("moe", {"clip": 0.5}, ["nvme", "nvme, sync", "avx2, two directories"]),
    "gpt2-fp16": ("gpt2", {"dtype": "fp16", "accumulate": 4, "clip": 1.0}, ["nvme", "state on nvme"]),
    "gpt-fp32-clip-accumulate": (
        "gpt",
        {"clip": 0.5, "accumulate": 4, "groups": True, "model": {"tied": True, "recompute": "non-reentrant"}},
        ["nvme, tight", "split"],
    ),
    "lstm-fp32": ("lstm", {"accumulate": 4}, ["nvme, tight", "state on nvme"]),
}


def offload(
    name: str, training: dict[str, Any], variant: dict[str, Any], folder: Path, steps: int = 10
) -> Run:
    settings = dict(variant)
    isa = settings.pop("isa", cpu_adam.isa())
    folders = [folder / str(i) for i in range(settings.pop("directories", 1))]
    for f in folders:
        f.mkdir(parents=True)
    settings |= {"nvme": folders, "max_grad_norm": training.get("clip")}
    settings["dtype"] = training.get("dtype", "fp32")
    run = case(name, **training.get("model", {}))
    for tier in ("host_memory", "device_memory"):
        if settings.get(tier) == "least":
            settings[tier] = least(run, settings, tier, folder)
    before = cpu_adam.isa()
    cpu_adam.set_isa(isa)
    try:
        return train_offloaded(
            run,
            config_for(folder, **settings),
            steps=steps,
            accumulate=training.get("accumulate", 1),
            **({"groups": two_groups} if training.get("groups") else {}),
        )
    finally:
        cpu_adam.set_isa(before)


def least(run: Any, settings: dict[str, Any], tier: str, folder: Path) -> int:
    """The smallest budget that is not refused, taken from the refusal."""
    others = {k: v for k, v in settings.items() if v != "least"}
    model = copy.deepcopy(run.model)
    with pytest.raises(BudgetError) as caught:
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(folder, **{**others, tier: 1}))
    found = re.search(r"\((\d+) bytes\)", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.integration) if i > 1 else name for i, name in enumerate(CASES)],
)
def test_placement_never_changes_results(name: str, tmp_path: Path) -> None:
    kind, training, variants = CASES[name]
    first = offload(kind, training, VARIANTS["host"], tmp_path / "first")
    compare_with_torch(kind, training, first)
    for variant in variants:
        settings = VARIANTS[variant]
        if settings.get("isa", "scalar") in cpu_adam.available_isas():
            assert_same(offload(kind, training, settings, tmp_path / variant), first)


def compare_with_torch(kind: str, training: dict[str, Any], run: Run) -> None:
    model, dtype = training.get("model", {}), training.get("dtype", "fp32")
    given: dict[str, Any] = {"accumulate": training.get("accumulate", 1), "steps": len(run.losses)}
    given["max_grad_norm"] = training.get("clip")
    if dtype != "fp32":
        precise = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        wanted = train_master(case(kind, **model), dtype=precise, **given)
        assert run.scales == wanted.scales
        # One rounding of a bf16 copy that falls the other way moves everything after it a little.
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(wanted.losses), rtol=2e-2, atol=0)
        torch.testing.assert_close(
            torch.tensor(run.losses[:3]), torch.tensor(wanted.losses[:3]), rtol=1e-3, atol=0
        )
        compare_gradients(run, wanted)
        return
    given |= {"groups": two_groups} if training.get("groups") else {}
    wanted = train_torch(case(kind, **model), foreach=True, **given)
    fused = train_torch(case(kind, **model), fused=True, **given)
    compare_gradients(run, wanted)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(wanted.losses), rtol=1e-5, atol=0)
    if training.get("clip") is not None:
        torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(wanted.norms), rtol=1e-4, atol=0)
    # Gradients that are mathematically zero make Adam amplify noise, so torch's own two
    # implementations differ too; ours may differ in no more than twice as many elements.
    assert beyond(run.params, wanted.params) <= 2 * max(beyond(fused.params, wanted.params), 8)
    for key, value in wanted.buffers.items():
        torch.testing.assert_close(run.buffers[key], value, rtol=1e-4, atol=1e-5)


def compare_gradients(run: Run, wanted: Run) -> None:
    largest = max(float(g.abs().max()) for g in wanted.first_gradients.values() if g is not None)
    for name, gradient in wanted.first_gradients.items():
        found = run.first_gradients[name]
        if gradient is None:
            assert found is None, name
        else:
            assert found is not None, name
            torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-7 * largest)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}),
        (torch.optim.AdamW, {"maximize": True, "weight_decay": 0.0}),
        (torch.optim.Adam, {"weight_decay": 0.05}),
        (torch.optim.AdamW, {"lr": torch.tensor(2e-3)}),
    ],
)
def test_options_of_the_optimizer(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    run = train_offloaded(case("gpt"), config_for(tmp_path), steps=6, optimizer=optimizer, **options)
    wanted = train_torch(case("gpt"), steps=6, optimizer=optimizer, foreach=False, **options)
    fused = train_torch(case("gpt"), steps=6, optimizer=optimizer, fused=True, **options)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(wanted.losses), rtol=1e-5, atol=0)
    assert beyond(run.params, wanted.params) <= 2 * max(beyond(fused.params, wanted.params), 8)


def test_lr_schedule_and_groups_edited_between_steps(tmp_path: Path) -> None:
    def edit(adam: torch.optim.Optimizer, step: int) -> None:
        for index, group in enumerate(adam.param_groups):
            group["lr"] = 1e-3 / (1 + step + index)
            group["betas"] = (0.9 - 0.01 * step, 0.99)
            group["weight_decay"] = 0.01 * step

    given: dict[str, Any] = {"steps": 6, "groups": two_groups, "before_step": edit}
    runs = [train_offloaded(case("gpt"), config_for(tmp_path, **at), **given) for at in ({}, ON_HOST)]
    assert_same(runs[0], runs[1])
    wanted = train_torch(case("gpt"), **given)
    torch.testing.assert_close(torch.tensor(runs[0].losses), torch.tensor(wanted.losses), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", quick(range(50), [4]))
def test_random_delays_change_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and rings that sleep at random show a missing wait. Each seed takes the next case, and each
    time around the next of its variants."""
    kind, training, variants = list(CASES.values())[seed % len(CASES)]
    settings = VARIANTS[variants[seed // len(CASES) % len(variants)]]
    if settings.get("isa", "scalar") not in cpu_adam.available_isas():
        settings = {**settings, "isa": "scalar"}
    wanted = offload(kind, training, VARIANTS["host"], tmp_path / "a", 4)
    monkeypatch.setenv("INFINITY_DELAY_SEED", str(seed))
    assert_same(offload(kind, training, settings, tmp_path / "b", 4), wanted)


# -- the same for each adapter --------------------------------------------------------------------


ADAPTERS: dict[str, Callable[..., Found]] = {
    name: getattr(adapters, name) for name in ("bare", "run", "child", "ranks", "trainer", "lightning")
}


def each(*rows: tuple[str, ...]) -> list[Any]:
    """Return rows that begin with an adapter; those of other libraries are for `make test-all`."""
    marks = {"trainer": [pytest.mark.integration], "lightning": [pytest.mark.integration]}
    return [pytest.param(*row, marks=marks.get(row[0], [])) for row in rows]


@functools.cache
def undisturbed(name: str) -> Found:
    """What all steps come to."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return ADAPTERS[name](Path(folder, "out"))


def check(found: Found, wanted: Found, begin: int = 0) -> None:
    """Bit for bit, from the step `begin` on."""
    assert found.losses == {step: loss for step, loss in wanted.losses.items() if step >= begin}
    assert found.values.keys() == wanted.values.keys()
    assert [name for name, v in wanted.values.items() if not torch.equal(found.values[name], v)] == []


def saved(out: Path) -> list[int]:
    """The steps of which there are whole checkpoints."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in out.rglob("step-*/index.json"))


@pytest.mark.on_cpu
@pytest.mark.parametrize("name", each(("bare",), ("run",), ("ranks",), ("trainer",), ("lightning",)))
def test_it_trains_as_plain_torch_does(name: str, tmp_path: Path) -> None:
    found, wanted = ADAPTERS[name](tmp_path / "out", dropout=0.0), adapters.plain()
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    values = {key.removeprefix("net."): value for key, value in found.values.items()}
    torch.testing.assert_close(values, wanted.values, rtol=1e-5, atol=1e-6)


# -- resume bit for bit ---------------------------------------------------------------------------


SAVED = 4
PLACES = {place: VARIANTS[place] for place in ("host", "device", "state on nvme", "split")}
PLACES["nvme"] = {"parameters": "nvme", "optimizer_state": "nvme", "gradients": "nvme"}
#: What a run may have beside its placement.
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, delayed": {"dtype": "bf16", "update": "delayed", "delay_warmup_steps": 1},
    "fp16": {"dtype": "fp16", "loss_scale_window": 2},
    "bf16 moments": {"optimizer_state_dtype": "bf16", "update": "sync"},
    "8-bit moments, some in fp32": {
        "dtype": "bf16",
        "optimizer_state_dtype": "8bit",
        "optimizer_state_fp32": ("norm.*", "layers.0.0.*"),
    },
    "split master": {"dtype": "bf16", "split_master": True},
    "split master, 8-bit moments": {"dtype": "bf16", "split_master": True, "optimizer_state_dtype": "8bit"},
    "parameters of several dtypes": {"dtype": None, "update": "delayed", "delay_warmup_steps": 1},
    "frozen": {"frozen": True, "dtype": "bf16"},
    "behind the backward": {"update": "backward", "accumulation": 1},
    "Muon": {"optimizer": "muon", "units": ["Net"]},
    "Muon, bf16 moments": {"optimizer": "muon", "units": ["Net"], "optimizer_state_dtype": "bf16"},
    "Lion, 8-bit moments": {"optimizer": "lion", "optimizer_state_dtype": "8bit"},
    "SGD, bf16 moments": {"optimizer": "momentum", "optimizer_state_dtype": "bf16"},
    "Adagrad": {"optimizer": "adagrad"},
}
COMMON = [
    "fp32",
    "bf16, delayed",
    "fp16",
    "8-bit moments, some in fp32",
    "split master",
    "frozen",
    "behind the backward",
    "Muon",
]


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in COMMON else pytest.mark.integration) for name in SETTINGS]
)
def test_a_run_resumes_bit_for_bit_elsewhere(name: str, tmp_path: Path) -> None:
    """Saving changes nothing; and a checkpoint goes on in another place, whatever was in the model before."""
    places = list(PLACES.values())
    i = list(SETTINGS).index(name)
    nvme, out = {"nvme": tmp_path}, tmp_path / "out"
    wanted = adapters.bare(tmp_path / "whole", **PLACES["host"] | SETTINGS[name])
    check(adapters.bare(out, save_every=SAVED, **nvme | places[i % 5] | SETTINGS[name]), wanted)
    _, *later = saved(out)  # a step that fp16 skips does not count
    assert len(later) == 2
    for step in later:
        shutil.rmtree(out / f"step-{step}")
    other = {"chunk_elements": 131072, "seed": 5}
    check(adapters.bare(out, **nvme | places[(i + 2) % 5] | SETTINGS[name] | other), wanted, SAVED)


@pytest.mark.on_cpu
@pytest.mark.parametrize("name", each(("run",), ("trainer",), ("lightning",)))
def test_a_run_resumes_bit_for_bit_in_the_middle_of_an_epoch(name: str, tmp_path: Path) -> None:
    ADAPTERS[name](tmp_path / "out", SAVED, save_every=SAVED)
    check(ADAPTERS[name](tmp_path / "out", seed=5), undisturbed(name), SAVED)


# -- signals --------------------------------------------------------------------------------------


#: What comes in the fifth step of a run that saves every third one: the exit codes, and what is saved then.
COMES: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "SIGTERM": ((75,), [3, 5]),
    "SIGHUP": ((75,), [3, 5]),
    "SIGUSR1": ((0,), [3, 5, 6, 9]),
    "SIGINT": ((130, 1), [3]),  # Lightning ends with 1
    "SIGTERM SIGTERM": ((143,), [3]),
    "SIGKILL": ((-signal.SIGKILL, 1), [3]),  # 1: a rank that has lost another
}
LIBRARIES = [(name, comes) for name in ("trainer", "lightning") for comes in COMES if comes != "SIGKILL"]


@pytest.mark.integration
@pytest.mark.on_cpu
@pytest.mark.parametrize(
    ("name", "comes"),
    each(
        *(("run", comes) for comes in COMES if comes != "SIGKILL"),
        *(("child", comes) for comes in ("SIGTERM", "SIGKILL")),
        *(("ranks", comes) for comes in ("SIGTERM", "SIGUSR1", "SIGKILL")),
        *LIBRARIES,
    ),
)
def test_a_signal_ends_a_run_that_goes_on_bit_for_bit(
    name: str, comes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.core.signals.TOGETHER", -1.0)  # or a second signal is the first, once more
    codes, steps = COMES[comes]
    out, train = tmp_path / "out", ADAPTERS[name]
    try:
        train(out, acts={4: comes}, save_every=3)
        code: object = 0
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = 130
    assert code in codes
    assert saved(out) == steps
    if code:
        check(train(out), undisturbed("run" if name == "child" else name), steps[-1])


# -- a full disk ----------------------------------------------------------------------------------


@pytest.mark.on_cpu
@pytest.mark.root
@pytest.mark.parametrize("name", each(("bare",), ("run",), ("ranks",), ("trainer",), ("lightning",)))
def test_a_full_disk_costs_no_checkpoint(name: str, tmp_path: Path) -> None:
    """A save says so by a typed error, the checkpoint before it is whole, and the run goes on from that."""
    train = ADAPTERS[name]
    with mounted("-t", "tmpfs", "-o", "size=16m", "none") as place:
        out = Path(place, "out")
        tells: Any = contextlib.nullcontext()
        if name == "run":  # the save on the way that fails ends nothing
            tells = pytest.warns(RuntimeWarning, match="no room")
        with tells, pytest.raises((InfinityError, OSError, Ended)) as caught:
            train(out, acts={4: place}, save_every=3)
        error: Any = caught.value
        if isinstance(error, Ended):
            assert "DirectoryError: 6 of the 9 steps are lost: no room for a checkpoint" in error.said
        else:
            assert error.errno == errno.ENOSPC
        assert saved(out) == [3]
        assert not list(out.rglob("*.saving"))
        os.unlink(f"{place}/fill")
        check(train(out), undisturbed(name), 3)
