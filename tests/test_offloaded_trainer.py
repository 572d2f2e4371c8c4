"""`offloaded(Trainer)` does what Trainer does: the same losses, weights, checkpoints and best model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity

from .offloaded import config_for
from .test_ecosystem import Seen, arguments, examples, llama, need, watch

pytestmark = pytest.mark.ecosystem
STEPS = 7


@pytest.fixture
def transformers() -> Any:
    need("accelerate")
    return need("transformers")


@pytest.fixture
def offloaded(transformers: Any) -> Any:
    from infinity.integrations.transformers import offloaded

    return offloaded


def with_dropout(seed: int = 0) -> Any:
    model = llama(seed)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return model


class Trained:
    """A run of a trainer, closed: what it came to, and the trainer."""

    def __init__(
        self,
        cls: Any,
        folder: Path,
        config: infinity.Config | None = None,
        *,
        resume: Any = None,
        model: Any = None,
        **settings: Any,
    ) -> None:
        transformers = need("transformers")
        self.seen = Seen()
        self.args = transformers.TrainingArguments(**arguments(folder, max_steps=STEPS, **settings))
        given = {} if config is None else {"infinity": config}
        self.trainer = cls(
            with_dropout() if model is None else model,
            self.args,
            train_dataset=examples(),
            eval_dataset=examples()[:4],
            callbacks=[watch(self.seen)],
            **given,
        )
        self.trainer.train(resume_from_checkpoint=resume)
        self.seen.keep(self.trainer.model.state_dict())
        self.evaluated = self.trainer.evaluate()["eval_loss"]
        self.best = self.trainer.state.best_model_checkpoint
        if config is not None:
            self.trainer.save_model(str(folder / "final"))
            infinity.close(self.trainer.model)

    @property
    def checkpoints(self) -> list[str]:
        return sorted(p.name for p in Path(self.args.output_dir).glob("checkpoint-*"))


@pytest.fixture
def config(tmp_path: Path) -> infinity.Config:
    return config_for(tmp_path, dtype=None, device=None)


SAVING = {"save_strategy": "steps", "save_steps": 2}
#: The first checkpoint counts as the best.
EVALUATING = {
    **{"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True},
    **{"metric_for_best_model": "eval_loss", "greater_is_better": True},
}


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.1, "activation_checkpointing": True},
        {"gradient_accumulation_steps": 3, **SAVING, "save_total_limit": 2},
        {**SAVING, **EVALUATING, "save_total_limit": 1},
    ],
    ids=["plain", "accumulation", "best"],
)
def test_it_does_what_trainer_does(
    settings: Any, transformers: Any, offloaded: Any, config: Any, tmp_path: Path
) -> None:
    wanted = Trained(transformers.Trainer, tmp_path / "torch", **settings)
    found = Trained(offloaded(transformers.Trainer), tmp_path / "engine", config, **settings)
    assert len(wanted.seen.losses) == STEPS
    assert found.seen.losses == pytest.approx(wanted.seen.losses, rel=1e-5)
    assert found.seen.norms == pytest.approx(wanted.seen.norms, rel=1e-4)
    torch.testing.assert_close(found.seen.state, wanted.seen.state, rtol=1e-4, atol=1e-5)
    assert found.evaluated == pytest.approx(wanted.evaluated, rel=1e-5)
    assert found.checkpoints == wanted.checkpoints
    if "load_best_model_at_end" in settings:
        assert Path(found.best).name == Path(wanted.best).name == "checkpoint-2"
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "engine" / "final")
    torch.testing.assert_close(dict(saved.state_dict()), found.seen.state, rtol=0, atol=0)
    assert not list(tmp_path.rglob("*.arena"))


def test_it_resumes_in_the_middle_of_an_epoch(
    transformers: Any, offloaded: Any, config: Any, tmp_path: Path
) -> None:
    trainer, out = offloaded(transformers.Trainer), tmp_path / "out"
    settings = {**SAVING, "gradient_accumulation_steps": 2, "save_total_limit": 2}
    whole = Trained(trainer, tmp_path / "whole", config, **SAVING, gradient_accumulation_steps=2)
    shutil.copytree(tmp_path / "whole", out)
    (out / "checkpoint-6" / "trainer_state.json").write_text("{")  # a save that was killed
    (out / f"checkpoint-{STEPS}" / "trainer_state.json").unlink()
    (out / "checkpoint-1").mkdir()  # of somebody else
    rest = Trained(trainer, out, config, resume=True, model=with_dropout(5), **settings)
    assert rest.checkpoints == ["checkpoint-1", "checkpoint-6", f"checkpoint-{STEPS}"]
    assert (rest.seen.losses, rest.seen.norms) == (whole.seen.losses[4:], whole.seen.norms[4:])
    assert all(map(torch.equal, rest.seen.state.values(), whole.seen.state.values()))
