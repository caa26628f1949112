"""Parts of optional packages, loaded when they are asked for; what keeps one from loading is one sentence."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megaflow.errors import first_line


class PackageError(Exception):
    """A part cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package.

    Args:
        name: as one installs it.
        module: the first module of it that is imported.
        hint: how to get it, where it is not by its name.
    """

    name: str
    module: str
    hint: str | None = None

    def load(self, path: str) -> Any:
        """The object at `path`, such as `flash_attn.cute.flash_attn_func`.

        Raises:
            PackageError: if the package is missing, does not load, or lacks the object.
        """
        return _load(self, path)

    def find_obstacle(self, *paths: str) -> str | None:
        """Why one of these objects cannot be had, or None."""
        try:
            for path in paths:
                self.load(path)
        except PackageError as error:
            return str(error)
        return None


_MET: set[object] = set()
"""Calls of packages that have been made: a first one compiles, and may warn."""


@contextmanager
def refusing(package: Package, *tensors: Tensor) -> Iterator[None]:
    """Packages refuse shapes by assertions, ValueErrors or kinds of their own, torch's kernels by a RuntimeError: so do
    they here. One that is a RuntimeError already (out of memory) stays what it is. What they warn of, such as names
    that their own parts are to give up, when they compile for a shape, is not for who trains with them.
    """
    call = (package, *((x.shape, x.stride(), x.dtype) for x in tensors))
    try:
        with nullcontext() if call in _MET else warnings.catch_warnings():  # which makes others be said again
            if call not in _MET:
                warnings.simplefilter("ignore")
            yield
        _MET.add(call)
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"{package.name}: {type(error).__name__}: {first_line(error)}") from error


@functools.cache
def _load(package: Package, path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what packages say of those that they use is not for who uses them
            return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a package that does not fit this machine raises
        raise PackageError(_explain(package, path, error)) from error


def _explain(package: Package, path: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        parts = package.module.split(".")
        if error.name in (".".join(parts[: count + 1]) for count in range(len(parts))):
            return f"the package {package.name} is not installed ({package.hint or 'pip install ' + package.name})"
    reason = first_line(error)[:200]
    return f"the package {package.name} is installed and {path} does not load: {type(error).__name__}: {reason}"


FLASH_4 = Package("flash-attn-4", "flash_attn.cute")
FLASH_2 = Package("flash-attn", "flash_attn.flash_attn_interface", "pip install flash-attn --no-build-isolation")
ENGINE = Package("transformer-engine", "transformer_engine.pytorch", "pip install transformer-engine[pytorch]")
LIGER = Package("liger-kernel", "liger_kernel.ops")
APEX = Package("apex", "apex", "built from its source: the package of that name on the index is another one")
TORCHAO = Package("torchao", "torchao.float8")
