"""Trains LoRA adapters of a diffusion UNet on latents, and keeps an average (EMA) of them. Started again, it
goes on where it stopped.

python examples/diffusion.py --model UNET --latents FILE --nvme DIRECTORY --output DIRECTORY

FILE is a safetensors file with `latents` (n, channels, height, width) and `embeddings` (n, tokens, width).
"""

import argparse
import copy

import peft
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file

import infinity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="a directory with a UNet2DConditionModel")
parser.add_argument("--latents", required=True, help="a safetensors file")
parser.add_argument("--nvme", required=True, help="a directory on a fast drive, for the frozen weights")
parser.add_argument("--output", required=True, help="a directory for checkpoints and the adapters")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=2)
given = parser.parse_args()

unet = UNet2DConditionModel.from_pretrained(given.model)
unet.requires_grad_(False)
unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
plain = copy.deepcopy(unet)  # before `wrap`: the average is made of it
average = EMAModel([p for p in plain.parameters() if p.requires_grad], decay=0.99)

config = infinity.Config(nvme=given.nvme, parameters="nvme", optimizer_state="host")
trained = [p for p in unet.parameters() if p.requires_grad]
unet, optimizer = infinity.wrap(unet, torch.optim.AdamW(trained, lr=1e-3), config)
device = unet.device
noising = DDPMScheduler()
data = load_file(given.latents)

with infinity.Run(
    optimizer, f"{given.output}/checkpoints", state={"average": average}, save_every=20, keep_last=2
) as run:
    for step in run.steps(given.steps):
        random = torch.Generator().manual_seed(step)
        chosen = torch.randint(len(data["latents"]), (given.batch,), generator=random)
        latents, embeddings = data["latents"][chosen].to(device), data["embeddings"][chosen].to(device)
        noise = torch.randn(latents.shape, generator=random).to(device)
        times = torch.randint(noising.config.num_train_timesteps, (given.batch,), generator=random).to(device)
        made = unet(noising.add_noise(latents, noise, times), times, embeddings).sample
        loss = torch.nn.functional.mse_loss(made, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        infinity.copy_to(unet, plain)  # the newest values
        average.step([p for p in plain.parameters() if p.requires_grad])
        print(f"step {step}: loss {loss.item():.4f}")

infinity.copy_to(unet, plain)
infinity.close(unet)
plain.save_lora_adapter(f"{given.output}/last")
average.copy_to([p for p in plain.parameters() if p.requires_grad])
plain.save_lora_adapter(f"{given.output}/average")
