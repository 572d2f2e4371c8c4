"""torch's operators on memory of the lagging device: metadata now, values when the stream gets there."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .world import Finding, Span, Stream, World, where

aten = torch.ops.aten
#: Operators that change what their schema does not say: positions of the arguments.
_UNSAID = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
}


def kernels_of_the_cpu() -> list[str]:
    """Return the operators that have a kernel for the CPU and another one for all devices. The CPU's is
    taken: its bits are compared."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and has(name, "CPU")
        and has(name, "CompositeExplicitAutograd")
        and not has(name, "PrivateUse1")
    ]


def is_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "lagging"


def span_of(tensor: torch.Tensor) -> Span:
    """Return the addresses that a tensor reaches over."""
    if not tensor.numel():
        return 0, 0
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    if not begin:
        raise Finding(f"an operator is given a tensor whose memory is gone  {where()}")
    return begin, begin + extent * tensor.element_size()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as the CPU sees it, owned by nobody."""
    # A view of one that was made in another mode is none of autograd's business here.
    with torch.inference_mode(False), torch._C._AutoDispatchBelowAutograd():
        if not tensor.numel():
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        return torch.ops.lagging.raw(tensor)  # type: ignore[no-any-return]


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator changes, as its schema says."""
    found = []
    for at, argument in enumerate(op._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if value is not None and argument.alias_info is not None and argument.alias_info.is_write:
            found += [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]
    return found


def run(world: World, op: Any, args: Any, kwargs: Any) -> Any:
    """Do what the dispatcher asks of the device: put `op` on the current stream."""
    if op is aten._copy_from.default:
        return copy(world, *args, **kwargs)
    if op is aten._local_scalar_dense.default:
        return item(world, args[0])
    if op is aten.record_stream.default:
        raise Finding("record_stream by the dispatcher")
    kinds = [argument.type for argument in op._schema.arguments]
    args = tuple(  # a number that torch gives for a tensor
        torch.tensor(v) if isinstance(kind, torch.TensorType) and isinstance(v, (int, float)) else v
        for v, kind in zip(args, kinds, strict=False)
    )
    flat, spec = tree_flatten((args, kwargs))
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    mine = [t for t in tensors if is_device(t)]
    others = [t for t in tensors if not is_device(t) and t.dim()]
    if others and op is not aten.index.Tensor:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {op} got {mine[0].device if mine else None} "
            f"and {others[0].device}"
        )
    index = next((t.device.index for t in mine), None)
    if index is None:
        index = next((d.index for d in flat if isinstance(d, torch.device)), 0) or 0
    stream = world.current(index)
    what = f"{str(op).removeprefix('aten.')}  {where()}"
    written = _written(op, args, kwargs)
    if "out" in op._overloadname and any(not t.numel() for t in written):
        shapes = tree_flatten(_shapes(op, args, kwargs))[0]
        for target, shape in zip(written, shapes, strict=True):
            if target.size() != shape.size():
                target.resize_(shape.size())
        return run(world, op, args, kwargs) if written[0].numel() else _returned(op, args, kwargs, written)
    unsaid = [args[at] for at in _UNSAID.get(op, ()) if args[at] is not None]
    is_written = {id(t) for t in (*written, *unsaid)}
    reads = [span_of(t) for t in mine if id(t) not in is_written]
    writes = [span_of(t) for t in (*written, *unsaid)]
    call_args, call_kwargs = tree_unflatten([_for_call(t) for t in flat], spec)
    returns = op._schema.returns
    if any(not isinstance(r.type, (torch.TensorType, torch.ListType, torch.OptionalType)) for r in returns):
        _now(world, stream, reads, writes, what)
        with torch.no_grad():
            return op(*call_args, **call_kwargs)
    draws = torch.Tag.nondeterministic_seeded in op.tags
    dynamic = torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags
    if written and not draws:
        world.launch()
        world.put(stream, lambda: _call(op, call_args, call_kwargs, ()), reads, writes, what)
        return _returned(op, args, kwargs, written)
    if draws or dynamic:
        _now(world, stream, reads, writes, what)
        with torch.no_grad():
            got = op(*call_args, **call_kwargs)
        if written:
            return _returned(op, args, kwargs, written)
        return tree_map(lambda t: _upload(world, stream, t, index) if isinstance(t, torch.Tensor) else t, got)
    shapes = _shapes(op, args, kwargs)
    outs, out_spec = tree_flatten(shapes)
    made = [
        torch.empty_strided(m.size(), m.stride(), dtype=m.dtype, device=f"lagging:{index}")
        if isinstance(m, torch.Tensor)
        else m
        for m in outs
    ]
    targets = [raw(m) if isinstance(m, torch.Tensor) else None for m in made]
    writes += [span_of(m) for m in made if isinstance(m, torch.Tensor)]
    world.launch()
    world.put(stream, lambda: _call(op, call_args, call_kwargs, targets), reads, writes, what)
    return tree_unflatten(made, out_spec)


