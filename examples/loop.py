"""Trains a language model on a text file in a plain PyTorch loop. Started again, it goes on where it stopped.

python examples/loop.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY
"""

import argparse
import os

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=512, help="tokens in a row")
given = parser.parse_args()

config = infinity.Config(
    nvme=given.nvme,
    parameters="nvme",
    optimizer_state="nvme",
    dtype="bf16",  # to compute in; the master weights are fp32
)
with infinity.init(config):  # the model is built on the drive
    model = AutoModelForCausalLM.from_pretrained(given.model)
adam = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
model, optimizer = infinity.wrap(model, adam, config)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, given.steps)

tokenizer = AutoTokenizer.from_pretrained(given.model)
with open(given.text, encoding="utf-8") as file:
    tokens = torch.tensor(tokenizer(file.read())["input_ids"])
rows = tokens[: len(tokens) // given.length * given.length].view(-1, given.length)


def batch(step):
    """The rows of a step follow from its number: a run that goes on sees the next ones."""
    random = torch.Generator().manual_seed(step)
    return rows[torch.randint(len(rows), (given.batch,), generator=random)].to(model.device)


state = {"scheduler": scheduler, "tokenizer": tokenizer}
with infinity.Run(optimizer, f"{given.output}/checkpoints", state=state, save_every=20, keep_last=2) as run:
    for step in run.steps(given.steps):
        input_ids = batch(step)
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
target = f"{given.output}/model-{given.steps}"
if not os.path.exists(f"{target}/config.json"):
    infinity.export(model, target, tokenizer=tokenizer)
infinity.close(model)
