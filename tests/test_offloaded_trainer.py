"""`engine(Trainer)` does what Trainer does: the same losses, weights, checkpoints and best model."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import (
    ClosedError,
    ConfigError,
    CorruptionError,
    DirectoryError,
)
from infinity.integrations.deepspeed import scheduler_from

from .command_line import python
from .offloaded import config_for
from .test_ecosystem import Seen, arguments, examples, llama, need, pairs, tokenizer, watch, words

pytestmark = pytest.mark.integration
STEPS = 7
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def plain() -> Any:
    """transformers.Trainer itself."""
    need("accelerate")
    return need("transformers").Trainer


def engine(cls: Any = None) -> Any:
    from infinity.integrations.transformers import offloaded

    return offloaded(plain() if cls is None else cls)


def run_of(folder: Path, config: Any, **settings: Any) -> Any:
    """A trainer of the engine, which has not trained yet."""
    cls, args = engine(), need("transformers").TrainingArguments(**arguments(folder, **settings))
    return cls(llama(), args, train_dataset=examples(), infinity=config)


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
        config: infinity.Config | Path | dict[str, Any] | None = None,
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
        {"gradient_accumulation_steps": 3, "weight_decay": 0.1, "save_total_limit": 2},
        {**EVALUATING, "gradient_checkpointing": True, "save_total_limit": 1},
    ],
    ids=["accumulation", "best"],
)
def test_it_does_what_trainer_does(settings: Any, config: Any, tmp_path: Path) -> None:
    settings = SAVING | settings
    wanted = Trained(plain(), tmp_path / "torch", **settings)
    found = Trained(engine(), tmp_path / "engine", config, **settings)
    assert len(wanted.seen.losses) == STEPS
    assert found.seen.losses == pytest.approx(wanted.seen.losses, rel=1e-5)
    assert found.seen.norms == pytest.approx(wanted.seen.norms, rel=1e-4)
    torch.testing.assert_close(found.seen.state, wanted.seen.state, rtol=1e-4, atol=1e-5)
    assert found.evaluated == pytest.approx(wanted.evaluated, rel=1e-5)
    assert found.checkpoints == wanted.checkpoints
    if "load_best_model_at_end" in settings:
        assert Path(found.best).name == Path(wanted.best).name == "checkpoint-2"
    saved = need("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "engine" / "final")
    torch.testing.assert_close(dict(saved.state_dict()), found.seen.state, rtol=0, atol=0)
    kept = found.best or Path(found.args.output_dir, found.checkpoints[-1])
    infinity.export(Path(kept, "infinity"), tmp_path / "exported")
    saved = need("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(saved.lm_head.weight, found.seen.state["lm_head.weight"])


def test_it_resumes_from_a_checkpoint_of_trainer(config: Any, tmp_path: Path) -> None:
    wanted = Trained(plain(), tmp_path / "out", **SAVING)
    shutil.rmtree(tmp_path / "out" / f"checkpoint-{STEPS}")
    trainer = engine()
    found = Trained(trainer, tmp_path / "out", config, resume=True, model=with_dropout(5), **SAVING)
    assert found.seen.losses == pytest.approx(wanted.seen.losses[6:], rel=1e-5)
    torch.testing.assert_close(found.seen.state, wanted.seen.state, rtol=1e-4, atol=1e-5)


def test_a_save_that_fails_removes_nothing_and_what_cannot_be_removed_stays(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []

    def rmtree(path: Any, *given: Any, rmtree: Any = shutil.rmtree, **named: Any) -> None:
        if Path(path).name == "checkpoint-2":
            raise PermissionError(1, "not permitted")
        rmtree(path, *given, **named)

    def save(optimizer: Any, path: Any, save: Any = infinity.save, **given: Any) -> Any:
        saved.append(path)
        if len(saved) == 3:
            raise DirectoryError("no room")
        return save(optimizer, path, **given)

    monkeypatch.setattr(infinity, "save", save)
    (tmp_path / "checkpoint-1").mkdir()  # of somebody else
    run = run_of(tmp_path, config, **SAVING, save_total_limit=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        with (
            pytest.warns(RuntimeWarning, match="checkpoint-2 stays: .*not permitted"),
            pytest.raises(DirectoryError, match="no room"),
        ):
            run.train()
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (1, 2, 4, 6)}
    assert run.newest_checkpoint() == str(tmp_path / "checkpoint-4")
    run.train(resume_from_checkpoint=True)  # from the fourth step: the sixth one has no index
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-10"}
    infinity.close(run.model)


def test_weights_alone_are_those_of_the_masters(config: Any, tmp_path: Path) -> None:
    """A resume from rounded ones would go on from another model."""
    load = need("safetensors.torch").load_file
    settings = {**SAVING, "save_only_model": True, "bf16": True}
    run = run_of(tmp_path / "out", config, max_steps=4, **settings)
    run.train()
    infinity.export(run.model, tmp_path / "trained", dtype="fp32")
    infinity.close(run.model)
    saved = load(tmp_path / "out" / "checkpoint-4" / "model.safetensors")
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    torch.testing.assert_close(saved, load(tmp_path / "trained" / "model.safetensors"), rtol=0, atol=0)
    # Trainer makes a step behind the last one.
    run = run_of(tmp_path / "out", config, max_steps=4, learning_rate=0.0, **settings)
    with pytest.warns(RuntimeWarning, match="the optimizer and its schedule begin anew"):
        run.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    infinity.export(run.model, tmp_path / "resumed", dtype="fp32")
    infinity.close(run.model)
    torch.testing.assert_close(saved, load(tmp_path / "resumed" / "model.safetensors"), rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "launched"), [("bf16", False), ("fp16", False), ("bf16", True)])
def test_mixed_precision_is_the_compute_dtype(
    dtype: str, launched: bool, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the arguments, or of `accelerate launch`."""
    wanted = Trained(plain(), tmp_path / "torch")
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", dtype)
    given: dict[str, Any] = {} if launched else {dtype: True}
    found = Trained(engine(), tmp_path / "engine", config, **given)
    assert getattr(found.args, dtype) is not launched  # the user's object
    assert found.trainer.accelerator.mixed_precision == "no"
    assert {str(v.dtype) for v in found.seen.state.values()} == {f"torch.{DTYPES[dtype]}"}
    assert found.seen.losses == pytest.approx(wanted.seen.losses, rel=1e-2)
    assert found.seen.norms == pytest.approx(wanted.seen.norms, rel=5e-2)


