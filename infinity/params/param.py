"""Parameters that the engine loads and releases.

`ShardedParam` holds the engine's data about one `nn.Parameter`; the parameter itself gets no attributes.

[Note: released parameters] Released storage has no memory (on CUDA its size is 0, on a CPU its pages are
protected) while the shape stays: any operator would crash, and `torch.save` might silently write nothing.
So while a parameter is released its `__class__` is `ReleasedParameter`. Its `__torch_function__` loads the
parameter in a forward or a backward, and raises an error elsewhere (torch's `UninitializedParameter` is the
precedent). Metadata stays readable. `unshard` restores the class. The engine refills storage in place and
without a version bump, so graphs that saved the parameter stay valid. `step()` bumps the versions of the
parameters that it updates, so that a graph from before the step fails as it does in torch.
"""

from __future__ import annotations

import copy
import functools
import os
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.core.errors import ParameterChangedError, ParameterError, ReleasedParameterError
from infinity.core.stack import frames
from infinity.planning.partition import ParamSpec

from .eager import eager
from .instead import cure_of, cure_of_pickling, said, writes_to

_T: Any = torch.Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(_T, name).__get__ for name in names if hasattr(_T, name)}  # versions of torch differ


_METADATA: set[Any] = {
    *_getters("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn"),
    *_getters("ndim", "names", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "_version"),
    *_getters("is_mkldnn", "is_nested", "itemsize", "nbytes", "output_nr", "_backward_hooks", "name"),
    *_getters("is_xla", "is_mps", "is_xpu", "is_sparse_csr", "retains_grad", "_post_accumulate_grad_hooks"),
    _T.size,
    _T.stride,
    _T.numel,
    _T.nelement,
    _T.dim,
    _T.ndimension,
    _T.element_size,
    _T.is_floating_point,
    _T.is_complex,
    _T.is_contiguous,
    _T.storage_offset,
    _T.requires_grad_,
    _T.register_hook,
    _T.register_post_accumulate_grad_hook,
    _T.__hash__,
    _T.__len__,
    _T.get_device,
    _T.is_signed,
    _T.is_inference,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_tensor,
    _T.requires_grad.__set__,
    _T.grad.__set__,
    _T.grad.__delete__,
    _T._backward_hooks.__set__,
    torch._has_compatible_shallow_copy_type,
}
_BACKWARDS: set[Any] = {torch.autograd.grad, torch.autograd.backward, _T.backward}


def traced_error(found: str) -> ParameterError:
    """Return the error for code that records a forward of a wrapped model."""
    return ParameterError(
        "a wrapped model cannot be recorded: the engine loads and releases its parameters, and a recorded "
        "forward cannot do that",
        expected="a plain model",
        found=found,
        cure="record the model that `infinity.unwrap(model)` returns, or a newly built model that has loaded "
        "`model.state_dict()`",
    )


class ReleasedParameter(nn.Parameter):
    """The class of a parameter while its values are not on the device."""

    plain: ClassVar[type] = nn.Parameter  # what it is at other times

    @classmethod
    @eager
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let metadata through; for all else make it present, or raise `ReleasedParameterError`."""
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            return _backward(func, args, kwargs)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None and args and isinstance(args[0], ReleasedParameter):
            answer = special(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        used = [p for p in _walk((args, kwargs)) if isinstance(p, nn.Parameter)]
        released = [p for p in used if isinstance(p, ReleasedParameter)]
        if _use(used, released, func is _T.data_ptr):
            return func(*args, **kwargs)  # all are there, and have their classes
        if any(str(f.f_globals.get("__name__")).startswith("torch.export.") for f in frames()):
            raise traced_error("torch.export")
        target = _walk(writes_to(func, args, kwargs))
        edits = any(isinstance(value, ReleasedParameter) for value in target)
        sharded = sharded_of(released[0])
        raise ReleasedParameterError(
            f"the parameter {name_of(released[0])!r} is released",
            expected="a parameter whose values are on the device",
            found=f"{said(func)} on a released parameter",
            cure=cure_of(
                edits=edits,
                others=not edits and target != [None],
                forked=sharded is not None and sharded.pid != os.getpid(),
            ),
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({name_of(self)!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> Any:
        raise ReleasedParameterError(
            f"the parameter {name_of(self)!r} cannot be copied",
            expected="a parameter that belongs to no engine",
            found="deepcopy of a released parameter",
            cure="copy the model before `wrap`, and later copy its newest values into that copy, "
            "`infinity.copy_to(model, plain)`; or copy its `state_dict()`",
        )

    def __reduce_ex__(self, proto: object) -> Any:
        raise ReleasedParameterError(
            f"the parameter {name_of(self)!r} cannot be serialized while it is released",
            expected="`model.state_dict()`",
            found="an attempt to serialize the module or the parameter itself",
            cure=cure_of_pickling("save `model.state_dict()`"),
        )


class PendingParameter(nn.Parameter):
    """The class of a parameter that is on the device during its update: metadata is available at once, and a
    read of the values waits for the unit."""

    plain: ClassVar[type] = nn.Parameter

    @classmethod
    @eager
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the values, then do what was asked."""
        kwargs = kwargs or {}
        if func is _T.detach and isinstance(args[0], PendingParameter):
            answer = _detach(args[0])
            if answer is not NotImplemented:
                return answer
        if func in _BACKWARDS:
            return _backward(func, args, kwargs)
        if func not in _METADATA:
            pending = [v for v in _walk((args, kwargs)) if isinstance(v, PendingParameter)]
            for value in pending:
                _wait_update(value)
            if not any(isinstance(v, PendingParameter) for v in pending):
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return str(_plainly(self, repr))

    def __deepcopy__(self, memo: Any) -> Any:
        return _plainly(self, lambda param: copy.deepcopy(param, memo))

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plainly(self, lambda param: param.__reduce_ex__(proto))


