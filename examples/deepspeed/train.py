"""Trains a small model with the settings in ds_config.json. A second run goes on from the checkpoint."""

from pathlib import Path

import torch
from torch import nn

import infinity
from infinity.integrations.deepspeed import config_from, scheduler_from

SETTINGS = Path(__file__).with_name("ds_config.json")


def batch(index):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(index))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
config, notes = config_from(SETTINGS)
print(*notes, sep="\n")
model.to(torch.bfloat16)  # begins with the masters of DeepSpeed
adam = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
model, optimizer = infinity.wrap(model, adam, config)
scheduler = scheduler_from(SETTINGS, optimizer)
if any(Path("checkpoints").glob("step-*")):
    infinity.load(optimizer, "checkpoints", state={"scheduler": scheduler})

for step in range(optimizer.steps, 20):
    for micro in range(2):
        x = batch(2 * step + micro).to(torch.bfloat16)
        loss = (model(x) - x).float().square().mean()
        (loss / 2).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

infinity.save(optimizer, "checkpoints", state={"scheduler": scheduler})
infinity.close(model)
