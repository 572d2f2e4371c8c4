"""`InfinityStrategy`: Lightning's Trainer over a wrapped module, beside its own strategy "ddp"."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import infinity
from infinity.core.errors import (
    ConfigError,
    CorruptionError,
    DirectoryError,
    ReleasedParameterError,
    StateDictError,
    WrapError,
)

from .ranks import all_well, run_ranks
from .test_ecosystem import need

pytestmark = pytest.mark.integration

IMPORTS = ("lightning.pytorch", "tests.test_lightning")


@pytest.fixture(autouse=True)
def none_of_its_ranks_stay() -> Iterator[None]:
    """Lightning leaves its process group, and the address of it in the environment."""
    need("lightning.pytorch")
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def net(seed: int = 0, **named: Any) -> Any:
    L = need("lightning.pytorch")

    class Net(L.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.model: Any = None if named.get("late") else self.build()
            self.losses: list[float] = []
            self.built_on = ""

        def build(self) -> torch.nn.Module:
            torch.manual_seed(seed)
            return torch.nn.Sequential(
                torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1)
            )

        def configure_model(self) -> None:
            if self.model is None:
                self.model = self.build()
                torch.manual_seed(7)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = (self.model(batch[0]) - batch[1]).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", (self.model(batch[0]) - batch[1]).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            count = named.get("optimizers", 1)
            made = [torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3) for _ in range(count)]
            if count != 1:
                return made
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made[0], 20)
            return {"optimizer": made[0], "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Net()


def data(shuffle: bool = True) -> Any:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=shuffle)


def strategy(folder: Path, **settings: Any) -> Any:
    from infinity.integrations.lightning import InfinityStrategy

    (folder / "arenas").mkdir(parents=True, exist_ok=True)
    given = {"nvme": str(folder / "arenas"), "optimizer_state": "nvme", "host_memory": "64MiB", "threads": 1}
    return InfinityStrategy(infinity.Config(**given | settings))


class Trained:
    """A fit: the Trainer, the module, what ModelCheckpoint has kept."""

    def __init__(
        self, out: Path, by: Any, epochs: int = 4, *, module: Any = None, resume: Any = None, **settings: Any
    ) -> None:
        L = need("lightning.pytorch")
        torch.manual_seed(7)
        self.module = net() if module is None else module
        torch.manual_seed(7)
        self.kept = L.callbacks.ModelCheckpoint(
            out, filename="{epoch}", monitor="val", save_top_k=1, save_last=True, **settings.pop("keep", {})
        )
        self.trainer = trainer(out, by, epochs, callbacks=[self.kept], **settings)
        self.trainer.fit(self.module, data(), data(shuffle=False), ckpt_path=resume)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def closed(self) -> Trained:
        infinity.close(self.module)
        return self


def trainer(out: Path, by: Any, epochs: int = 1, **settings: Any) -> Any:
    quiet = ("logger", "enable_progress_bar", "enable_model_summary")
    return need("lightning.pytorch").Trainer(
        **dict.fromkeys(quiet, False),
        **{"max_epochs": epochs, "accelerator": "cpu", "default_root_dir": out, "strategy": by},
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        **settings,
    )


def same_as_ddp(folder: Path, **settings: Any) -> Trained:
    """Train by both, and return the run of the engine."""
    wanted = Trained(folder / "ddp", "ddp", gradient_clip_val=1.0, accumulate_grad_batches=2)
    found = Trained(
        folder / "out", strategy(folder, **settings), gradient_clip_val=1.0, accumulate_grad_batches=2
    )
    assert len(wanted.module.losses) == 16 // torch.distributed.get_world_size()
    assert found.module.losses == pytest.approx(wanted.module.losses, rel=1e-5)
    torch.testing.assert_close(found.state(), wanted.state(), rtol=1e-5, atol=1e-6)
    assert found.kept.best_model_score.item() == pytest.approx(wanted.kept.best_model_score.item(), rel=1e-5)
    assert Path(found.kept.best_model_path).name == Path(wanted.kept.best_model_path).name
    names = [sorted(path.name for path in (folder / by).iterdir()) for by in ("out", "ddp")]
    assert names[0] == names[1]
    rates = [run.trainer.lr_scheduler_configs[0].scheduler.get_last_lr() for run in (found, wanted)]
    assert rates[0] == rates[1]
    return found


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler")
def test_training_as_with_ddp(tmp_path: Path) -> None:
    same_as_ddp(tmp_path, parameters="nvme").closed()


def test_the_update_behind_the_backward_takes_lightnings_accumulation(tmp_path: Path) -> None:
    settings = {"accumulate_grad_batches": 2}
    wanted = Trained(tmp_path / "ddp", "ddp", **settings)
    found = Trained(tmp_path / "out", strategy(tmp_path, update="backward", accumulation=1), **settings)
    torch.testing.assert_close(found.state(), wanted.state(), rtol=1e-5, atol=1e-6)
    found.closed()


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With its order of data, its dropout and its best checkpoint, from the end of an epoch."""
    whole = Trained(tmp_path / "whole", strategy(tmp_path))
    state, losses = whole.state(), whole.closed().module.losses
    first = Trained(tmp_path / "out", strategy(tmp_path), 2).closed()
    alone, module = trainer(tmp_path, strategy(tmp_path)), net(seed=5)
    (found,) = alone.validate(module, data(shuffle=False), ckpt_path=first.kept.best_model_path)
    assert found["val"] == pytest.approx(first.kept.best_model_score.item(), rel=1e-6)
    infinity.close(module)
    second = Trained(tmp_path / "out", strategy(tmp_path), resume="last")
    assert first.module.losses + second.module.losses == losses
    assert all(map(torch.equal, second.state().values(), state.values()))
    assert second.kept.best_model_score == whole.kept.best_model_score
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        Path(whole.kept.best_model_path).name,
        "last.ckpt",
    ]
    (found,) = second.trainer.validate(second.module, data(shuffle=False), ckpt_path="best")
    assert found["val"] == pytest.approx(whole.kept.best_model_score.item(), rel=1e-6)
    second.closed()


