"""Trains a Llama on text, with its parameters and their state on a drive. Started again, it goes on where it
stopped. It runs on several ranks as well.

python examples/train_lm.py --nvme DIRECTORY --output DIRECTORY --preset 125m --text FILE
torchrun --nproc-per-node 2 examples/train_lm.py …
"""

import argparse
import random
import sysconfig
import time
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import distributed
from transformers import AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, TextStreamer
from transformers import get_cosine_schedule_with_warmup as cosine

import infinity

PRESETS = {"1m": (4, 128, 4), "10m": (6, 384, 6), "30m": (10, 512, 8), "125m": (18, 768, 12)}
PRESETS |= {"350m": (28, 1024, 16), "1.5b": (48, 1600, 25), "6.7b": (33, 4096, 32)}  # blocks, width, heads

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for parameters and state")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the model")
parser.add_argument("--preset", choices=PRESETS, default="30m", help="how large the model is")
parser.add_argument("--text", help="a file, or a directory of files; default: Python's standard library")
parser.add_argument("--tokenizer", help="a directory with a tokenizer; default: tokens are bytes")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=8, help="sequences in a step, of all ranks together")
parser.add_argument("--sequence", type=int, default=256, help="tokens in a sequence")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--save-minutes", type=float, default=30, help="minutes between checkpoints")
parser.add_argument("--sample", type=int, default=100, help="tokens to write at the end")
parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of infinity.Config")
given = parser.parse_args()


def read(path):
    """The bytes of a file, of all files below a directory, or of Python's standard library."""
    root = Path(path or sysconfig.get_path("stdlib"))
    found = [root] if root.is_file() else sorted(root.rglob("*" if path else "*.py"))
    files = [file for file in found if file.is_file() and "-packages" not in str(file.relative_to(root))]
    random.Random(0).shuffle(files)  # so that the end, which is held out, is of all kinds
    return b"\n".join(file.read_bytes() for file in files)


def memory():
    """The bytes of memory that this process has, without those of files that it maps."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def on_drive():
    """The bytes of the files that this process has open on the drive."""
    files = (file for file in Path("/proc/self/fd").iterdir() if file.exists())
    ours = (file.stat() for file in files if str(file.readlink()).startswith(str(Path(given.nvme).resolve())))
    return 512 * sum({file.st_ino: file.st_blocks for file in ours}.values())


if given.tokenizer is None:
    tokenizer = ByT5Tokenizer(extra_ids=0)  # whose token of a byte is the byte, plus 3
    tokens = torch.frombuffer(bytearray(read(given.text)), dtype=torch.uint8).short() + 3
else:
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    tokens = torch.tensor(tokenizer(read(given.text).decode(errors="replace"))["input_ids"])
text, held_out = tokens.tensor_split([len(tokens) * 19 // 20])

settings = {"parameters": "nvme", "optimizer_state": "nvme", "dtype": "bf16", "max_grad_norm": 1.0}
settings |= {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in given.set)}
config = infinity.Config(nvme=given.nvme, **settings)
blocks, width, heads = PRESETS[given.preset]
shape = {"num_hidden_layers": blocks, "hidden_size": width, "num_attention_heads": heads}
shape |= {"intermediate_size": -(-8 * width // 3 // 64) * 64, "vocab_size": len(tokenizer)}
memory_before = memory()
torch.manual_seed(0)
with infinity.init(config):  # the model is built on the drive
    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=max(1024, given.sequence), **shape))
parameters = model.num_parameters()
recompute = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
recompute()  # of blocks, in the backward
matrices = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
adam = torch.optim.AdamW([matrices, vectors], lr=given.lr, betas=(0.9, 0.95))
model, optimizer = infinity.wrap(model, adam, config)
scheduler = cosine(optimizer, min(100, given.steps // 10), given.steps)
most = memory()
rank, ranks = 0, 1
if distributed.is_initialized():  # by torchrun; `wrap` joins its ranks
    rank, ranks = distributed.get_rank(), distributed.get_world_size()


def loss_of(part, number):
    """The loss of this rank's share of a batch; its number says what is drawn, so that a run resumes."""
    drawn = torch.Generator().manual_seed(number)
    begins = torch.randint(len(part) - given.sequence, (given.batch,), generator=drawn).chunk(ranks)[rank]
    ids = part[begins[:, None] + torch.arange(given.sequence)].long().to(model.device)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


console = Console(quiet=rank > 0, highlight=False, soft_wrap=True)
console.print(f"{parameters:,} parameters, {len(tokens):,} tokens of text")
columns = MofNCompleteColumn(), BarColumn(10), TimeRemainingColumn(), TextColumn("{task.description}")
bar = Progress(*columns, console=console, disable=not console.is_terminal or rank > 0)
exported = Path(given.output, f"model-{given.steps}").exists()  # by an earlier run
state, root = {"scheduler": scheduler, "tokenizer": tokenizer}, f"{given.output}/checkpoints"
with infinity.Run(optimizer, root, state=state, save_minutes=given.save_minutes) as run, bar:
    task = bar.add_task("", total=given.steps, completed=run.begin)
    if run.saved:
        console.print(f"goes on from {run.saved}, after {run.begin} steps")
    for step in run.steps(given.steps):
        began = time.perf_counter()
        loss = loss_of(text, step)
        most = max(most, memory())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rate = given.batch * given.sequence / (time.perf_counter() - began)
        bound = infinity.metrics(optimizer)["bound"].split(",")[0]
        said = f"loss {loss.item():.4f}, {rate:,.0f} tokens/s, {bound}"
        bar.update(task, advance=1, description=said)
        if not console.is_terminal and (step % 10 == 0 or step + 1 == given.steps):
            console.print(f"step {step + 1} of {given.steps}: {said}")

model.eval()
with torch.no_grad():
    losses = [loss_of(held_out, number).item() for number in range(8)]
console.print(f"loss on text that was not trained on: {sum(losses) / 8:.4f}")
figures = infinity.metrics(optimizer)
device, host, drive = (1024 * figures[f"memory/{tier}(GiB)"] for tier in ("device", "host", "nvme"))
if model.device.type == "cuda":
    gpu = torch.cuda.max_memory_allocated() / 2**20
    console.print(f"GPU:    {device:.0f} MiB planned, {gpu:.0f} MiB measured, with activations")
else:
    host += device  # which is memory of the host, too
memory_taken = (most - memory_before) / 2**20
console.print(f"memory: {host:.0f} MiB planned, {memory_taken:.0f} MiB measured, with what torch keeps")
console.print(f"drive:  {drive:.0f} MiB planned, {on_drive() / 2**20:.0f} MiB measured")
if not exported:
    infinity.export(model, f"{given.output}/model-{given.steps}", tokenizer=tokenizer)
torch.manual_seed(0)  # all ranks draw the same tokens
ids = torch.tensor([tokenizer("def ", add_special_tokens=False)["input_ids"]]).to(model.device)
streamer = TextStreamer(tokenizer) if rank == 0 else None
model.generate(ids, max_new_tokens=given.sample, do_sample=True, top_k=50, streamer=streamer)
infinity.close(model)
