"""How an operator is defined: its schema, kernels and fake kernel, and who may differentiate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _face, errors
from .._torch import opaque

NAMESPACE = "deep_ep"
library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]

_C: Any = torch._C
_BELOW_AUTOGRAD = _C._after_autograd_keyset
_BACKENDS = (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)
_transforms_active: Callable[[], bool] = getattr(_C, "_are_functorch_transforms_active", lambda: False)
# Sets of dispatch keys, as numbers, in which only autograd stands between a call and its kernel. Such a call needs no
# second pass through the dispatcher, which takes 6 us. torch 2.4 tells no numbers: every call makes that pass.
_plain_keys: set[int] = set()
_key_number: Callable[[Any], int] | None = getattr(_C.DispatchKeySet, "raw_repr", None)


def _requires_grad(*args: Any) -> bool:
    """Whether an argument, or a tensor in a list among them, requires grad."""
    return any(
        _requires_grad(*arg) if isinstance(arg, (list, tuple)) else isinstance(arg, torch.Tensor) and arg.requires_grad
        for arg in args
    )


_any_requires_grad: Callable[..., bool] = getattr(_C, "_any_requires_grad", _requires_grad)  # not in torch 2.4

_forward_ad: Any = torch.autograd.forward_ad


def _has_tangent(*args: Any) -> bool:
    """Whether forward-mode differentiation is on, and an argument, or a tensor in a list among them, takes part."""
    return getattr(_forward_ad, "_current_level", 0) >= 0 and any(
        _has_tangent(*arg)
        if isinstance(arg, (list, tuple))
        else isinstance(arg, torch.Tensor) and _forward_ad.unpack_dual(arg).tangent is not None
        for arg in args
    )


Kernel = Callable[..., Any]
# gradient(below, *args): the results of a call with an argument that requires grad; below(*args) is the operator
# without autograd.
Gradient = Callable[..., Any]


def unsupported(name: str, what: str, instead: str) -> errors.DeepEPNotImplementedError:
    """The error that names an operator and what it does not do."""
    text = f"torch.ops.{NAMESPACE}.{name}: {what} is not supported: {instead}"
    return errors.DeepEPNotImplementedError(errors.UNSUPPORTED, text)


def _without_sharing(kernel: Kernel) -> Kernel:
    """The kernel, whose outputs share no allocation: an operator declares that they are no aliases of each other."""

    def apart(*args: Any) -> Any:
        face = _face.load()
        if face is None:
            return kernel(*args)
        face.operator_runs(1)
        try:
            return kernel(*args)
        finally:
            face.operator_runs(-1)

    return apart


def _without_ordinary(operator: Any, fake: Kernel) -> Kernel:
    """The fake kernel, which torch calls where any tensor is on meta: beside ordinary ones it would make up results."""
    names = [argument.name for argument in operator._schema.arguments]

    def alone(*args: Any) -> Any:
        for name, arg in zip(names, args, strict=False):  # those that have their default are left out
            for one in arg if isinstance(arg, (list, tuple)) else (arg,):
                is_ordinary = type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type != "meta"
                if is_ordinary and name != "ticket":  # which is on the CPU always
                    raise errors.value_error(name, f"a tensor on {one.device}", "one on meta, as another argument is")
        return fake(*args)

    return alone


def define(name: str, signature: str, kernel: Kernel, fake: Kernel, gradient: Gradient) -> Any:
    """Defines ``deep_ep::name`` for CPU and CUDA tensors; returns its overload in torch.ops.

    Every argument is positional, so that the kernels get none by keyword. The dispatcher leaves out arguments that
    have their default: kernels have the same defaults.
    """
    kernel = _without_sharing(kernel)
    library.define(name + signature)
    operator: Any = getattr(getattr(torch.ops, NAMESPACE), name).default

    # A compiled caller's frames stay dynamo's business while it runs: kernels are opaque, or it would trace them.
    @opaque
    def autograd(keys: Any, *args: Any) -> Any:
        if _has_tangent(*args):
            raise unsupported(name, "forward-mode differentiation", "use backward")
        wanted = torch.is_grad_enabled() and _any_requires_grad(*args)
        if not wanted and _key_number is not None and _key_number(keys) in _plain_keys:
            return kernel(*args)
        below = keys & _BELOW_AUTOGRAD
        if _key_number is not None and below.highestPriorityTypeId() in _BACKENDS:
            _plain_keys.add(_key_number(keys))
        if _transforms_active():
            raise unsupported(name, "a transform of torch.func", "use torch.autograd")

        def redispatch(*args: Any) -> Any:
            with _C._AutoDispatchBelowAutograd():
                return operator.redispatch(below, *args)

        return gradient(redispatch, *args) if wanted else redispatch(*args)

    @opaque
    def refuse(*args: Any) -> Any:
        raise unsupported(name, "torch.func.vmap", "call it outside of the transform")

    for backend in ("CPU", "CUDA"):
        library.impl(name, opaque(kernel), backend)
    library.impl(name, autograd, "Autograd", with_keyset=True)
    library.impl(name, refuse, "FuncTorchBatched")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _without_ordinary(operator, fake), lib=library)
    return operator


def cast_under_autocast(operator: Any, count: int) -> None:
    """Under torch.autocast the first `count` arguments, if they are rows of floats, are cast to BF16."""
    name = operator._schema.name.split("::")[1]
    for device in ("cpu", "cuda"):

        @opaque
        def autocast(*args: Any, device: str = device) -> Any:
            rows = [arg.to(torch.bfloat16) if _is_wide(arg) else arg for arg in args[:count]]
            with torch.autocast(device, enabled=False):
                return operator(*rows, *args[count:])

        library.impl(name, autocast, f"Autocast{device.upper()}")


def _is_wide(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dtype in (torch.float32, torch.float16, torch.float64)
