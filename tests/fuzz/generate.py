"""A case is a pure function of its seed: a tree, a program and a configuration, all of them JSON."""

from __future__ import annotations

from random import Random
from typing import Any

Json = dict[str, Any]

#: Themes, with weights: each case has one, which is its family; what it needs of the tree and the
#: configuration is seen to. "plain" has none.
THEMES: dict[str, int] = {
    # who holds a weight's memory
    "side-channel": 6,
    "odd-output": 7,
    "grad-of-grad": 6,
    "gathered-graph": 6,
    "alias": 9,
    "weight-view": 5,
    # edits, gradients, state dicts, failures
    "edit": 7,
    "load": 6,
    "grad-stash": 5,
    "fresh": 6,
    "failure": 4,
    "interrupt": 6,
    "zeros": 3,
    "plain": 13,
}

ODD = ("dict", "slotted", "deque", "frozenset", "iterator", "values", "closure", "dataclass", "nested")
EVEN = ("tensor", "tensor", "tensor", "tuple", "list")
KINDS = (
    *("mlp", "mlp", "mlp", "lora", "frozen", "inplace", "embedding", "branch", "norm", "batchnorm"),
    *("nested", "custom", "functional", "user-hooks", "side"),
)
TIERS = ("host", "host", "nvme", "nvme", "device")
HOLDS = (*("detach-cpu", "data", "numpy", "view", "state-dict", "clone", "graph"),)
EDITS = (
    "add",
    "copy",
    "data-copy",
    "data-set",
    "detach-add",
    "numpy",
    "vector",
    "init",
    "vector-all",
    "merge",
)


def generate(seed: int) -> Json:
    """Return the case of `seed`."""
    random = Random(seed)
    theme = random.choices(list(THEMES), list(THEMES.values()))[0]
    config = _config(random, theme)
    tree = _tree(random, theme, config)
    program = _program(random, theme, tree)
    if random.random() < 0.3:
        config["optimizer"] = random.choice(("SGD", "momentum", "Adagrad", "Lion"))
    if random.random() < 0.12:
        # A step has one backward then, and nobody clips. What else is refused there ends a case with a typed
        # error.
        config["update"], config["max_grad_norm"] = "backward", None
        if config["dtype"] == "fp16":
            config["dtype"] = "bf16"
        for action in program:
            action.pop("micro", None)
            action.pop("clip", None)
            if action.get("aux") in ("after", "only"):
                action["aux"] = "sum"
    return {"seed": seed, "family": theme, "tree": tree, "config": config, "program": program}


# -- where things are ---------------------------------------------------------------------------


def _tier(random: Random) -> Any:
    if random.random() < 0.12:
        share = random.choice((0.3, 0.5, 0.7))
        a, b = random.sample(("host", "nvme", "device"), 2)
        return {a: share, b: 1 - share}
    return random.choice(TIERS)


def _config(random: Random, theme: str) -> Json:
    dtype = random.choices(("fp32", "bf16", "fp16"), (6, 2, 1))[0]
    update = random.choices(("overlap", "sync", "delayed"), (5, 3, 2))[0]
    host = random.choices(("large", "least", "tight"), (6, 3, 1))[0]
    if theme == "load":
        dtype = random.choice(("bf16", "bf16", "fp16", "fp32"))
    if theme == "fresh":
        dtype, update = random.choice((("fp16", update), ("fp32", "delayed"), (dtype, update)))
    if theme in ("load", "fresh"):
        host = "large"
    config = {
        "dtype": dtype,
        "update": update,
        "warmup": random.choice((0, 1, 2)),
        **_placement(random, host),
        "max_grad_norm": random.choice((None, None, None, 0.05)),
        "activations": random.choices(("device", "host"), (5, 1))[0],
        "loss_scale": random.choice((1024.0, 65536.0)),
        "loss_scale_window": random.choice((2, 3, 2000)),
        "optimizer": random.choices(("AdamW", "Adam"), (4, 1))[0],
        "groups": random.choice((1, 2)),
        "init": random.random() < 0.15,
        "ending": random.choices(("close", "drop"), (5, 1))[0],
    }
    if theme not in ("plain", "zeros") and random.random() < 0.75:
        if config["parameters"] == "device":
            config["parameters"] = random.choice(("host", "nvme"))
        config["device_memory"] = "least"
    return config