def test_a_step_that_overflows_leaves_the_learning_rate(config: Any, tmp_path: Path) -> None:
    class Bad(engine()):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            overflows = self.state.global_step == 2 and self.model.training
            return loss + 1e30 * (loss - loss.detach()) if overflows else loss

    found = Trained(Bad, tmp_path / "out", config, fp16=True, **SAVING)
    rates = [log["learning_rate"] for log in found.trainer.state.log_history if "learning_rate" in log]
    assert rates[2] == rates[3]
    assert len(set(rates)) == STEPS - 1
    rest = Trained(Bad, tmp_path / "out", config, fp16=True, resume=str(tmp_path / "out" / "checkpoint-4"))
    assert rest.seen.losses == found.seen.losses[4:]
    assert rest.trainer.optimizer.skipped_steps == 1


def test_a_model_can_be_evaluated_and_built_anew(config: Any, tmp_path: Path) -> None:
    trainer = engine()(
        model_init=lambda: llama(),
        args=need("transformers").TrainingArguments(**arguments(tmp_path / "out", max_steps=2)),
        train_dataset=examples(),
        eval_dataset=examples()[:4],
        infinity=config,
    )
    before = trainer.evaluate()["eval_loss"]
    first = engine_of(trainer.model)
    losses = [trainer.train().training_loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert trainer.evaluate()["eval_loss"] < before
    second = engine_of(trainer.model)
    assert first is not second
    with pytest.raises(ClosedError):
        first.phases.check()
    infinity.close(trainer.model)


# -- the trainers that derive from it ------------------------------------------------------------


def sft(folder: Path, trainer: Any, seen: Seen, **given: Any) -> Any:
    trl, datasets = need("trl"), need("datasets")
    settings = arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=4)
    settings |= {**EVALUATING, "eval_steps": 4}
    return trainer(trl.SFTTrainer)(
        llama(),
        trl.SFTConfig(**settings, bf16=False),
        train_dataset=datasets.Dataset.from_dict({"text": [words(i, 8) for i in range(40)]}),
        eval_dataset=datasets.Dataset.from_dict({"text": [words(i, 8) for i in range(4)]}),
        processing_class=tokenizer(),
        peft_config=lora(),
        callbacks=[watch(seen)],
        **given,
    )


def dpo(folder: Path, trainer: Any, seen: Seen, **given: Any) -> Any:
    trl = need("trl")
    return trainer(trl.DPOTrainer)(
        llama(),
        args=trl.DPOConfig(**arguments(folder, max_steps=STEPS), bf16=False),
        train_dataset=pairs(),
        processing_class=tokenizer(),
        peft_config=lora(),
        callbacks=[watch(seen)],
        **given,
    )


