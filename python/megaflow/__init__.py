"""megaflow: text to tokens to training samples, at the speed of the hardware.

    from megaflow import GPTDataset, Loader

Importing this package is cheap: submodules load when a name of theirs is first used, and none of them imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaflow.batch import Batch as Batch
    from megaflow.blend import BlendedDataset as BlendedDataset
    from megaflow.dataset import FillInMiddle as FillInMiddle
    from megaflow.dataset import GPTDataset as GPTDataset
    from megaflow.evaluation import EvalSets as EvalSets
    from megaflow.indexed import IndexedDataset as IndexedDataset
    from megaflow.indexed import resolve_prefix as resolve_prefix
    from megaflow.loader import Loader as Loader
    from megaflow.merging import MergeReport as MergeReport
    from megaflow.merging import merge as merge
    from megaflow.mock import MockGPTDataset as MockGPTDataset
    from megaflow.preprocessing import PreprocessOptions as PreprocessOptions
    from megaflow.preprocessing import PreprocessReport as PreprocessReport
    from megaflow.preprocessing import preprocess as preprocess
    from megaflow.sidecar import read_sidecar as read_sidecar
    from megaflow.streaming import StreamBlend as StreamBlend
    from megaflow.streaming import StreamingDataset as StreamingDataset
    from megaflow.tokenizer import Tokenizer as Tokenizer
    from megaflow.verifying import VerifyReport as VerifyReport
    from megaflow.verifying import verify as verify

_HOME = {
    "Batch": "megaflow.batch",
    "BlendedDataset": "megaflow.blend",
    "EvalSets": "megaflow.evaluation",
    "FillInMiddle": "megaflow.dataset",
    "GPTDataset": "megaflow.dataset",
    "IndexedDataset": "megaflow.indexed",
    "Loader": "megaflow.loader",
    "MergeReport": "megaflow.merging",
    "MockGPTDataset": "megaflow.mock",
    "PreprocessOptions": "megaflow.preprocessing",
    "PreprocessReport": "megaflow.preprocessing",
    "StreamBlend": "megaflow.streaming",
    "StreamingDataset": "megaflow.streaming",
    "Tokenizer": "megaflow.tokenizer",
    "VerifyReport": "megaflow.verifying",
    "merge": "megaflow.merging",
    "preprocess": "megaflow.preprocessing",
    "read_sidecar": "megaflow.sidecar",
    "resolve_prefix": "megaflow.indexed",
    "verify": "megaflow.verifying",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("megaflow._core").__version__
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'megaflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
