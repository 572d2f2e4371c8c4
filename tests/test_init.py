"""`infinity.init`: the values of an ordinary construction, in a file instead of in memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.api.init import init, release, scratch_extent
from infinity.core.config import Config
from infinity.core.errors import DirectoryError, WrapError

from . import models
from .ranks import all_well, run_ranks


class Odd(nn.Module):
    """Parameters that are tied, re-registered, strided, overlapping, small, empty and of odd dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Parameter(torch.empty(96, 64).t())
        nn.init.normal_(self.strided)
        self.gapped = nn.Parameter(torch.randn(128, 128)[::2, 1::3])
        self.expanded = nn.Parameter(torch.randn(64, 1).expand(64, 4096))
        self.halves = nn.Parameter(torch.randn(5000).half())
        self.doubles = nn.Parameter(torch.randn(5000).double())
        self.complex = nn.Parameter(torch.randn(5000, dtype=torch.complex64))
        self.counts = nn.Parameter(torch.arange(5000), requires_grad=False)
        self.small = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.channels = nn.Parameter(torch.randn(8, 8, 8, 8).to(memory_format=torch.channels_last))
        self.first = nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.first.weight
        shared = torch.randn(2000)
        self.left, self.right = nn.Parameter(shared), nn.Parameter(shared)
        self.first.weight = nn.Parameter(torch.randn(64, 64))  # registered again, with another
        self.register_parameter("nothing", None)
        nn.init.uniform_(self.tied.weight)
        with torch.no_grad():
            self.left.mul_(2)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "lstm": lambda: nn.LSTM(64, 64, num_layers=2),
    "attention": lambda: nn.TransformerEncoderLayer(64, 4),
    **{name: (lambda make=models.FACTORIES[name]: make(0)) for name in ("gpt", "cnn")},
}


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_values_and_random_state_are_those_of_an_ordinary_construction(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    ordinary = BUILDERS[name]()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with init(Config(nvme=tmp_path)):
        model = BUILDERS[name]()
    assert torch.equal(torch.get_rng_state(), state)
    wanted, found = (dict(m.named_parameters(remove_duplicate=False)) for m in (ordinary, model))
    assert list(found) == list(wanted)
    for key, param in found.items():
        assert type(param) is type(wanted[key])
        assert torch.equal(param, wanted[key]), key
        assert param.dtype is wanted[key].dtype
        assert param.stride() == wanted[key].stride()
        assert param.requires_grad == wanted[key].requires_grad
        assert (scratch_extent(param) is not None) == (param.untyped_storage().nbytes() >= 4096), key
    assert [[id(a) == id(b) for a in found.values()] for b in found.values()] == [
        [id(a) == id(b) for a in wanted.values()] for b in wanted.values()
    ]
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(ordinary.named_buffers())[key])
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_registration_is_ordinary_again_after_the_block(tmp_path: Path) -> None:
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    with pytest.raises(ZeroDivisionError), init(Config(nvme=tmp_path)):
        raise ZeroDivisionError
    assert scratch_extent(nn.Linear(100, 100).weight) is None
    assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == before


def test_space_comes_back_with_the_last_user(tmp_path: Path) -> None:
    with init(Config(nvme=tmp_path)):
        model = nn.Linear(1000, 1000)
    extent = scratch_extent(model.weight)
    assert extent is not None
    file = extent.file
    assert file.allocated >= 4_000_000
    other = model.weight.detach()
    wanted = other.clone()
    release(other)
    assert torch.equal(other, wanted)
    model.weight.data = torch.zeros(1, 1)
    gc.collect()
    assert torch.equal(other, wanted)  # somebody still looks at it
    del other
    gc.collect()
    assert file.allocated == 0


def test_a_child_that_drops_the_model_leaves_the_parents_values(tmp_path: Path) -> None:
    with init(Config(nvme=tmp_path)):
        model = nn.Linear(200, 200)
    wanted = model.weight.detach().clone()
    child = os.fork()
    if child == 0:
        del model
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(model.weight, wanted)


def test_without_an_nvme_directory_the_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with init(Config()):
        model = nn.Linear(100, 100)
    extent = scratch_extent(model.weight)
    assert extent is not None
    assert extent.file.directory == str(tmp_path)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, number in (("missing", errno.ENOENT), ("file", errno.ENOTDIR)):
        path = tmp_path / name
        with pytest.raises(DirectoryError, match="scratch file") as caught, init(Config(nvme=path)):
            pass
        assert (caught.value.errno, caught.value.path) == (number, str(path))


