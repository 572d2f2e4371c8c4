"""Loops that users write: compiled blocks, evaluation, exceptions, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.api.engine import engine_of

from .models import huggingface
from .small_net import Wrapped, build, same, tokens, train


def test_blocks_compile(config: infinity.Config) -> None:
    model, optimizer = build()
    reference, torch_optimizer = build()
    model, wrapped_optimizer = infinity.wrap(model, optimizer, config)
    for i, block in enumerate(model.blocks):
        model.blocks[i].forward = torch.compile(block.forward, backend="aot_eager")
    assert train(model, wrapped_optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)
    infinity.close(wrapped_optimizer)


def test_a_hugging_face_model_loads_trains_and_generates(config: infinity.Config, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    torch.manual_seed(0)
    huggingface("llama", tied=True).save_pretrained(folder)
    batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    results = []
    for offloaded in (False, True):
        if offloaded:
            with infinity.init(config):
                model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if offloaded:
            model, optimizer = infinity.wrap(model, optimizer, config)
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        text = model.generate(batch["input_ids"], max_new_tokens=6, do_sample=False, pad_token_id=0)
        results.append((losses, text.tolist()))
    infinity.close(optimizer)
    assert results[0][1] == results[1][1]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)


def test_an_exception_in_the_loop_leaves_a_usable_model(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        model(tokens())
    handle.remove()
    loss = model(tokens())
    loss.register_hook(lambda _: (_ for _ in ()).throw(KeyError("mine too")))
    with pytest.raises(KeyError, match="mine too"):
        loss.backward()
    assert train(model, optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)


def test_an_empty_batch_and_a_step_without_gradients(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    optimizer.step()
    optimizer.zero_grad()
    before = model.state_dict()
    optimizer.step()
    assert same(model.state_dict(), before)


def test_eval_generation_and_inference_mode(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for m, o in ((model, optimizer), (reference, torch_optimizer)):
        train(m, o, 2)
        m.eval()
    with torch.no_grad():
        assert model(tokens(7)).item() == pytest.approx(reference(tokens(7)).item(), rel=1e-5)
    with torch.inference_mode():
        assert model(tokens(7)).item() == pytest.approx(reference(tokens(7)).item(), rel=1e-5)
    model.train()
    reference.train()
    assert train(model, optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)


def test_what_a_forward_under_inference_mode_loads_may_be_filled_by_another_thread(
    wrapped: Wrapped,
) -> None:
    """torch forbids that for tensors that are made under inference_mode. A host device does not ask torch."""
    model, optimizer = wrapped
    device = engine_of(model).device
    h2d, targets = device.h2d, []

    def noting(target: torch.Tensor, source: torch.Tensor, *after: Any, **options: Any) -> Any:
        target.copy_(target.clone())  # as a device of its own does, on the thread that loads
        targets.append(target)
        return h2d(target, source, *after, **options)

    device.h2d = noting
    model.eval()
    with torch.inference_mode():
        model(tokens(7))
    model.train()
    train(model, optimizer, 2)
    assert targets
    assert not any(target.is_inference() for target in targets)


def test_metrics_are_figures(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    train(model, optimizer, 2)
    values = infinity.metrics(optimizer)
    assert values["steps"] == 2
    assert values["grad_norm"] > 0
    assert values["nvme/written(GiB)"] > 0
    assert all(isinstance(v, str if name == "bound" else float) for name, v in values.items())
