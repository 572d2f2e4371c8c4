"""Trains a language model on the lines of a text file in a loop with accelerate, on one rank or several.
Started again, it goes on after the last whole epoch.

accelerate launch examples/accelerate_loop.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY
"""

import argparse
import os

import accelerate
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--epochs", type=int, default=1)
given = parser.parse_args()

on_cpu = not torch.cuda.is_available()  # accelerate knows of several ranks on CPUs only if it is told
accelerator = accelerate.Accelerator(cpu=on_cpu, gradient_accumulation_steps=2, mixed_precision="no")
tokenizer = AutoTokenizer.from_pretrained(given.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with open(given.text, encoding="utf-8") as file:
    lines = [tokenizer(line, truncation=True, max_length=512) for line in file if line.strip()]
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = torch.utils.data.DataLoader(lines, batch_size=2, shuffle=True, collate_fn=collate)

config = infinity.Config(nvme=given.nvme, parameters="nvme", optimizer_state="nvme", dtype="bf16")
with infinity.init(config):  # the model is built on the drive
    model = AutoModelForCausalLM.from_pretrained(given.model)
adam = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer = infinity.wrap(model, adam, config)  # before `prepare`
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with infinity.Run(optimizer, f"{given.output}/checkpoints", save_every=1, keep_last=2) as run:
    for epoch in run.steps(given.epochs):
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(**tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
target = f"{given.output}/model-{given.epochs}"
if not os.path.exists(f"{target}/config.json"):
    infinity.export(model, target, tokenizer=tokenizer)
infinity.close(model)
