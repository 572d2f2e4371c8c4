"""Trains in a plain loop that writes the norm of each gradient, and says where one has an Inf or NaN.
Started again, it goes on where it stopped.

python examples/gradients.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and gradients.jsonl")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--every", type=int, default=10, help="steps between two lines of norms")
parser.add_argument("--spoil", type=int, help="a step whose loss becomes infinite, to see what comes")
given = parser.parse_args()

config = infinity.Config(
    nvme=given.nvme,
    optimizer_state="nvme",
    gradients="nvme",
    dtype="bf16",
    skip_nonfinite=True,  # a step with an Inf or NaN in a gradient changes nothing
)
model = AutoModelForCausalLM.from_pretrained(given.model)
model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-5), config)
tokenizer = AutoTokenizer.from_pretrained(given.model)
lines = [line for line in Path(given.text).read_text(encoding="utf-8").splitlines() if line.strip()]


def norms():
    """The 2-norm of each parameter's gradient, unclipped. One gradient is in memory at a time."""
    found = {}
    for name, param in model.named_parameters():
        gradient = infinity.gradient(param)
        if gradient is not None:
            found[name] = torch.linalg.vector_norm(gradient.double()).item()
    return found


output = Path(given.output)
output.mkdir(parents=True, exist_ok=True)
with (
    open(output / "gradients.jsonl", "a", encoding="utf-8") as log,
    infinity.Run(optimizer, output / "checkpoints", save_every=20, keep_last=2) as run,
):
    for step in run.steps(given.steps):
        tokens = tokenizer(lines[step % len(lines)], return_tensors="pt").to(model.device)
        loss = model(**tokens, labels=tokens["input_ids"]).loss
        if step == given.spoil:
            loss = loss * float("inf")
        loss.backward()
        if step % given.every == 0:
            print(json.dumps({"step": step, "norms": norms()}), file=log)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if optimizer.step_was_skipped:
            bad = [name for name, norm in norms().items() if not norm < float("inf")]
            print(f"step {step} is skipped: {len(bad)} gradients are not finite, such as that of {bad[0]}")
        optimizer.zero_grad()
        norm = infinity.metrics(optimizer)["grad_norm"]
        print(f"step {step}: loss {loss.item():.4f}, norm {norm:.4f}")
infinity.close(model)