def _for_call(value: Any) -> Any:
    if is_device(value):
        return raw(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.device) and value.type == "lagging":
        return torch.device("cpu")
    return value


def _call(op: Any, args: Any, kwargs: Any, targets: Any) -> None:
    with torch.inference_mode(False), torch.no_grad():
        if op is aten.sqrt.out and args[0].dtype is torch.float32:
            # CUDA's is rounded correctly, and MKL's may be off by one.
            got = kwargs["out"].copy_(args[0].double().sqrt())
        else:
            got = op(*args, **kwargs)
        for target, value in zip(targets, tree_flatten(got)[0] if targets else (), strict=True):
            if target is not None and isinstance(value, torch.Tensor):
                target.copy_(value)


_known: dict[Any, Any] = {}


def _shapes(op: Any, args: Any, kwargs: Any) -> Any:
    """Return what `op` gives on the CPU, as tensors of the meta device: those have no values.

    Fake tensors and not meta tensors work that out: kernels of the CPU and of CUDA return other dtypes now
    and then (the statistics of a layer norm), and it is the CPU's that run here.
    """
    flat, spec = tree_flatten((args, kwargs))
    key = (op, str(spec), *(_signature(v) for v in flat))
    if key in _known:
        return _known[key]
    mode = FakeTensorMode()

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
        return torch.device("cpu") if isinstance(value, torch.device) else value

    with torch.inference_mode(False), torch.no_grad(), mode:
        call_args, call_kwargs = tree_unflatten([of(v) for v in flat], spec)
        found = op(*call_args, **call_kwargs)
    _known[key] = tree_map(
        lambda t: (
            torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
            if isinstance(t, torch.Tensor)
            else t
        ),
        found,
    )
    return _known[key]


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype
    return type(value).__name__, repr(value)


def _returned(op: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
    count = len(op._schema.returns)
    if not count:
        return None
    return written[0] if count == 1 else tuple(written[-count:])


def _now(world: World, stream: Stream, reads: list[Span], writes: list[Span], what: str) -> None:
    """The host waits for the stream, and the operator is done at once."""
    world.put(stream, lambda: None, reads, writes, what)
    world.synchronize(stream)


def _upload(world: World, stream: Stream, value: torch.Tensor, index: int) -> torch.Tensor:
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=f"lagging:{index}")
    target = raw(made)
    world.put(
        stream, lambda: _call(aten.copy_.default, (target, value), {}, ()), [], [span_of(made)], where()
    )
    return made


def item(world: World, tensor: torch.Tensor) -> Any:
    """Return a value: the host waits for the device."""
    stream = world.current(tensor.device.index)
    _now(world, stream, [span_of(tensor)], [], f"item  {where()}")
    return raw(tensor).item()


def copy(
    world: World, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy within the device, to it, or from it."""
    index = (target if is_device(target) else source).device.index
    stream = world.current(index)
    what = f"copy  {where()}"
    if is_device(source) and is_device(target):
        to, of = raw(target), raw(source)
        world.put(
            stream,
            lambda: _call(aten.copy_.default, (to, of), {}, ()),
            [span_of(source)],
            [span_of(target)],
            what,
        )
        return target
    host = source if is_device(target) else target
    pinned = world.is_registered(span_of(host)) if host.numel() else True
    if non_blocking and not pinned and "user" not in where():
        world.find(f"a copy that is not to block has host memory that is not pinned: it blocks  {where()}")
    late = non_blocking and pinned
    world.counts["copies that block" if not late else "copies"] += 1
    if is_device(target):
        of = source.detach() if late else source.detach().clone()
        to = raw(target)
    else:
        of, to = raw(source), target.detach()
    world.put(
        stream,
        lambda: _call(aten.copy_.default, (to, of), {}, ()),
        [span_of(source)] if late or is_device(source) else [],
        [span_of(target)] if late or is_device(target) else [],
        what,
    )
    if not late:
        world.synchronize(stream)
    return target
