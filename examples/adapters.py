"""Trains two LoRA adapters over one frozen base, each on half of a text file, and unfreezes layer by
layer. Started again, it goes on where it stopped.

python examples/adapters.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY

What is trained at any time must require a gradient at `wrap`. Afterwards it may be frozen and unfrozen.
"""

import argparse
import os

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the frozen base")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the adapters")
parser.add_argument("--steps", type=int, default=100, help="for each adapter")
given = parser.parse_args()

config = infinity.Config(nvme=given.nvme, parameters="nvme", optimizer_state="host")
with infinity.init(config):  # the model is built on the drive
    base = AutoModelForCausalLM.from_pretrained(given.model)
lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
names = ("first", "second")
model = peft.get_peft_model(base, lora, adapter_name=names[0])
model.add_adapter(names[1], lora)

of_adapter = {name: [p for n, p in model.named_parameters() if f".{name}." in n] for name in names}
trained = [param.requires_grad_() for params in of_adapter.values() for param in params]
model, optimizer = infinity.wrap(model, torch.optim.AdamW(trained, lr=1e-3), config)

tokenizer = AutoTokenizer.from_pretrained(given.model)
with open(given.text, encoding="utf-8") as file:
    lines = [line.strip() for line in file if line.strip()]
halves = dict(zip(names, (lines[::2], lines[1::2]), strict=True))
layers = model.config.num_hidden_layers

with infinity.Run(optimizer, f"{given.output}/checkpoints", save_every=20, keep_last=2) as run:
    for made in run.steps(len(names) * given.steps):
        name, step = names[made // given.steps], made % given.steps
        model.set_adapter(name)  # freezes the other one
        lowest = layers - 1 - min(layers - 1, step * layers // given.steps)  # the last layer comes first
        for param_name, param in model.named_parameters():
            if f".{name}." in param_name:
                layer = int(param_name.partition(".layers.")[2].partition(".")[0])
                param.requires_grad_(layer >= lowest)
        tokens = tokenizer(halves[name][step % len(halves[name])], return_tensors="pt").to(model.device)
        loss = model(**tokens, labels=tokens["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{name} {step}: loss {loss.item():.4f}, layers from {lowest} on")

target = f"{given.output}/adapters-{given.steps}"
if not os.path.exists(f"{target}/{names[-1]}/adapter_config.json"):
    infinity.export(model, target)  # first/ and second/
infinity.close(model)
