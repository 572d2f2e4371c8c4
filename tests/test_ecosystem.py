"""Libraries that people train with: ten steps of each equal torch's, losses, gradient norms and weights, at
the least device budget that is accepted."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.config import Config
from infinity.core.errors import BudgetError, PrecisionError
from infinity.optim.optimizer import OffloadOptimizer

from .command_line import python
from .models import huggingface
from .offloaded import config_for, wrap_adamw

pytestmark = pytest.mark.integration

STEPS = 10


def need(name: str) -> Any:
    """Import a package that the tests of this file are about."""
    if importlib.util.find_spec(name) is None and not os.environ.get("CI"):
        pytest.skip(f"needs {name}: `make test-all` installs it")
    return importlib.import_module(name)


@dataclass
class Seen:
    """What a run came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, state: dict[str, torch.Tensor]) -> None:
        self.state = {name: value.detach().clone() for name, value in state.items()}


class Wrap:
    """`infinity.wrap` in the run of the engine, nothing in that of torch."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.count = 0
        self.opened: list[Any] = []

    def __call__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
    ) -> tuple[Any, Any]:
        if self.folder is None:
            return model, optimizer
        self.count += 1
        folder = self.folder / f"arena{self.count}"
        folder.mkdir()
        config = config_for(folder, **settings)
        if "device_memory" not in settings:
            config = config.replace(device_memory=self.least(model, optimizer, config))
        model, wrapped = infinity.wrap(model, optimizer, config)
        self.opened.append(wrapped)
        return model, wrapped

    def least(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> int:
        """The least device memory that is accepted; a refusal has touched nothing."""
        try:
            infinity.wrap(model, optimizer, config.replace(device_memory=4096))
        except BudgetError as error:
            return int(re.search(r"\((\d+) bytes\)", str(error.expected))[1])  # type: ignore[index]
        raise AssertionError("4 KiB were accepted")

    def close(self) -> None:
        for thing in self.opened:
            infinity.close(thing)


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return huggingface("llama")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def tokens(seed: int, size: int = 2) -> torch.Tensor:
    return torch.randint(96, (size, 12), generator=torch.Generator().manual_seed(seed))


def examples() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(i, 1)[0], "labels": tokens(i, 1)[0]} for i in range(40)]


def words(seed: int, count: int) -> str:
    indices = torch.randint(92, (count,), generator=torch.Generator().manual_seed(seed))
    return "".join(f" w{int(i)}" for i in indices)


def tokenizer() -> Any:
    import tokenizers
    import transformers

    vocabulary = {f"w{i}": i for i in range(92)} | {"<unk>": 92, "<pad>": 93, "<eos>": 94, "<bos>": 95}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=built, **special)


# -- accelerate, and what tests of trainers share -----------------------------------------------------


def arguments(out: Path, **settings: Any) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "max_steps": STEPS,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_grad_norm": 1.0,
        **settings,
    }


def watch(seen: Seen) -> Any:
    import transformers

    class Watch(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                seen.losses.append(logs["loss"])
                seen.norms.append(float(logs["grad_norm"]))

    return Watch()


def accelerate(wrap: Wrap, out: Path, seen: Seen) -> None:
    accelerator = need("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    model, optimizer = wrap(model, adamw(model))
    loader = torch.utils.data.DataLoader(examples(), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, schedule(optimizer))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.losses.append(loss.item())
    accelerator.save_state(str(out / "state"))
    accelerator.load_state(str(out / "state"))
    seen.keep(accelerator.unwrap_model(model).state_dict())


def pairs() -> Any:
    rows = {
        "prompt": [words(i, 4) for i in range(40)],
        "chosen": [words(i + 100, 5) for i in range(40)],
        "rejected": [words(i + 200, 5) for i in range(40)],
    }
    return need("datasets").Dataset.from_dict(rows)


# -- PEFT ----------------------------------------------------------------------------------------


def adapted(kind: str) -> Any:
    """A Llama with adapters of a kind, which are not zero."""
    peft = need("peft")
    more: dict[str, dict[str, Any]] = {
        "lora": {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False},
        "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
        "ia3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        "prompt": {"num_virtual_tokens": 4},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    }
    makers = {"ia3": peft.IA3Config, "prompt": peft.PromptTuningConfig}
    settings = more[kind] if kind in makers else {"r": 4, **more[kind]}
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, makers.get(kind, peft.LoraConfig)(task_type="CAUSAL_LM", **settings))


def adapters(kind: str, wrap: Wrap, out: Path, seen: Seen) -> None:
    model = adapted(kind)
    model, optimizer = wrap(model, adamw(model))
    for step in range(STEPS):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        seen.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        seen.losses.append(loss.item())
    seen.keep(model.state_dict())
    model.save_pretrained(out)
    saved = need("peft").PeftModel.from_pretrained(llama(), out).eval()
    with torch.no_grad():
        seen.losses.append(saved(input_ids=tokens(0), labels=tokens(0)).loss.item())


CASES: dict[str, Callable[[Wrap, Path, Seen], None]] = {
    "accelerate": accelerate,
    **{f"PEFT, {kind}": functools.partial(adapters, kind) for kind in ("lora", "prompt", "saved")},
}


def run_case(case: Callable[[Wrap, Path, Seen], Any], folder: Path, *, offloaded: bool) -> Seen:
    seen, out = Seen(), folder / f"out{offloaded}"
    out.mkdir()
    wrap = Wrap(folder if offloaded else None)
    torch.manual_seed(0)
    try:
        case(wrap, out, seen)
    finally:
        wrap.close()
    return seen


@pytest.mark.parametrize("name", CASES)
def test_ten_steps(name: str, tmp_path: Path) -> None:
    wanted = run_case(CASES[name], tmp_path, offloaded=False)
    found = run_case(CASES[name], tmp_path, offloaded=True)
    assert len(wanted.losses) >= STEPS
    assert len(wanted.norms) >= STEPS
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-5)
    torch.testing.assert_close(found.state, wanted.state, rtol=1e-5, atol=1e-6)


def test_a_run_with_adapters_loads_no_frozen_unit(tmp_path: Path) -> None:
    """With room on the device each unit that is frozen comes once; a step brings and reads adapters only."""
    wrap = Wrap(tmp_path)
    model = adapted("lora")
    model, optimizer = wrap(model, adamw(model), device_memory="8MiB")
    try:
        units = engine_of(model).units
        trained = [u for u in units if any(s.spec.trainable for s in u.params)]
        assert len(trained) == 2
        assert all(s.spec.trainable for u in trained for s in u.params)
        for step in range(STEPS):
            loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        # Those of the next step may have begun.
        most = len(units) - len(trained) + (STEPS + 1) * len(trained)
        assert infinity.metrics(optimizer)["fetch/units"] <= most
    finally:
        wrap.close()


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", ["nvme", {"device": 0.5, "host": 0.5}])
def test_checkpoints_of_libraries_have_every_tensor(parameters: Any, tmp_path: Path) -> None:
    """They take tensors over one storage as tied: what they write is what they write of the plain model."""
    safetensors, hub = need("safetensors.torch"), need("huggingface_hub")
    accelerator = need("accelerate").Accelerator(cpu=True)
    for tied in (False, True):
        files, sizes = [], []
        for offloaded in (False, True):
            torch.manual_seed(0)
            model = huggingface("llama", tied=tied)
            out = tmp_path / f"{tied}{offloaded}"
            (out / "hub").mkdir(parents=True)
            if offloaded:
                config = config_for(out, parameters=parameters)
                model, optimizer = infinity.wrap(model, adamw(model), config)
            accelerator.save_model(model, out / "accelerate")
            safetensors.save_model(model, out / "model.safetensors")
            hub.save_torch_model(model, out / "hub")
            model.save_pretrained(out / "transformers")
            torch.save(model.state_dict(), out / "state")
            torch.save({"norm": model.state_dict()["model.norm.weight"]}, out / "norm")
            written = [out / p for p in ("accelerate", "hub", "transformers", ".")]
            files.append([safetensors.load_file(p / "model.safetensors") for p in written])
            sizes.append([(out / p).stat().st_size for p in ("state", "norm")])
            safetensors.load_model(model, out / "model.safetensors")
            prepared = accelerator.prepare(model)
            accelerator.save_state(out / "run")
            accelerator.load_state(out / "run")
            state = safetensors.load_file(out / "run" / "model.safetensors")
            assert state.keys() == files[0][0].keys()
            prepared(input_ids=tokens(0))
            accelerator.free_memory()
            if offloaded:
                infinity.close(optimizer)
        assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
        torch.testing.assert_close(files[1], files[0], rtol=0, atol=0)


# -- heads that are fused with the loss ----------------------------------------------------------


@pytest.mark.parametrize("head", ["liger", "cut-cross-entropy"])
def test_a_fused_head_is_given_the_weight_of_another_module(head: str, tmp_path: Path) -> None:
    packages = Path(sys.prefix) / "heads"
    if not packages.is_dir() and not os.environ.get("CI"):
        pytest.skip("needs liger-kernel and cut-cross-entropy: `make test-all` installs them")
    command = ["-m", "tests.fused_heads", head, str(packages), str(tmp_path)]
    done = python(*command, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine"] == pytest.approx(found["torch"], rel=1e-5)
    assert found["parameters"]


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Any]]:
    """A maker of an Accelerator with a state of its own; the library has one per process."""
    library = need("accelerate")

    def reset() -> None:
        library.state.AcceleratorState._reset_state(reset_partial_state=True)
        library.state.GradientState._reset_state()

    reset()
    yield functools.partial(library.Accelerator, cpu=True)
    reset()


@pytest.mark.parametrize(
    ("prepared", "early", "skip"),
    [(True, False, "fp16"), (True, True, "skip_nonfinite"), (False, True, "fp16")],
)
def test_a_step_that_was_skipped_under_accelerate_moves_no_schedule(
    prepared: bool, early: bool, skip: str, accelerator: Callable[..., Any]
) -> None:
    """accelerate's own optimizer asks ours for nothing: neither whether it skipped, nor `scale`. `prepared`:
    accelerate has the scheduler; `early`: the program made it before `wrap`. Two of six steps overflow."""
    library = accelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 2.0**n) if early else None
    settings = {"dtype": "fp16"} if skip == "fp16" else {"dtype": "fp32", "skip_nonfinite": True}
    model, optimizer = infinity.wrap(model, optimizer, infinity.Config(device="cpu", **settings))
    scheduler = scheduler or torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 2.0**n)
    model, optimizer = library.prepare(model, optimizer)
    scheduler = library.prepare(scheduler) if prepared else scheduler
    rates = []
    for step in range(6):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        loss = model(x.half() if skip == "fp16" else x).float().square().mean()
        library.backward(optimizer.scale(loss * (float("inf") if step in (0, 3) else 1.0)))
        optimizer.step()
        assert library.optimizer_step_was_skipped == optimizer.step_was_skipped == (step in (0, 3))
        if prepared or not optimizer.step_was_skipped:
            scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    assert optimizer.skipped_steps == 2
    assert rates == [1e-3, 2e-3, 4e-3, 4e-3, 8e-3, 16e-3]
    assert isinstance(optimizer, OffloadOptimizer)
    infinity.close(optimizer)


@pytest.mark.parametrize("mixed", ["fp16", "bf16"])
def test_accelerate_with_mixed_precision_is_refused_where_it_prepares(
    mixed: str, accelerator: Callable[..., Any], tmp_path: Path
) -> None:
    model, optimizer = wrap_adamw(torch.nn.Linear(8, 4), config_for(tmp_path))
    with pytest.raises(PrecisionError, match=rf'mixed precision {mixed}[\s\S]*Config\(dtype="{mixed}"\)'):
        accelerator(mixed_precision=mixed).prepare(model, optimizer)
    infinity.close(optimizer)
