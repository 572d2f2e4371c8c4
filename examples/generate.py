"""Writes text with a model of any size, word by word. The parameters stay in the model's own files.

python examples/generate.py --model DIRECTORY --nvme DIRECTORY "Once upon a time"
"""

import argparse
import time

import torch
from transformers import AutoTokenizer, TextStreamer

import infinity

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a directory with a config.json and safetensors files")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive")
parser.add_argument("--parameters", default="nvme", choices=["device", "host", "nvme"], help="where they are")
parser.add_argument("--tokens", type=int, default=64, help="new tokens, at most")
parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token")
parser.add_argument("--seed", type=int, default=0, help="of the tokens that are drawn")
parser.add_argument("prompt")
given = parser.parse_args()

model = infinity.inference(given.model, infinity.Config(nvme=given.nvme, parameters=given.parameters))
tokenizer = AutoTokenizer.from_pretrained(given.model)
ids = tokenizer(given.prompt, return_tensors="pt")["input_ids"]
if ids[0, -1] == tokenizer.eos_token_id:  # a tokenizer such as ByT5's ends each text, and ours goes on
    ids = ids[:, :-1]
chosen = {"do_sample": False}
if given.temperature > 0:
    torch.manual_seed(given.seed)
    chosen = {"do_sample": True, "temperature": given.temperature}
began = time.perf_counter()
made = model.generate(
    ids.to(model.device), max_new_tokens=given.tokens, streamer=TextStreamer(tokenizer), **chosen
)
seconds, bound = time.perf_counter() - began, infinity.metrics(model)["bound"]
print(f"{made.shape[1] - ids.shape[1]} tokens in {seconds:.1f} s; the last one was {bound}")
infinity.close(model)