def test_checkpoints_of_ddp_and_back(tmp_path: Path) -> None:
    wanted = Trained(tmp_path / "ddp", "ddp")
    Trained(tmp_path / "begun", "ddp", 2)
    last = tmp_path / "begun" / "last.ckpt"
    found = Trained(tmp_path / "out", strategy(tmp_path), resume=last, keep={"save_weights_only": True})
    torch.testing.assert_close(found.state(), wanted.state(), rtol=1e-2, atol=1e-2)  # another dropout
    weights = torch.load(found.kept.last_model_path, weights_only=True)["state_dict"]
    assert all(map(torch.equal, weights.values(), found.state().values()))
    found.closed()
    plain = net(seed=3)
    plain.load_state_dict(weights)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16"])
def test_a_precision_is_that_of_the_engine(precision: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"precision": precision} if precision != "fp16" else {}
    settings = {"dtype": "fp16"} if precision == "fp16" else {}
    run = Trained(tmp_path / "out", strategy(tmp_path, **settings), 2, **given)
    optimizer = run.trainer.strategy.wrapped_optimizer
    assert optimizer.steps + optimizer.skipped_steps == 8
    assert (optimizer.skipped_steps > 0) == (precision == "fp16")  # the scale begins too high, as torch's
    state = run.state()
    run.closed()
    whole = Trained(tmp_path / "whole", strategy(tmp_path), 2).closed()
    if precision != "fp16":  # whose first steps were skipped
        assert run.module.losses == pytest.approx(whole.module.losses, rel=0.05)
        assert run.module.losses != whole.module.losses
    dtype = {"bf16-mixed": "bf16", "fp16": "fp16"}[precision]
    by_hand, opt = infinity.wrap(*plain_adamw(), infinity.Config(dtype=dtype, device="cpu", threads=1))
    infinity.load(opt, run.kept.last_model_path)
    assert all(map(torch.equal, by_hand.state_dict().values(), state.values()))
    infinity.close(opt)


def plain_adamw() -> tuple[Any, Any]:
    module = net(seed=4)
    return module, torch.optim.AdamW(module.parameters(), lr=1.0)