def seq2seq(folder: Path, trainer: Any, seen: Seen, **given: Any) -> Any:
    transformers = need("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    return trainer(transformers.Seq2SeqTrainer)(
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, decoder_start_token_id=93, pad_token_id=93)
        ),
        transformers.Seq2SeqTrainingArguments(
            **arguments(folder, max_steps=STEPS, eval_strategy="steps", eval_steps=4),
            predict_with_generate=True,
        ),
        compute_metrics=lambda found: {"generated": float(found.predictions.sum())},
        train_dataset=examples(),
        eval_dataset=examples()[:4],
        callbacks=[watch(seen)],
        **given,
    )


def lora() -> Any:
    return need("peft").LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("build", [sft, dpo, seq2seq], ids=lambda build: build.__name__)
def test_trainers_that_derive_from_it(build: Any, config: Any, tmp_path: Path) -> None:
    runs = []
    for name, trainer, given in (
        ("torch", lambda cls: cls, {}),
        ("engine", engine, {"infinity": config, "save_frozen": build is not sft}),
    ):
        seen = Seen()
        run = build(tmp_path / name, trainer, seen, **given)
        run.train()
        seen.keep(run.model.state_dict())
        runs.append(seen)
        if build is sft:
            again = Seen()
            run = build(tmp_path / name, trainer, again, **given)
            run.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-4"))
            assert again.losses == pytest.approx(seen.losses[4:], rel=1e-6)
            adapters = need("safetensors.torch").load_file(
                tmp_path / name / "checkpoint-4" / "adapter_model.safetensors"
            )
            assert len(adapters) == 8
            for index in (tmp_path / name).glob("checkpoint-4/infinity/*/index.json"):
                assert len(json.loads(index.read_text())["index"]["parameters"]) == 8
        if given:
            infinity.close(run.model)
    wanted, found = runs
    assert len(wanted.losses) >= 3
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5, abs=1e-6)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-4)
    torch.testing.assert_close(found.state, wanted.state, rtol=1e-4, atol=1e-5)


# -- settings of DeepSpeed, and what is refused ---------------------------------------------------


def deepspeed(folder: Path) -> dict[str, Any]:
    """Settings of DeepSpeed with an optimizer and a scheduler."""
    return {
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_clipping"), "auto"),
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
            "offload_param": {"device": "cpu"},
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "betas": [0.8, 0.95], "eps": "auto", "weight_decay": 0.3},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 3, "total_num_steps": "auto"},
        },
    }


def test_a_file_of_deepspeed_gives_the_config_the_optimizer_and_the_scheduler(tmp_path: Path) -> None:
    class ByHand(plain()):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                parameters = self.model.parameters()
                self.optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.8, 0.95), weight_decay=0.3)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                self.lr_scheduler = scheduler_from(settings, self.optimizer, steps=num_training_steps)
            return self.lr_scheduler

    (tmp_path / "nvme").mkdir()
    settings = deepspeed(tmp_path / "nvme")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(settings))
    arguments = {"gradient_accumulation_steps": 2, **SAVING}
    with pytest.warns(UserWarning, match="notes about the settings of DeepSpeed") as warned:
        found = Trained(engine(), tmp_path / "file", file, **arguments)
    assert sum("torch.optim.AdamW(parameters, lr=0.003" in str(each.message) for each in warned) == 1
    wanted = Trained(ByHand, tmp_path / "plain", **arguments)
    assert found.seen.losses == pytest.approx(wanted.seen.losses, rel=1e-5)
    assert found.seen.norms == pytest.approx(wanted.seen.norms, rel=1e-4)
    torch.testing.assert_close(found.seen.state, wanted.seen.state, rtol=1e-4, atol=1e-5)
    last = str(tmp_path / "file" / "checkpoint-4")
    resumed = Trained(engine(), tmp_path / "resumed", settings, resume=last, **arguments)
    assert resumed.seen.losses == found.seen.losses[4:]
    changed: list[tuple[dict[str, Any], str]] = [
        ({"bf16": {"enabled": True}}, "bf16=True in the training arguments"),
        ({"train_micro_batch_size_per_gpu": 7}, "per_device_train_batch_size"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "fast"}}}, "optimizer.params"),
        ({"scheduler": {"type": "StepLR", "params": {"size": 2}}}, "scheduler.params"),
    ]
    for changes, said in changed:
        with pytest.raises(ConfigError, match=re.escape(said)):
            run_of(tmp_path / "out", settings | changes).train()


