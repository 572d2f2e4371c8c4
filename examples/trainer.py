"""Trains a language model on the lines of a text file with transformers' Trainer. Started again, it goes on
where it stopped. It runs on several ranks as well.

python examples/trainer.py --model MODEL --text FILE --nvme DIRECTORY --output DIRECTORY
torchrun --nproc-per-node 2 examples/trainer.py …
"""

import argparse

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import infinity
from infinity.integrations.transformers import offloaded

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory, or a name on the Hugging Face hub")
parser.add_argument("--text", required=True, help="a text file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--steps", type=int, default=100)
given = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(given.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
with open(given.text, encoding="utf-8") as file:
    lines = [tokenizer(line, truncation=True, max_length=512) for line in file if line.strip()]
trained, held_out = lines[len(lines) // 10 :], lines[: len(lines) // 10]

config = infinity.Config(nvme=given.nvme, parameters="nvme", optimizer_state="nvme")
with infinity.init(config):  # the model is built on the drive
    model = AutoModelForCausalLM.from_pretrained(given.model)

trainer = offloaded(transformers.Trainer)(
    model,
    transformers.TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-5,
        bf16=True,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=trained,
    eval_dataset=held_out,
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
    infinity=config,
)
trainer.train(resume_from_checkpoint=trainer.newest_checkpoint())
trainer.save_model(f"{given.output}/model")
infinity.close(trainer.model)