def test_what_the_strategy_refuses(tmp_path: Path) -> None:
    from infinity.integrations.lightning import InfinityStrategy

    L = need("lightning.pytorch")
    with pytest.raises(ConfigError, match=r"InfinityStrategy\(infinity.Config"):
        InfinityStrategy("ds_config.json")
    for precision in ("bf16-true", "64-true"):
        with pytest.raises(ConfigError, match=f"precision='{precision}'"):
            trainer(tmp_path, strategy(tmp_path), precision=precision)

    class Quantized(L.plugins.precision.Precision):  # type: ignore[misc,name-defined]
        """As BitsandbytesPrecision, which calls itself 32-true."""

    with pytest.raises(ConfigError, match="Quantized"):
        trainer(tmp_path, strategy(tmp_path), plugins=[Quantized()])
    twice = strategy(tmp_path)
    trainer(tmp_path, twice, precision="bf16-mixed")
    twice.precision_plugin = twice.precision_plugin  # as of another Trainer, which gets it with the strategy
    assert twice.precision_plugin.precision == "bf16-mixed"
    assert twice._config.dtype == "bf16"
    with pytest.raises(ConfigError, match="leave precision out"):
        trainer(tmp_path, strategy(tmp_path, dtype="fp16"), precision="bf16-mixed")
    for count in (0, 2):
        module = net(optimizers=count)
        module.automatic_optimization = False
        with pytest.raises(WrapError, match=f"{count} optimizers"):
            Trained(tmp_path, strategy(tmp_path), module=module)
    module.configure_optimizers = lambda: None
    with pytest.raises(WrapError, match="found: None"):
        Trained(tmp_path, strategy(tmp_path), module=module)
    plugin = L.plugins.io.AsyncCheckpointIO(L.plugins.io.TorchCheckpointIO())
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        Trained(tmp_path, strategy(tmp_path), plugins=[plugin])
    with pytest.raises(ConfigError, match="accumulate_grad_batches=3"):
        Trained(tmp_path, strategy(tmp_path, update="backward", accumulation=2), accumulate_grad_batches=3)
    with pytest.raises(WrapError, match="has not wrapped"):
        _ = strategy(tmp_path).wrapped_optimizer
    run = Trained(tmp_path / "out", strategy(tmp_path), 1)
    for again in (run.trainer, trainer(tmp_path, strategy(tmp_path / "other"))):
        with pytest.raises(WrapError, match=r"infinity.unwrap\(module\) before fit"):
            again.fit(run.module, data())
    trainer(tmp_path, strategy(tmp_path / "other")).validate(run.module, data())
    file = tmp_path / "file.ckpt"
    file.touch()
    for path in (file, "s3://bucket/run.ckpt"):
        with pytest.raises(DirectoryError, match="another path"):
            run.trainer.save_checkpoint(path)
    assert not Path("s3:").exists()
    run.trainer.save_checkpoint(tmp_path / "run.ckpt")
    infinity.unwrap(run.module)
    again = trainer(tmp_path, strategy(tmp_path), 2)
    again.fit(run.module, data(), ckpt_path=tmp_path / "run.ckpt")  # the cure
    assert again.strategy.wrapped_optimizer.steps == 8
    (lost,) = (tmp_path / "run.ckpt").glob("lightning-*")
    with pytest.raises(DirectoryError, match=r"ckpt_path='.*/run.ckpt'"):
        again.strategy.load_checkpoint(lost)
    lost.unlink()
    with pytest.raises(CorruptionError, match="lacks what Lightning knows"):
        again.strategy.load_checkpoint(tmp_path / "run.ckpt")
    infinity.close(run.module)


def test_configure_model_builds_on_the_tiers_and_validation_before_the_fit_wraps_for_both(
    tmp_path: Path,
) -> None:
    wanted = Trained(tmp_path / "one", strategy(tmp_path), 1).closed()
    late = Trained(tmp_path / "two", strategy(tmp_path, parameters="nvme"), 1, module=net(late=True))
    assert late.closed().module.losses == wanted.module.losses
    run = trainer(tmp_path, strategy(tmp_path), enable_checkpointing=False)
    torch.manual_seed(7)
    module = net()
    run.validate(module, data(shuffle=False))
    torch.manual_seed(7)
    run.fit(module, data(), data(shuffle=False))
    assert module.losses == wanted.module.losses
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 4
    infinity.close(module)