@pytest.mark.parametrize(
    ("settings", "environment", "said"),
    [
        ({"bf16": True}, {}, "bf16=False"),
        ({"fp16_full_eval": True}, {}, "fp16_full_eval=False"),
        ({"auto_find_batch_size": True}, {}, "per_device_train_batch_size"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "ds.json"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP"),
    ],
)
def test_refusals(
    settings: Any, environment: Any, said: str, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = engine()
    args = need("transformers").TrainingArguments(**arguments(tmp_path / "out", **settings))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        trainer(llama(), args, infinity=config.replace(dtype="fp32"))
    if environment:

        class Another(plain()):  # type: ignore[misc]
            pass

        with pytest.raises(ConfigError, match=said):
            engine(Another)


def test_refusals_of_what_is_no_trainer(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="derives from it"):
        engine(torch.nn.Linear)
    trainer = engine()
    assert engine(trainer) is trainer is engine()
    arguments_of = need("transformers").TrainingArguments
    args = arguments_of(**arguments(tmp_path / "out"))
    (tmp_path / "out" / "checkpoint-5" / "infinity").mkdir(parents=True)  # incomplete
    run = trainer(llama(), args, train_dataset=examples(), infinity=config)
    assert run.newest_checkpoint() is None
    with pytest.raises(DirectoryError, match="newest_checkpoint"):
        run.train(resume_from_checkpoint=True)
    for wrong in ({}, {"infinity": {"dtype": "bf16"}}):
        with pytest.raises(ConfigError, match=r"infinity\.Config"):
            trainer(llama(), args, **wrong)
    with pytest.raises(ConfigError, match="device='cpu'"):
        trainer(llama(), args, infinity=config.replace(device="cuda"))
    for other, cure in (("fsdp", r"ds\.json"), ("deepspeed", r"infinity='ds\.json'")):
        args = arguments_of(**arguments(tmp_path / "out"))
        setattr(args, other, "ds.json")  # the constructor would ask for that engine's package
        with pytest.raises(ConfigError, match=cure):
            trainer(llama(), args, infinity=config)


def test_a_trainer_with_other_methods_is_refused() -> None:
    from infinity.integrations.transformers import check_hooks

    check_hooks(plain())

    class Other(plain()):  # type: ignore[misc]
        _load_best_model = None

        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
            pass

    Other._load_best_model = None
    with pytest.raises(ConfigError) as caught:
        check_hooks(Other)
    assert "_save_checkpoint(model, trial, metrics)" in str(caught.value.found)
    assert "no _load_best_model" in str(caught.value.found)


def test_an_older_transformers_does_the_same() -> None:
    """The oldest version that this one's tests have run with, in a process of its own."""
    older = Path(sys.prefix, "older")
    if not older.is_dir():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs an older transformers: make test-all")
    script = (
        "import sys, transformers, pytest\n"
        f"assert transformers.__version__ != {need('transformers').__version__!r}\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    chosen = "(does_what_trainer_does and best) or removes_nothing or overflows or other_methods"
    path = os.pathsep.join([str(older), str(Path(__file__).parents[1])])
    command = ["-c", script, "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    done = python(*command, env={"PYTHONPATH": path}, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_damaged_checkpoint_names_an_older_one(config: Any, tmp_path: Path) -> None:
    trainer = functools.partial(run_of, tmp_path, config, **SAVING)
    run = trainer(max_steps=4)
    run.train()
    infinity.close(run.model)
    older, newest = str(tmp_path / "checkpoint-2"), str(tmp_path / "checkpoint-4")
    [index] = Path(newest, "infinity").glob("step-*/index.json")
    whole = index.read_bytes()
    index.write_bytes(b"")
    run = trainer(max_steps=6)
    for call in (
        run.newest_checkpoint,
        lambda: run.train(resume_from_checkpoint=True),
        lambda: run.train(resume_from_checkpoint=newest),
    ):
        with pytest.raises(CorruptionError) as caught:
            call()
        assert caught.value.cure == (
            f"copy {newest} again from its source; or train(resume_from_checkpoint={older!r})"
        )
    [first] = Path(older, "infinity").glob("step-*/index.json")
    begun = first.read_bytes()
    first.write_bytes(b"")
    with pytest.raises(CorruptionError, match=r"train\(resume_from_checkpoint=None\): there is no older one"):
        run.newest_checkpoint()
    first.write_bytes(begun)
    assert run.train(resume_from_checkpoint=older).global_step == 6  # the cure
    infinity.close(run.model)
    index.write_bytes(whole)
    run = trainer(max_steps=6)
    assert run.train(resume_from_checkpoint=newest).global_step == 6  # the other one
    infinity.close(run.model)
