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
    "unused-input": 4,
    "load": 6,
    "grad-stash": 5,
    "fp16-clip": 3,
    "autocast": 1,
    "fresh": 6,
    "shared-storage": 1,
    "failure": 4,
    "interrupt": 6,
    "zeros": 3,
    "freeze": 2,
    "plain": 13,
}

ODD = (
    "dict",
    "slotted",
    "deque",
    "frozenset",
    "iterator",
    "values",
    "closure",
    "dataclass",
    "named",
    "nested",
)
EVEN = ("tensor", "tensor", "tensor", "tuple", "list")
KINDS = (
    *("mlp", "mlp", "mlp", "lora", "frozen", "inplace", "embedding", "branch", "norm", "batchnorm"),
    *("weight-norm", "nested", "custom", "functional", "user-hooks", "gru", "side"),
)
TIERS = ("host", "host", "nvme", "nvme", "device")
HOLDS = (
    *("detach-cpu", "detach-cpu", "data", "numpy", "view", "storage", "state-dict", "state-dict-inside"),
    *("in-forward", "clone", "flat", "graph", "all", "all", "model-state-dict"),
)
EDITS = (
    *("add", "mul", "element", "copy", "data-copy", "data-set", "data-add", "detach-add", "numpy", "vector"),
    *("init", "vector-all", "merge"),
)


def generate(seed: int) -> Json:
    """Return the case of `seed`."""
    random = Random(seed)
    theme = random.choices(list(THEMES), list(THEMES.values()))[0]
    config = _config(random, theme)
    tree = _tree(random, theme, config)
    program = _program(random, theme, config, tree)
    if Random(f"behind {seed}").random() < 0.12:
        config["update"] = "backward"
    rules = Random(f"rules {seed}")
    if rules.random() < 0.3:
        config["optimizer"] = rules.choice(("SGD", "momentum", "Adagrad", "Lion"))
    config["state_dtype"] = rules.choices(("fp32", "bf16", "8bit"), (6, 2, 1))[0]
    config["split_master"] = rules.random() < 0.4
    patterns = ("*weight*", "*bias*", "*[02468]*", "*")
    some = rules.sample(patterns, rules.choice((1, 2))) if rules.random() < 0.5 else []
    config["state_fp32"] = some if config["state_dtype"] != "fp32" else []
    config["skip_nonfinite"] = Random(f"skip {seed}").random() < 0.2
    return fitted({"seed": seed, "family": theme, "tree": tree, "config": config, "program": program})


def fitted(case: Json) -> Json:
    """Return the case, with the loop that its update mode can have. Behind the backward a step has one
    backward, and nobody clips. What else is refused there ends a case with a typed error."""
    config = case["config"]
    if config["update"] == "backward":
        if config["dtype"] == "fp16":
            config["dtype"] = "bf16"
        config["max_grad_norm"] = None
        for action in case["program"]:
            action.pop("micro", None)
            action.pop("clip", None)
            if action.get("do") == "train" and action.get("aux") in ("after", "only"):
                action["aux"] = "sum"
    if config["dtype"] != "bf16" or config["update"] == "delayed":
        config["split_master"] = False
    if config["update"] == "backward":
        config["skip_nonfinite"] = False
    return case


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
    if theme == "fp16-clip":
        dtype = "fp16"
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
        "max_grad_norm": random.choice((None, None, None, 0.05)) if theme != "fp16-clip" else None,
        "activations": random.choices(("device", "host"), (5, 1))[0],
        "loss_scale": random.choice((1024.0, 65536.0)),
        "loss_scale_window": random.choice((2, 3, 2000)),
        "optimizer": random.choices(("AdamW", "Adam"), (4, 1))[0],
        "groups": random.choice((1, 2)),
        "init": random.random() < 0.15,
        "ending": random.choices(("close", "drop"), (5, 1))[0],
    }
    if theme not in ("plain", "zeros", "autocast", "shared-storage") and random.random() < 0.75:
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
    # other form, and asking for gradients of
    # inputs is refused there; batch statistics are counted again by a recomputation.
    if kind in ("side", "functional"):
        recompute = None
    if theme in ("grad-of-grad",) or kind in ("functional", "batchnorm"):
        recompute = None if recompute is None or "reentrant" in recompute else recompute
    return {"kind": kind, "output": output, "recompute": recompute}


def _tree(random: Random, theme: str, config: Json) -> Json:
    width = random.choice((8, 16, 16, 24, 32, 48))
    blocks = [_block(random, theme) for _ in range(random.choice((3, 4, 5, 6)))]
    banks: list[Json] = []
    tied = random.choice((None, None, None, "head", "blocks"))
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
    if theme == "weight-view":
        hows = ("view", "transposed", "slice", "detached", *["itself"] * (random.random() < 0.15))
        banks = [{"how": random.choice(hows)} for _ in range(random.choice((1, 2, 3)))]
    if theme == "unused-input":
        random.choice(blocks).update(kind="pair", recompute=None)
    if theme == "autocast":
        random.choice(blocks).update(kind="mlp", autocast=True)
        config["dtype"] = "fp32"
    if theme == "shared-storage":
        tied = "storage"
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
        "feeders": any(b["kind"] == "pair" for b in blocks),
        "tied": tied,
        "order": order,
        "direct": random.random() < 0.3,
        "output": random.choice(ODD if random.random() < (0.5 if theme == "odd-output" else 0.05) else EVEN),
    }


