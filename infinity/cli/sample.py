"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def generate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    prompt: torch.Tensor,
    count: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `count` tokens that follow `prompt`; fewer where the logits are no finite numbers any more.

    Args:
        logits: (1, sequence) tokens → (1, sequence, vocab). Called once per token: there is no
            cache of keys and values, since with offloaded parameters the fetch is what counts.
        prompt: 1-d, int64, at least one token.
        context: the most tokens that are looked back to.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(count):
        with torch.no_grad():
            last = logits(tokens[None, -context:])[0, -1].float().cpu() / temperature
        best = torch.topk(last, min(top_k, last.numel()))
        shares = torch.softmax(best.values, -1)
        if not shares.isfinite().all():  # a run that has diverged
            return
        choice = torch.multinomial(shares, 1, generator=generator)
        token = best.indices[choice]
        tokens = torch.cat((tokens, token.to(tokens.device)))
        yield int(token)
