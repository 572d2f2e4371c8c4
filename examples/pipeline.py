"""Writes text with a model of any size by transformers' pipeline. The parameters stay in the model's
own files.

python examples/pipeline.py --model DIRECTORY --nvme DIRECTORY "Once upon a time" "In the beginning"
"""

import argparse

from transformers import AutoTokenizer, pipeline

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory with a config.json and safetensors files")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive")
parser.add_argument("--tokens", type=int, default=64, help="new tokens for each prompt")
parser.add_argument("prompts", nargs="+")
given = parser.parse_args()

# Reads are the bound of a large model, and one forward serves all prompts of a batch.
model = infinity.inference(given.model, infinity.Config(nvme=given.nvme, parameters="nvme"))
tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
write = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=len(given.prompts))
for texts in write(given.prompts, max_new_tokens=given.tokens, do_sample=False):
    print(texts[0]["generated_text"])
infinity.close(model)
