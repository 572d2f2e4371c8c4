"""The loop of README.md, for the type checker: `mypy --strict` passes what a user copies.

Below the marker it is what README.md says, to the letter (`test_docs.py`).
"""

# ruff: noqa
# fmt: off
from torch import Tensor, nn


class GPT(nn.Module):
    """Stands for the user's model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layer(batch).mean()
        return loss


gpt_config = 8


def batch(step: int) -> Tensor:
    """Stands for the user's data."""
    raise NotImplementedError(step)


# README.md
import infinity, torch

config = infinity.Config(nvme="/mnt/nvme/run1", device_memory="20GiB", host_memory="48GiB",
                         parameters="nvme", optimizer_state="nvme", gradients="nvme",
                         dtype="bf16")
with infinity.init(config):                      # the whole model is never in memory at once
    model = GPT(gpt_config)                      # or AutoModelForCausalLM.from_pretrained(DIR)
adam = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
model, optimizer = infinity.wrap(model, adam, config)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

for step in range(1000):
    loss = model(batch(step))
    loss.backward()                              # accumulates, until zero_grad()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