@functools.cache
def _variant(base: type, cls: type) -> Any:
    """Return the class of a parameter of `cls` while its values are away: it derives from `base`, a class of
    ours, and has the methods of both, and `cls` as `plain`."""
    if cls is nn.Parameter:
        return base
    name = base.__name__.removesuffix("Parameter") + cls.__name__
    names = {"plain": cls, "__module__": base.__module__}
    return types.new_class(name, (base, cls), {}, lambda space: space.update(names))


def why_not(param: nn.Parameter) -> str:
    """Return what keeps a parameter of a user's class from being released; "" if nothing does."""
    cls = type(param)
    try:
        for base in (ReleasedParameter, PendingParameter):
            param.__class__ = _variant(base, cls)
            param.__class__ = cls
    except Exception as error:  # whatever the class does where it is derived from
        return f"{type(error).__name__}: {error}"
    return ""


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a backward that names parameters (``inputs=``) with the nodes that accumulate their gradients
    instead, so that what it runs, recomputation for one, meets parameters as they are."""
    zeros: list[Any] = []

    def edge(value: Any) -> Any:
        if isinstance(value, torch.autograd.graph.GradientEdge):  # a tuple, too
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(edge(v) for v in value)
        if isinstance(value, (ReleasedParameter, PendingParameter)):
            # A frozen one has no node: torch refuses it, as it refuses any tensor without one.
            return torch.autograd.graph.get_gradient_edge(value) if value.requires_grad else torch.empty(0)
        return value

    with torch._C.DisableTorchFunctionSubclass():
        if func is torch.autograd.grad and kwargs.get("materialize_grads"):  # nodes have no shape
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            zeros = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in _walk((inputs,))]
            kwargs = {**kwargs, "materialize_grads": False, "allow_unused": True}
        args, kwargs = edge(args), {k: edge(v) for k, v in kwargs.items()}
    found = func(*args, **kwargs)
    return tuple(z if g is None else g for g, z in zip(found, zeros, strict=True)) if zeros else found


def _use(used: list[nn.Parameter], released: list[ReleasedParameter], address: bool) -> bool:
    """Make parameters present that one operator uses, where that is allowed; return whether all are. All of
    them at once: one that is there already must not go to make room for another. `address`: it returns
    their address."""
    known = [s for p in used if (s := sharded_of(p)) is not None and s.on_use is not None]
    for param in released:
        sharded = sharded_of(param)
        if sharded is None or sharded.on_use is None:
            return False
        if not sharded.on_use([s.unit for s in known if s.on_use is sharded.on_use], address):
            return False
    for other in used:
        if isinstance(other, PendingParameter):
            _wait_update(other)
    return True


def _wait_update(param: PendingParameter) -> None:
    if (sharded := sharded_of(param)) is not None and sharded.on_wait is not None:
        sharded.on_wait()
    else:  # its engine is gone, and with it the update
        param.__class__ = type(param).plain


def _plainly(param: PendingParameter, call: Callable[[nn.Parameter], Any]) -> Any:
    """Return what `call` says of a parameter with its values there and its own class."""
    _wait_update(param)
    kind = type(param)
    param.__class__ = kind.plain if isinstance(param, PendingParameter) else kind
    try:
        return call(param)
    finally:
        param.__class__ = kind


def _walk(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _walk(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _walk(item)]
    return [value]


def _to(param: ReleasedParameter, *args: Any, **kwargs: Any) -> Any:
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    copy = kwargs.get("copy") or any(a is True for a in args[2:])
    return _unchanged(param, dtype, device, f"to({dtype or param.dtype}, {device or param.device})", copy)


def _unchanged(param: ReleasedParameter, dtype: Any, device: Any, found: str, copy: bool = False) -> Any:
    """Return `param` if it has this dtype and is on this device (None: any) already."""
    device = torch.device(device) if device is not None else param.device
    same_device = device.type == param.device.type and device.index in (None, param.device.index or 0)
    if same_device and dtype in (None, param.dtype) and not copy:
        return param
    raise ParameterChangedError(
        f"the parameter {name_of(param)!r} cannot be moved, cast or copied by {found} after `wrap`",
        expected=f"{param.dtype} on {param.device}",
        found=found,
        cure="set dtype and device in Config, before `wrap`; `infinity.unwrap(model)` turns it into a plain "
        "model again",
    )


def _cast(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    return lambda param, *args, **kwargs: _unchanged(param, dtype, None, f"{name}()")


def _move(name: str) -> Callable[..., Any]:
    def move(param: ReleasedParameter, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        where = f"{name}:{device}" if isinstance(device, int) else device or name
        return _unchanged(param, None, where, f"{name}()")

    return move


def _type(param: ReleasedParameter, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        with torch._C.DisableTorchFunctionSubclass():
            return param.type()
    wanted = torch.empty(0).type(dtype)
    return _unchanged(
        param, wanted.dtype, None if isinstance(dtype, torch.dtype) else wanted.device, "type()"
    )


def _set_data(param: ReleasedParameter, value: object) -> Any:
    return None if value is param else NotImplemented


def _detach(param: torch.Tensor) -> Any:
    sharded = sharded_of(param)
    return sharded.on_detach() if sharded is not None and sharded.on_detach else NotImplemented


def _copy(param: ReleasedParameter, source: torch.Tensor, non_blocking: bool = False) -> Any:
    if (sharded := sharded_of(param)) is None or sharded.on_copy is None:
        return NotImplemented
    sharded.on_copy(source)
    return param


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _T.to: _to,
    _T.data.__set__: _set_data,
    _T.detach: _detach,
    _T.copy_: _copy,
    _T.type: _type,
    _T.share_memory_: lambda param: _unchanged(param, None, None, "share_memory_()", copy=True),
    _T.cpu: _move("cpu"),
    _T.cuda: _move("cuda"),
    **{
        getattr(_T, name): _cast(name, dtype)
        for name, dtype in {
            "half": torch.float16,
            "float": torch.float32,
            "double": torch.float64,
            "bfloat16": torch.bfloat16,
        }.items()
    },
}


def plain_name(name: str) -> str:
    """Return a name as it is in a model that is not compiled."""
    return name.replace("_orig_mod.", "")


class ShardedParam:
    """What the engine knows of one parameter: its spec, its place in its unit, its class.

    `on_detach` and `on_copy` are set only while a state dict is read or loaded; they let
    `Module.state_dict` and `Module.load_state_dict` reach a released parameter.
    """

    def __init__(self, param: nn.Parameter, spec: ParamSpec, unit: int, index: int) -> None:
        self.param = param
        self.spec = spec
        self.unit = unit
        self.index = index
        self.cls = type(param)
        self.released = _variant(ReleasedParameter, self.cls)  # while a use of the values raises
        self.pending = _variant(PendingParameter, self.cls)  # while a use waits for them (`on_wait`)
        self.given_dtype = param.dtype  # at `wrap`
        self.pid = os.getpid()  # a fork has the parameter, and no engine
        self.on_wait: Callable[[], None] | None = None  # waits for the unit's values, restores the class
        self.on_detach: Callable[[], torch.Tensor] | None = None
        self.on_copy: Callable[[torch.Tensor], None] | None = None
        # Makes all units of these numbers present at once, if that may be now (and, if the second is true,
        # keeps them until a scope begins or ends); returns whether.
        self.on_use: Callable[[Sequence[int], bool], bool] | None = None
        self._accumulator: Any = None
        self.place: tuple[int, tuple[int, ...]] = (0, ())  # in the unit's storage: first element, strides
        self.version = 0
        #: Updates so far, as torch counts them for bias correction; SGD's with a momentum.
        self.step = 0
        _SHARDED[param] = weakref.ref(self)  # the engine holds it

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.spec.name

    def bind(self, storage: torch.UntypedStorage, byte_offset: int) -> None:
        """Make the parameter a view of its unit's storage, which has its memory. Its identity stays."""
        with torch.inference_mode(False):
            view = torch.empty(0, dtype=self.spec.dtype, device=storage.device)
        strides = torch.empty(self.spec.shape, device="meta").stride()
        self.place = byte_offset // self.spec.dtype.itemsize, strides
        view.set_(storage, self.place[0], self.spec.shape, self.place[1])
        with torch._C.DisableTorchFunctionSubclass():
            self.param.data = view
        self.version = self.current_version

    @property
    def current_version(self) -> int:
        """The version counter of the parameter, which every alias of it shares but those by `.data`."""
        with torch._C.DisableTorchFunctionSubclass():
            return int(self.param._version)

    def keep_accumulator(self) -> None:
        """Keep a reference to the node that accumulates the parameter's gradient. The node refers to the
        parameter, and would come and go with graphs; with the reference it is a constant of `owners`."""
        if self.param.requires_grad:
            with torch.enable_grad():
                self._accumulator = self.param.view_as(self.param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def let_accumulator_go(self) -> None:
        """Undo `keep_accumulator`: otherwise the two would keep each other alive for good."""
        self._accumulator = None

    def in_place(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the parameter is where `bind` put it: `p.data = t` may move it in `storage`, too."""
        param = self.param
        with torch._C.DisableTorchFunctionSubclass():  # this look waits for nothing
            there = param.untyped_storage()._cdata == storage._cdata
            return there and (param.storage_offset(), param.stride()) == self.place

    def restore(self) -> None:
        """Give the parameter its class back."""
        self.param.__class__ = self.cls

    def forget(self) -> None:
        """Belong to no engine, if the parameter is as it was: a `wrap` has failed before it took it over."""
        if type(self.param) is self.cls:
            _SHARDED.pop(self.param, None)

    def give_back(self, values: torch.Tensor) -> None:
        """Make the parameter an ordinary one with `values`, without a gradient; it belongs to no engine
        then. A graph from before fails, as if the values had been edited."""
        param = self.param
        self.let_accumulator_go()
        self.on_use = self.on_wait = None
        self.restore()
        param.grad = None
        param.data = values
        torch.autograd.graph.increment_version(param)
        _SHARDED.pop(param, None)

    def check(self, storage: torch.UntypedStorage | None) -> None:
        """Raise `ParameterChangedError` if the parameter was cast, or moved out of `storage`."""
        param = self.param
        wrong = param.dtype is not self.spec.dtype or param.shape != self.spec.shape
        if not wrong and (storage is None or self.in_place(storage) or isinstance(param, ReleasedParameter)):
            return
        raise ParameterChangedError(
            f"the parameter {self.name!r} was cast, moved or got other data after `wrap`",
            expected=f"{self.spec.dtype}, shape {self.spec.shape}, in the engine's storage",
            found=f"{param.dtype}, shape {tuple(param.shape)}" if wrong else "other storage",
            cure="`infinity.unwrap(model)`, resize it, and wrap it again"
            if tuple(param.shape) != self.spec.shape
            else "`with infinity.gathered(params, write=True): pass` keeps its current values, as "
            f"{self.spec.dtype}; edit inside such a block from then on. After such a block, "
            "`infinity.unwrap(model)` works, to cast the model and wrap it again",
        )


_SHARDED: Any = WeakIdKeyDictionary()


def sharded_of(param: torch.Tensor) -> ShardedParam | None:
    """Return the engine's data about `param`; None if it belongs to no engine."""
    reference = _SHARDED.get(param)
    return reference() if reference is not None else None


def any_sharded() -> bool:
    """Return whether any parameter belongs to an engine."""
    return len(_SHARDED) > 0


def name_of(param: torch.Tensor) -> str:
    """Return the engine's name of a parameter."""
    sharded = sharded_of(param)
    return sharded.name if sharded is not None else "?"
