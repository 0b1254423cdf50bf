"""How a function of a notebook cell travels to a rank, and a rank's result back.

cloudpickle sends a function by value: its code, its closure and the globals it uses. Three things are added. Real
file names and lines travel too, with the text of the cells, so that a traceback in a rank shows the cell. A function
of a module that is not installed (a file beside the notebook, a test) goes by value as well. And a class that came
from the kernel is sent back by name, so that `isinstance` holds in the kernel and the kernel's class stays as it was.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import sys
import sysconfig
import types
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle

MAX_CAPTURED_BYTES = 50_000_000
_CLASS_IDS = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
_CLASSES = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID


class CannotSend(TypeError):
    """Something that should go to a rank, or come back from one, cannot be pickled or is too large."""


def _code_with_file(make: Callable, args: tuple, filename: str) -> types.CodeType:
    return make(*args).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's, keeping the file names of code; `files` collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        self.files: set[str] = set()
        reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]

        def reduce(code: types.CodeType) -> tuple:
            self.files.add(code.co_filename)
            return _code_with_file, (*reduce_code(code), code.co_filename)

        # Before the base's __init__, which looks for it.
        self.dispatch_table = ChainMap({types.CodeType: reduce}, cloudpickle.Pickler.dispatch_table)  # type: ignore[assignment]
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)


class _ResultPickler(_Pickler):
    """For results: classes that came from the kernel go by name; tensors go without what they are only a view of."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj in _from_kernel:
            return _class_of, (_CLASS_IDS[obj],)
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) is torch.Tensor and obj.layout is torch.strided:
            small = _without_the_rest(obj)
            if small is not obj:
                return small.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


_from_kernel: weakref.WeakSet = weakref.WeakSet()


def _class_of(class_id: str) -> type:
    return _CLASSES[class_id]


def _without_the_rest(tensor: Any) -> Any:
    """`tensor` on the CPU, and without its storage where that is mostly other data (a row of a large matrix)."""
    if tensor.device.type not in ("cpu", "meta"):
        tensor = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    if tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() > 2 * tensor.nbytes + 1024:
        tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return tensor


def _dump(pickler: type[_Pickler], obj: Any) -> tuple[bytes, set[str]]:
    buffer = io.BytesIO()
    made = pickler(buffer)
    made.dump(obj)
    return buffer.getvalue(), made.files


# --- kernel -> rank


def pack_task(fn: Callable, args: tuple) -> tuple[bytes, dict[str, str]]:
    """The pickle of `(fn, args)` and the source text of the cells it was defined in, by file name.

    Raises CannotSend naming the variable that cannot be pickled, or a captured one of over 50 MB.
    """
    with _by_value(fn):
        try:
            captured, _ = _dump(_Pickler, fn)
            payload, files = _dump(_Pickler, (fn, args))
        except Exception as error:
            culprit = _find(fn, args, lambda value: _fails(value)) or "the function"
            raise CannotSend(
                f"{culprit} cannot be sent to the ranks: {type(error).__name__}: {error}. Make it inside the rank "
                "function, or pass what it is made from (a path, a size, a seed) as an argument."
            ) from None
        if len(captured) > MAX_CAPTURED_BYTES:
            culprit = _find(fn, (), lambda value: _size(value) > MAX_CAPTURED_BYTES // 2) or "the function"
            raise CannotSend(
                f"{culprit} would be copied to every rank: {len(captured) / 1e6:.0f} MB, more than "
                f"{MAX_CAPTURED_BYTES / 1e6:.0f} MB. Make it or load it inside the rank function, or pass it as an "
                "argument of launch if every rank really needs its own copy."
            )
    cells = {name: "".join(linecache.getlines(name)) for name in files if not os.path.exists(name)}
    return payload, {name: text for name, text in cells.items() if text}


def unpack_task(payload: bytes, sources: dict[str, str]) -> tuple[Callable, tuple]:
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    task = pickle.loads(payload)
    _from_kernel.update(_CLASS_IDS.keys())
    return task


@contextmanager
def _by_value(fn: Callable) -> Iterator[None]:
    """Send the functions of `fn`'s module by value, unless the module is installed or part of the course."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ in ("__main__", "builtins") or _is_installed(module):
        yield
        return
    registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
    if not registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: types.ModuleType) -> bool:
    paths = sysconfig.get_paths()
    file = getattr(module, "__file__", None)
    return (
        file is None
        or module.__name__.partition(".")[0] == "course_lib"
        or any(file.startswith(paths[key] + os.sep) for key in ("purelib", "platlib", "stdlib"))
    )


def _find(fn: Callable, args: tuple, bad: Callable[[Any], bool]) -> str | None:
    """The first argument or captured variable that is `bad`, described; looks into captured functions too."""
    for index, value in enumerate(args):
        if bad(value):
            return f"argument {index + 1} of the function ({type(value).__name__})"
    seen: set[int] = set()
    todo = [fn]
    while todo:
        function = todo.pop(0)
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        for kind, name, value in _captured(function):
            if isinstance(value, types.FunctionType):
                todo.append(value)
            elif bad(value):
                return f"the {kind} variable {name!r} ({type(value).__name__}) used by {function.__name__}()"
    return None


def _captured(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield "closure", name, cell.cell_contents
        except ValueError:  # not assigned yet
            pass
    for name in cloudpickle.cloudpickle._extract_code_globals(function.__code__):
        if name in function.__globals__ and not isinstance(function.__globals__[name], types.ModuleType):
            yield "global", name, function.__globals__[name]


def _fails(value: Any) -> bool:
    try:
        _dump(_Pickler, value)
        return False
    except Exception:
        return True


def _size(value: Any) -> int:
    return len(_dump(_Pickler, value)[0])


# --- rank -> kernel


def pack_result(value: Any) -> bytes:
    try:
        return _dump(_ResultPickler, value)[0]
    except Exception as error:
        raise CannotSend(
            f"what the function returned ({type(value).__name__}) cannot be sent back: "
            f"{type(error).__name__}: {error}. Return numbers, strings, tensors or containers of them."
        ) from None