def _placement(random: Random, host: str) -> Json:
    return {
        "parameters": _tier(random),
        "optimizer_state": _tier(random),
        "gradients": _tier(random),
        "device_memory": random.choices(("least", "tight", "large"), (6, 3, 1))[0],
        "host_memory": host,
        "extra": random.choice((0, 4096, 20000, 100000)),
        "prefetch": random.random() < 0.8,
        "read_ahead": random.random() < 0.5,
        "depth": random.choice((1, 2, 3)),
    }


# -- the model ----------------------------------------------------------------------------------


def _block(random: Random, theme: str) -> Json:
    kind = random.choice(KINDS)
    recompute = random.choices(
        (None, "inside", "outside", "inside-reentrant", "outside-reentrant"), (8, 2, 2, 1, 1)
    )[0]
    odd = 0.6 if theme == "odd-output" else 0.06
    output = random.choice(ODD if random.random() < odd else EVEN)
    # torch itself: aux losses of a reentrant checkpointing have no graph, torch.func refuses the hooks of the
    # other form, and asking for gradients of inputs is refused there; batch statistics are counted again by a
    # recomputation.
    if kind in ("side", "functional"):
        recompute = None
    if theme == "grad-of-grad" or kind == "batchnorm":
        recompute = None if recompute is None or "reentrant" in recompute else recompute
    return {"kind": kind, "output": output, "recompute": recompute}


def _tree(random: Random, theme: str, config: Json) -> Json:
    width = random.choice((8, 16, 16, 24, 32, 48))
    blocks = [_block(random, theme) for _ in range(random.choice((3, 4, 5, 6)))]
    if theme in ("interrupt", "failure"):
        for block in blocks:  # what a failed forward has counted is not undone in torch either
            if block["kind"] == "batchnorm":
                block["kind"] = "norm"
    if theme == "side-channel":
        for block in blocks:  # torch does not compare versions under somebody's hooks; the engine does
            if block["kind"] == "user-hooks":
                block["kind"] = "mlp"
        for block in random.sample(blocks, 2):
            block.update(kind="side", recompute=None)
    banks = []
    if theme == "weight-view":
        hows = ("view", "transposed", "slice", "detached", *["itself"] * (random.random() < 0.15))
        banks = [random.choice(hows) for _ in range(random.choice((1, 2, 3)))]
    order = list(range(len(blocks)))
    if random.random() < 0.2:
        order.insert(random.randrange(len(order) + 1), random.choice(order))  # one is used twice
    rows = 3
    if config["activations"] == "host" and random.random() < 0.5:
        rows, width = 400, 48  # inputs that are large enough to be copied
    return {
        "width": width,
        "rows": rows,
        "blocks": blocks,
        "banks": banks,
        "tied": random.choice((None, None, None, "head", "blocks")),
        "order": order,
        "direct": random.random() < 0.3,
        "output": random.choice(ODD if random.random() < (0.5 if theme == "odd-output" else 0.05) else EVEN),
    }


# -- the loop -----------------------------------------------------------------------------------


def _act(do: str, **arguments: Any) -> Json:
    return {"do": do, **arguments}


def _train(random: Random, **more: Any) -> Json:
    arguments: Json = {"k": random.randrange(6)}
    if random.random() < 0.2:
        arguments["micro"] = 2
    if random.random() < 0.15:
        arguments["clip"] = random.choice(("torch", "ours"))
    if random.random() < 0.2:
        arguments["zero"] = random.choice(("zeros", "model"))
    if random.random() < 0.4:
        arguments["grads"] = True
    if random.random() < 0.08:
        arguments["partial"] = random.randrange(64)
    if random.random() < 0.5:
        arguments["aux"] = random.choice(("sum", "sum", "after"))
    return _act("train", **{**arguments, **more})