def test_a_full_directory_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(DirectoryError, match="cannot grow") as caught, init(Config(nvme=tmp_path)):
            nn.Linear(1000, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.nbytes == 4_001_792
    assert "raise the limit on the size of a file: ulimit -f" in str(caught.value.cure)
    with init(Config(nvme=tmp_path)):
        nn.Linear(1000, 1000)


PEAK = """
import sys, threading
import torch
from torch import nn
from infinity.core.config import Config
from infinity.api.init import init, scratch_extent

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) * 1024 for l in status if l.startswith("RssAnon"))

kind, directory, source = sys.argv[1:]
torch.set_num_threads(1)
if kind == "hf":
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    build = lambda: AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
else:
    build = lambda: nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
nn.Linear(64, 64)(torch.ones(1, 64))
peak = base = anonymous()
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch)
thread.start()
with init(Config(nvme=directory)):
    model = build()
peak = max(peak, anonymous())
done.set()
thread.join()
params = list(model.parameters())
largest = max(p.numel() * p.element_size() for p in params)
total = sum(p.numel() * p.element_size() for p in params)
backed = all(scratch_extent(p) is not None for p in params if p.numel() * p.element_size() >= 4096)
print(peak - base, largest, total, backed)
"""


@pytest.mark.parametrize("kind", ["torch", pytest.param("hf", marks=pytest.mark.integration)])
def test_anonymous_memory_does_not_grow_with_the_model(kind: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    if kind == "hf":
        sizes = {"hidden_size": 512, "intermediate_size": 1408, "layers": 20, "vocab_size": 2000}
        models.huggingface("llama", tied=True, **sizes).save_pretrained(saved)
    [said] = all_well(run_ranks(1, PEAK, kind, str(tmp_path), str(saved), seconds=200))
    peak, largest, total, backed = said.split()
    assert backed == "True"
    # Freed copies leave holes in malloc's heap: tens of MB, whatever the model's size.
    holes = 48 << 20 if kind == "hf" else 16 << 20
    assert int(peak) < 2 * int(largest) + holes < int(total) / 2


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama", False)])
def test_from_pretrained(kind: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = tmp_path / "saved"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    torch.manual_seed(1)
    original = models.huggingface(kind, tied=tied)
    original.save_pretrained(saved)
    torch.manual_seed(2)
    ordinary = AutoModelForCausalLM.from_pretrained(saved)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    with init(Config(nvme=scratch)):
        model = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, param), (_, wanted) in zip(model.named_parameters(), ordinary.named_parameters(), strict=True):
        assert torch.equal(param, wanted), name
        if param.numel() * param.element_size() >= 4096:
            assert scratch_extent(param) is not None, name
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == tied
    with init(Config(nvme=scratch)):
        half = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    assert scratch_extent(half.get_input_embeddings().weight) is not None
    assert torch.equal(half.get_input_embeddings().weight, embedding.bfloat16())


# -- Parameters that share memory ---------------------------------------------------------------

N = 2048  # elements of a parameter: more bytes than the least that `init` moves


class _Sharing(nn.Module):
    """Two parameters, `a` and `b`, made over memory of `flat`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        flat = torch.arange(4.0 * N)
        small = N // 64
        first, second = {
            "equal": (flat[:N], flat[:N]),
            "slice": (flat[: 2 * N], flat[N : 2 * N]),
            "staggered": (flat[: 2 * N], flat[N : 3 * N]),
            "a small one first": (flat[small : 2 * small], flat[: 2 * N]),
            "rows and a column": (flat.view(4, N), flat.view(4, N)[:, :N]),
            "other dtypes": (flat[:N], flat.view(torch.float64)[: N // 2]),
        }[kind]
        self.a = nn.Parameter(first)
        # As users write it: the memory of the Parameter that stands in the module by now, or of its maker.
        self.b = nn.Parameter(self.a.data if kind == "equal" else second)


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        *(("equal", True), ("slice", False), ("staggered", True), ("a small one first", False)),
        *(("rows and a column", True), ("other dtypes", False)),
    ],
)
def test_two_parameters_over_shared_memory_are_refused(kind: str, inside: bool, tmp_path: Path) -> None:
    config = infinity.Config(nvme=tmp_path, device="cpu", dtype="fp32", host_memory="16MiB")
    with infinity.init(config) if inside else contextlib.nullcontext():
        model = _Sharing(kind)
    with pytest.raises(WrapError, match="share memory") as caught:
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    assert "'a'" in str(caught.value)
    assert "'b'" in str(caught.value)
    with torch.no_grad():  # both cures work
        if "one Parameter (" in str(caught.value):
            tied = _Sharing(kind)
            tied.b = tied.a
            infinity.close(infinity.wrap(tied, torch.optim.AdamW(tied.parameters()), config)[0])
        model.b = nn.Parameter(model.b.detach().clone())
    infinity.close(infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)[0])


class _Buffered(nn.Module):
    """A linear layer and a buffer over its weight's memory, or one that only looks like it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(64, 64)
        weight = self.head.weight
        match kind:
            case "all":
                self.register_buffer("seen", weight.data)
            case "a row":
                self.register_buffer("seen", weight.detach()[3], persistent=False)


@pytest.mark.parametrize(("kind", "inside"), [("all", True), ("a row", False)])
def test_a_buffer_over_a_parameters_memory_is_refused_and_the_cures_work(
    kind: str, inside: bool, tmp_path: Path
) -> None:
    config = infinity.Config(nvme=tmp_path, device="cpu", dtype="fp32", parameters="nvme")
    with infinity.init(config) if inside else contextlib.nullcontext():
        model = _Buffered(kind)
    with pytest.raises(WrapError, match=r"'seen' shares memory with the parameter 'head.weight'"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    model.register_buffer("seen", model.seen.detach().clone())
    infinity.close(infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)[0])
