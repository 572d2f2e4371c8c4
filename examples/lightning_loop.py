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
from infinity.integrations.lightning import InfinityStrategy, newest_checkpoint

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--steps", type=int, default=100)
given = parser.parse_args()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):  # on the drive
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(given.model)

    def training_step(self, tokens, index):
        return self.model(**tokens, labels=tokens["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


module = Module()
tokenizer = AutoTokenizer.from_pretrained(given.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with open(given.text, encoding="utf-8") as file:
    lines = [line.strip() for line in file if line.strip()]
loader = torch.utils.data.DataLoader(
    lines, batch_size=2, collate_fn=lambda texts: dict(tokenizer(texts, return_tensors="pt", padding=True))
)
config = infinity.Config(nvme=given.nvme, parameters="nvme", optimizer_state="nvme")
trainer = lightning.Trainer(
    strategy=InfinityStrategy(config, save_minutes=30),
    default_root_dir=given.output,
    precision="bf16-mixed",
    max_steps=given.steps,
    gradient_clip_val=1.0,
    callbacks=[
        lightning.pytorch.callbacks.ModelCheckpoint(given.output, every_n_train_steps=50, save_last=True),
    ],
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # as torchrun says
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(module, loader, ckpt_path=newest_checkpoint(given.output))
trainer.save_checkpoint(os.path.join(given.output, "end.ckpt"))
target = os.path.join(given.output, f"model-{given.steps}")
if not os.path.exists(os.path.join(target, "config.json")):
    infinity.export(module.model, target, tokenizer=tokenizer)
infinity.close(module)