# -- the loop -----------------------------------------------------------------------------------


def _act(do: str, family: str = "train", **arguments: Any) -> Json:
    return {"do": do, "family": family, **arguments}


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
    return _act("train", "train", **{**arguments, **more})


def _spice(random: Random) -> Json:
    """One of the things that any loop may do."""
    k = random.randrange(6)
    return random.choice(
        (
            lambda: _act("eval", "eval", k=k, twice=random.random() < 0.3, inference=random.random() < 0.3),
            lambda: _act(
                "hooked", "user-hooks", k=k, how=random.choice(("identity", "clone", "cpu", "disabled"))
            ),
            lambda: _act("closure", "train", k=k),
            lambda: _act("double", "double-backward", k=k),
            lambda: _act(
                "stashed", "stashed-backward", k=k, first=random.randrange(2), between=random.random() < 0.3
            ),
            lambda: _act("abandon", "abandoned-graph", k=k),
            lambda: _act("asked", "partial-backward", k=k, pick=random.randrange(64)),
            lambda: _act("lr", "train", value=random.choice((1e-3, 3e-3, 1e-4))),
            lambda: _act("flush", "train"),
            lambda: _act("thread", "thread", k=k),
            lambda: _act("fetch_inside", "forward-in-gathered", k=k, pick=random.randrange(64)),
            lambda: _act("look", "state-dict"),
        )
    )()


def _program(random: Random, theme: str, config: Json, tree: Json) -> list[Json]:
    def pick() -> int:
        return random.randrange(64)

    def k() -> int:
        return random.randrange(6)

    def themed() -> list[Json]:
        """What makes the case one of its theme."""
        match theme:
            case "side-channel":
                aux = random.choice(("sum", "after", "only", "alone", "late"))
                if aux == "alone":
                    return [_act("side_alone", theme, k=k())]
                if aux == "late":
                    return [_act("side_late", "side-channel-late", k=k())]
                return [{**_train(random, aux=aux, grads=True), "family": theme}]
            case "grad-of-grad":
                if random.random() < 0.5:
                    return [_act("penalty", theme, k=k(), third=random.random() < 0.3)]
                return [_act("hessian", theme, k=k(), pick=pick(), count=random.choice((1, 3, 8)))]
            case "gathered-graph":
                how = random.choice(("square", "matmul", "loss"))
                use = random.choice(("forward", "eval", "train", "none"))
                return [_act("gathered_graph", theme, pick=pick(), k=k(), how=how, use=use)]
            case "alias":
                return [_act("hold", theme, key=random.choice("abc"), pick=pick(), how=random.choice(HOLDS))]
            case "edit":
                how = random.choice(EDITS)
                check, fails = random.random() < 0.5, random.random() < 0.15
                return [_act("edit", theme, pick=pick(), how=how, check=check, fails=fails)]
            case "grad-stash":
                if random.random() < 0.3:
                    return [_act("grad_move", "grad-move", k=k(), pick=pick())]
                how = random.choice(("put-back", "put-back", "some", "none"))
                return [_act("grad_stash", theme, k=k(), how=how)]
            case "fp16-clip":
                return [{**_train(random, clip="torch", grads=True), "family": theme}]
            case "failure":
                back = random.random() < 0.5
                return [
                    _act("fail", theme, k=k(), block=random.randrange(len(tree["blocks"])), backward=back)
                ]
            case "interrupt":
                back = random.random() < 0.4
                return [_act("interrupt", theme, k=k(), at=random.randrange(1, 250), backward=back)]
            case "zeros":
                return [{**_train(random, zero="zeros"), "family": theme}, _act("abandon", theme, k=k())]
            case "freeze":
                return [_act("freeze", theme, pick=pick(), on=random.random() < 0.4)]
        return [{**_train(random), "family": theme}]

    program: list[Json] = []
    for _ in range(random.choice((2, 3, 4))):
        draw = random.random()
        if draw < 0.5:
            program += themed()
        elif draw < 0.8:
            program.append(_train(random))
        else:
            program.append(_spice(random))
    program[random.randrange(len(program)) : 0] = themed()
    match theme:
        case "alias":
            program.append(_act("eval", theme, k=k()))
            if random.random() < 0.6:
                program.append(_train(random))
            for key in "abc":
                program.append(_act("read", theme, key=key, flush=random.random() < 0.5))
            program.append(_train(random))
        case "load":
            at = random.randrange(len(program))
            program.insert(at, _act("save", theme, key="a"))
            program.insert(0, _train(random))
            order = random.choice(("mo", "om", "m", "o"))
            program += [_act("load", theme, key="a", order=order), _train(random)]
        case "fresh":
            change = {**_placement(random, "large"), "ending": "close"}
            order = random.choice(("mo", "om"))
            act = _act("fresh", theme, order=order, config=change, seed=random.randrange(1000))
            program += [_train(random), act, _train(random), _train(random)]
        case "edit" | "grad-stash" | "interrupt" | "failure" | "freeze" | "gathered-graph":
            program.append(_train(random))
    return program