@pytest.mark.parametrize(
    ("hook", "change"),
    [("on_save_checkpoint", {"optimizer_states": []}), ("on_load_checkpoint", {"state_dict": {"a": 1}})],
)
def test_a_hook_that_changes_state_dicts_in_vain_is_an_error(
    hook: str, change: dict[str, Any], tmp_path: Path
) -> None:
    run = Trained(tmp_path / "out", strategy(tmp_path), 1)
    path = tmp_path / "run.ckpt"
    run.trainer.save_checkpoint(path)
    infinity.unwrap(run.module)
    setattr(run.module, hook, lambda checkpoint: checkpoint.update(change))
    again = trainer(tmp_path, strategy(tmp_path), 2)
    with pytest.raises(StateDictError, match=f"{hook} changed"):
        again.fit(run.module, data(), ckpt_path=path)
    infinity.close(run.module)


def ranks() -> None:
    """What each rank runs: as with ddp, and on from a checkpoint, on as many ranks or another number."""
    torch.set_num_threads(1)
    folder, what = Path(sys.argv[1]), sys.argv[2]
    where = {"zero_stage": 3, "parameters": "nvme"}
    if what == "train":
        run = same_as_ddp(folder, **where)
        run.trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        state = run.state()
        if torch.distributed.get_rank() == 0:
            saved = torch.load(folder / "weights.ckpt", weights_only=True)["state_dict"]
            torch.testing.assert_close(saved, state, rtol=0, atol=0)
            torch.save(state, folder / "state.pt")
    else:
        run = Trained(folder / "out", strategy(folder, **where), 4, resume="last")
        wanted = torch.load(folder / "state.pt", weights_only=True)
        torch.testing.assert_close(run.state(), wanted, rtol=0, atol=0)
        assert not run.module.losses
    (found,) = run.trainer.validate(run.module, data(shuffle=False), ckpt_path="best")
    assert found["val"] == pytest.approx(run.kept.best_model_score.item(), rel=1e-6)
    print(json.dumps(run.module.losses))  # noqa: T201
    run.closed()


def test_two_ranks(tmp_path: Path) -> None:
    script, torchrun = "from tests.test_lightning import ranks; ranks()", {"TORCHELASTIC_RUN_ID": "none"}
    for count, what in ((2, "train"), (2, "resume"), (1, "resume")):
        given: dict[str, Any] = {"seconds": 90, "environment": torchrun, "imports": IMPORTS}
        all_well(run_ranks(count, script, str(tmp_path), what, **given))
    assert not list(tmp_path.rglob("*.saving"))


def test_a_callback_that_unfreezes_layers(tmp_path: Path) -> None:
    L = need("lightning.pytorch")

    class Refused(L.callbacks.BaseFinetuning):  # type: ignore[misc,name-defined]
        """As Lightning's pages write it."""

        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.model[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.model[0], optimizer)

    class Cured(L.callbacks.BaseFinetuning):  # type: ignore[misc,name-defined]
        def freeze_before_training(self, module: Any) -> None:
            pass

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            (self.freeze if epoch < 1 else self.make_trainable)(module.model[0])
            seen.append(module.state_dict()["model.0.weight"].clone())

    def fit(folder: str, by: Any, callback: Any) -> Any:
        module = net()
        torch.manual_seed(7)
        trainer(tmp_path / folder, by, 3, callbacks=[callback], enable_checkpointing=False).fit(
            module, data()
        )
        return module

    def refused() -> None:
        module = net()
        made = module.configure_optimizers
        module.configure_optimizers = lambda: torch.optim.AdamW(
            [p for p in module.parameters() if p.requires_grad], made()["optimizer"].defaults["lr"]
        )
        by = strategy(tmp_path / "refused", parameters="nvme")
        try:
            trainer(tmp_path, by, 3, callbacks=[Refused()], enable_checkpointing=False).fit(module, data())
        finally:
            infinity.close(module)

    with pytest.raises((ReleasedParameterError, WrapError)) as caught:
        refused()
    for words in ("`configure_optimizers`", "`freeze_before_training`", "`self.make_trainable(modules)`"):
        assert words in str(caught.value.cure)
    seen: list[torch.Tensor] = []
    wanted = fit("ddp", "ddp_find_unused_parameters_true", Cured()).state_dict()
    seen = []
    module = fit("out", strategy(tmp_path / "out", parameters="nvme"), Cured())
    torch.testing.assert_close(module.state_dict(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    infinity.close(module)
