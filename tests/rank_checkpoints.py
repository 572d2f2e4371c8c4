"""What each rank runs in test_rank_checkpoints.py: a run that goes on from a checkpoint, and saves.

The first rank's loss counts, times the number of ranks, which changes no bits where that is a power of two:
so 1, 2 and 4 ranks make the same steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.core.errors import InfinityError

from .adapters import Net
from .whole import ALL_OPTIMIZERS

STEPS = 10
#: A directory of each process.
HERE = "/proc/self/cwd/saved"


def made(config: dict[str, Any], frozen: bool = False) -> tuple[Net, Any]:
    """A model, with a frozen base or not, and its optimizer, wrapped."""
    torch.manual_seed(7)
    model = Net()
    if frozen:
        model.first.requires_grad_(False)
        model.layers.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = ALL_OPTIMIZERS[config.get("optimizer", "adamw")](params)
    settings = {name: value for name, value in config.items() if name != "optimizer"}
    return infinity.wrap(model, optimizer, infinity.Config(**settings))


def step(model: Net, adam: Any, rank: int = 0, world: int = 1) -> float:
    """One step; return the loss."""
    random = torch.Generator().manual_seed(adam.steps)
    loss = model(torch.randn(8, 37, generator=random)).square().mean()
    (loss * (0 if rank else world)).backward()
    adam.step()
    adam.zero_grad()
    return loss.item()


def trained(
    config: dict[str, Any],
    rank: int = 0,
    world: int = 1,
    *,
    load: str = "",
    before: int = 0,
    save: str = "",
    frozen: bool = False,
) -> dict[str, Any]:
    """Go on from what is at `load` for `before` steps, save, take `STEPS` more; return what comes of them."""
    model, adam = made(config, frozen)
    if load:
        infinity.load(adam, load)
    for _ in range(before):
        step(model, adam, rank, world)
    if save:
        infinity.save(adam, save, frozen=not frozen)
    losses = [step(model, adam, rank, world) for _ in range(STEPS)]
    found = {"losses": losses, "after": digest(model, adam), "steps": adam.steps}
    infinity.close(adam)
    return found


def digest(model: torch.nn.Module, adam: Any) -> str:
    """Of parameters, masters, moments and steps."""
    values = list(model.state_dict().values())
    for _, state in sorted(adam.state_dict()["state"].items()):
        values += [value for _, value in sorted(state.items())]
    flat = (v.detach().contiguous().view(-1).view(torch.uint8).numpy() for v in values)
    return hashlib.sha256(b"".join(v.tobytes() for v in flat)).hexdigest()


def contents(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint has that does not depend on who saved it: bytes of files, and all checksums."""
    outer = json.loads((checkpoint / "index.json").read_text())["index"]
    found: dict[str, Any] = {"crcs": {k: v for k, v in outer["crcs"].items() if k != "values"}}
    for stem, name in outer["files"].items():
        if stem != "values":
            found[stem] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    return found | {key: outer[key] for key in ("parameters", "groups", "counts", "state")}


def main() -> None:
    """Train once for each of the settings that are given; print what was found."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = [trained(config, rank, world, **more) for config, more in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(found))


def refused(call: Callable[[], object]) -> str:
    """What a call raises: the class, and the first line."""
    try:
        call()
    except InfinityError as error:
        return f"{type(error).__name__}: {error.what}"
    return "nothing"


def damage(path: Path) -> None:
    """Change a byte in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def faults() -> None:
    """Save and load where one rank alone meets an error; print what each raises."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    root = Path(sys.argv[2])
    model, adam = made(json.loads(sys.argv[1]))
    infinity.load(adam, root)  # of one rank
    seeds = [torch.initial_seed()]
    torch.manual_seed(rank)
    torch.rand(3)
    good = infinity.save(adam, root, state={"position": [5, rank]})
    drawn = torch.rand(3).tolist()
    step(model, adam)
    infinity.flush(adam)  # its writes are not to meet the limit
    said = []

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    said.append(refused(lambda: infinity.save(adam, root)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    os.makedirs(node := root.parent / f"node{rank}")
    os.chdir(node)
    said.append(refused(lambda: infinity.save(adam, HERE)))
    assert not [p for p in node.rglob("*") if p.is_file()]
    said.append(refused(lambda: infinity.save(adam, root, state={"x": print} if rank else {})))
    said.append(refused(lambda: infinity.load(adam, root, state={"position": 0, "lacking"[: 8 * rank]: 0})))
    assert sorted(p.name for p in root.iterdir()) == [Path(good).name]
    assert not [p.name for p in root.rglob("*incomplete*")]
    step(model, adam)  # nothing of that has changed the run, and it goes on

    bad = Path(infinity.save(adam, root))
    known = digest(model, adam)
    if rank == 0:
        damage(next(bad.glob("exp_avg_sq-*")))
    said.append(refused(lambda: infinity.load(adam, bad)))
    if rank == 0:
        shutil.copytree(good, node / "saved", dirs_exist_ok=True)
    said.append(refused(lambda: infinity.load(adam, HERE)))
    said.append(refused(lambda: step(model, adam)))
    state = {"position": None}
    infinity.load(adam, good, state=state)
    assert state["position"] == [5, 0]
    assert torch.rand(3).tolist() == drawn
    step(model, adam)
    step(model, adam)
    assert digest(model, adam) == known
    infinity.close(adam)
    sys.stdout.write(json.dumps({"said": said, "seed": seeds[0], "drawn": drawn}))


def ends() -> None:
    """Save where one rank ends, and how."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    model, adam = made(json.loads(sys.argv[1]))
    infinity.load(adam, sys.argv[2])
    step(model, adam)
    which, how = int(sys.argv[3]), getattr(signal, sys.argv[4])
    count = 0

    def end(done: int, total: int) -> None:
        nonlocal count
        count += 1
        if rank == which and count == 3:
            os.kill(os.getpid(), how)
            time.sleep(0.5)

    infinity.save(adam, sys.argv[2], progress=end)


def exports() -> None:
    """Write a model of several ranks; one rank alone meets an error."""
    torch.set_num_threads(1)
    rank, (config, out, load) = int(os.environ["RANK"]), json.loads(sys.argv[1])
    model, adam = made(config)
    infinity.load(adam, load)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    said = refused(lambda: infinity.export(model, out, "fp32"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said.startswith("TransferError"), said
    assert rank or not os.path.exists(out)  # the first rank removes what it has made
    for name, dtype, limit in (("whole", "fp32", "1GB"), ("cut", None, 100_000)):
        infinity.export(model, os.path.join(out, name), dtype, limit)
    infinity.export(model.layers[1], os.path.join(out, "part"))
    infinity.close(adam)