def _spice(random: Random) -> Json:
    """One of the things that any loop may do."""
    k, pick = random.randrange(6), random.randrange(64)
    often, rarely = random.random() < 0.5, random.random() < 0.3
    return random.choice(
        (
            _act("eval", k=k, twice=rarely, inference=often),
            _act("hooked", k=k, how=random.choice(("identity", "clone", "cpu", "disabled"))),
            _act("closure", k=k),
            _act("double", k=k),
            _act("stashed", k=k, first=int(often), between=rarely),
            _act("abandon", k=k),
            _act("asked", k=k, pick=pick),
            _act("lr", value=random.choice((1e-3, 3e-3, 1e-4))),
            _act("flush"),
            _act("thread", k=k),
            _act("fetch_inside", k=k, pick=pick),
            _act("look"),
        )
    )


def _themed(random: Random, theme: str, tree: Json) -> list[Json]:
    """Return what makes the case one of its theme."""
    pick, k = random.randrange(64), random.randrange(6)
    often, rarely = random.random() < 0.5, random.random() < 0.2
    match theme:
        case "side-channel":
            aux = random.choice(("sum", "after", "only", "alone"))
            return [_act("side_alone", k=k) if aux == "alone" else _train(random, aux=aux, grads=True)]
        case "grad-of-grad":
            if often:
                return [_act("penalty", k=k, third=rarely)]
            return [_act("hessian", k=k, pick=pick, count=random.choice((1, 3, 8)))]
        case "gathered-graph":
            how = random.choice(("square", "matmul", "loss"))
            use = random.choice(("forward", "eval", "train", "none"))
            return [_act("gathered_graph", pick=pick, k=k, how=how, use=use)]
        case "alias":
            return [_act("hold", key=random.choice("abc"), pick=pick, how=random.choice(HOLDS))]
        case "edit":
            return [_act("edit", pick=pick, how=random.choice(EDITS), check=often, fails=rarely)]
        case "grad-stash":
            return [_act("grad_stash", k=k, how=random.choice(("put-back", "put-back", "some", "none")))]
        case "failure":
            return [_act("fail", k=k, block=random.randrange(len(tree["blocks"])), backward=often)]
        case "interrupt":
            return [_act("interrupt", k=k, at=random.randrange(1, 250), backward=often)]
        case "zeros":
            return [_train(random, zero="zeros"), _act("abandon", k=k)]
    return [_train(random)]


def _program(random: Random, theme: str, tree: Json) -> list[Json]:
    program: list[Json] = []
    for _ in range(random.choice((2, 3, 4))):
        draw = random.random()
        if draw < 0.5:
            program += _themed(random, theme, tree)
        elif draw < 0.8:
            program.append(_train(random))
        else:
            program.append(_spice(random))
    program[random.randrange(len(program)) : 0] = _themed(random, theme, tree)
    match theme:
        case "alias":
            program.append(_act("eval", k=random.randrange(6)))
            if random.random() < 0.6:
                program.append(_train(random))
            program += [_act("read", key=key, flush=random.random() < 0.5) for key in "abc"]
            program.append(_train(random))
        case "load":
            program.insert(random.randrange(len(program)), _act("save", key="a"))
            program.insert(0, _train(random))
            program += [_act("load", key="a", order=random.choice(("mo", "om", "m", "o"))), _train(random)]
        case "fresh":
            change = {**_placement(random, "large"), "ending": "close"}
            order = random.choice(("mo", "om"))
            act = _act("fresh", order=order, config=change, seed=random.randrange(1000))
            program += [_train(random), act, _train(random), _train(random)]
        case "edit" | "grad-stash" | "interrupt" | "failure" | "gathered-graph":
            program.append(_train(random))
    return program
