"""Trains LoRA adapters on the lines of a text file with TRL's SFTTrainer. The frozen base stays on its tiers.
Started again, it goes on where it stopped.

python examples/sft_lora.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY
"""

import argparse
import os

import datasets
import peft
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity
from infinity.integrations.transformers import offloaded

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and adapters")
parser.add_argument("--steps", type=int, default=100)
given = parser.parse_args()

config = infinity.Config(nvme=given.nvme, parameters="nvme")
with infinity.init(config):  # the model is built on the drive
    model = AutoModelForCausalLM.from_pretrained(given.model)
with open(given.text, encoding="utf-8") as file:
    lines = datasets.Dataset.from_dict({"text": [line.strip() for line in file if line.strip()]})

trainer = offloaded(trl.SFTTrainer)(
    model,
    trl.SFTConfig(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        save_steps=20,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=lines,
    processing_class=AutoTokenizer.from_pretrained(given.model),
    peft_config=peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    infinity=config,
    save_frozen=False,  # the checkpoints hold the adapters; `from_pretrained` brings the base
)
trainer.train(resume_from_checkpoint=trainer.newest_checkpoint())
trainer.save_model(f"{given.output}/adapters")
target = f"{given.output}/merged-{given.steps}"
if not os.path.exists(f"{target}/config.json"):
    infinity.export(trainer.model, target, merge_adapters=True)
infinity.close(trainer.model)
