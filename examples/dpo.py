"""Trains by DPO: the model learns to prefer the lines of a text file to the same words in reverse. Started
again, it goes on where it stopped.

python examples/dpo.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY

The reference is the same model for inference only. Where its files have the dtype, it is read from them.
"""

import argparse
import os
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--beta", type=float, default=0.1)
given = parser.parse_args()

folders = [Path(given.nvme, name) for name in ("policy", "reference")]  # an engine has its own
for folder in folders:
    folder.mkdir(exist_ok=True)
config = infinity.Config(nvme=folders[0], parameters="nvme", optimizer_state="nvme", dtype="bf16")
reference = infinity.inference(given.model, infinity.Config(nvme=folders[1], parameters="nvme", dtype="bf16"))
with infinity.init(config):  # the model is built on the drive
    model = AutoModelForCausalLM.from_pretrained(given.model)
model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-5), config)

tokenizer = AutoTokenizer.from_pretrained(given.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with open(given.text, encoding="utf-8") as file:
    lines = [line.split() for line in file if line.strip()]


def log_likelihood(model, texts):
    """The log-likelihood of each text, summed over its tokens."""
    tokens = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    logits = model(**tokens).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(-1, tokens["input_ids"][:, 1:, None]).squeeze(-1)
    return (chosen * tokens["attention_mask"][:, 1:]).sum(-1)


with infinity.Run(optimizer, f"{given.output}/checkpoints", save_every=20, keep_last=2) as run:
    for step in run.steps(given.steps):
        pair = [lines[(2 * step + i) % len(lines)] for i in range(2)]
        texts = [" ".join(line) for line in pair] + [" ".join(reversed(line)) for line in pair]
        with torch.no_grad():
            expected = log_likelihood(reference, texts)
        good, bad = (log_likelihood(model, texts) - expected).chunk(2)
        loss = -logsigmoid(given.beta * (good - bad)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, margin {(good - bad).mean().item():.3f}")

target = f"{given.output}/model-{given.steps}"
if not os.path.exists(f"{target}/config.json"):
    infinity.export(model, target, tokenizer=tokenizer)
infinity.close(model)
infinity.close(reference)
