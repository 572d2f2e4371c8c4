"""Trains a language model on a text file on several ranks. Started again, also with another number of ranks,
it goes on where it stopped.

torchrun --nproc-per-node 2 examples/ranks.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY
"""

import argparse
import os

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
parser.add_argument("--length", type=int, default=512, help="tokens in a row")
given = parser.parse_args()

# Each rank keeps its part of every parameter and of its state.
config = infinity.Config(nvme=given.nvme, parameters="nvme", optimizer_state="nvme", dtype="bf16")
with infinity.init(config):
    model = AutoModelForCausalLM.from_pretrained(given.model)
adam = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
model, optimizer = infinity.wrap(model, adam, config)  # makes the process group
rank, ranks = distributed.get_rank(), distributed.get_world_size()

tokenizer = AutoTokenizer.from_pretrained(given.model)
with open(given.text, encoding="utf-8") as file:
    tokens = torch.tensor(tokenizer(file.read())["input_ids"])
rows = tokens[: len(tokens) // given.length * given.length].view(-1, given.length)


def batch(step):
    """The rows of a step, of which each rank takes its share."""
    random = torch.Generator().manual_seed(step)
    chosen = torch.randint(len(rows), (given.batch,), generator=random)
    return rows[chosen.chunk(ranks)[rank]].to(model.device)


with infinity.Run(optimizer, f"{given.output}/checkpoints", save_every=20, keep_last=2) as run:
    for step in run.steps(given.steps):
        input_ids = batch(step)
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()  # gradients are means over the ranks
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
target = f"{given.output}/model-{given.steps}"
if not os.path.exists(f"{target}/config.json"):
    infinity.export(model, target, tokenizer=tokenizer)
infinity.close(model)
