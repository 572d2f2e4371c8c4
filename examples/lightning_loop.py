"""Trains a language model on the lines of a text file with Lightning. Started again, it goes on.

python examples/lightning_loop.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY

SIGTERM and SIGUSR1 save: after the first, the program ends with exit code 75.
"""

import argparse
import os

import lightning
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--steps", type=int, default=100)
given = parser.parse_args()


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, tokens, index):
        return self.model(**tokens, labels=tokens["input_ids"]).loss

    def configure_optimizers(self):
        return self.wrapped


config = infinity.Config(nvme=given.nvme, parameters="nvme", optimizer_state="nvme", dtype="bf16")
with infinity.init(config):  # the model is built on the drive
    module = Module(AutoModelForCausalLM.from_pretrained(given.model))
module, module.wrapped = infinity.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-5), config)

tokenizer = AutoTokenizer.from_pretrained(given.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with open(given.text, encoding="utf-8") as file:
    lines = [line.strip() for line in file if line.strip()]
loader = torch.utils.data.DataLoader(
    lines, batch_size=2, collate_fn=lambda texts: dict(tokenizer(texts, return_tensors="pt", padding=True))
)
checkpoint = os.path.join(given.output, "run.ckpt")
trainer = lightning.Trainer(
    max_steps=given.steps,
    gradient_clip_val=1.0,
    callbacks=[infinity.lightning_callback(checkpoint, save_minutes=30)],
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, loader, ckpt_path=checkpoint if os.path.exists(checkpoint) else None)
trainer.save_checkpoint(checkpoint)
infinity.export(module.model, os.path.join(given.output, f"model-{given.steps}"), tokenizer=tokenizer)
infinity.close(module)
