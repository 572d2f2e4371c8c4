"""Trains with TRL's GRPOTrainer: texts that begin with a line of a file are better if they are shorter.
Started again, it goes on where it stopped.

python examples/grpo.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY
"""

import argparse

import datasets
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity
from infinity.integrations.transformers import offloaded

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=64, help="tokens of a text, at most")
given = parser.parse_args()


def reward(completions, **rest):
    """One number for each text: here, that shorter ones are better."""
    return [-float(len(text)) for text in completions]


config = infinity.Config(nvme=given.nvme, optimizer_state="nvme")
model = AutoModelForCausalLM.from_pretrained(given.model)
with open(given.text, encoding="utf-8") as file:
    prompts = datasets.Dataset.from_dict({"prompt": [line.strip() for line in file if line.strip()]})

trainer = offloaded(trl.GRPOTrainer)(
    model,
    reward_funcs=reward,
    args=trl.GRPOConfig(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=given.length,
        learning_rate=1e-6,
        save_steps=20,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=prompts,
    processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"),
    infinity=config,
)
trainer.train(resume_from_checkpoint=trainer.newest_checkpoint())
trainer.save_model(f"{given.output}/model")
infinity.close(trainer.model)
