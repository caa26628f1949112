"""The data of a run: the pairs on disk, their three parts, and loaders over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import megaflow
from megaflow import Batch, Loader, StreamingDataset
from megaflow.blend import BlendedDataset
from megaflow.blend_arguments import BlendSpec, DataSpec, read_data_arguments, read_phases
from megaflow.building import AnyDataset, Builder, SplitDatasets
from megaflow.dataset import FillInMiddle, GPTDataset
from megaflow.errors import ConfigError
from megaflow.indexed import IndexedDataset
from megaflow.mock import MockGPTDataset
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.stream_data import is_text_run, open_text
from megaflow_trainer.training.vocabulary import check_largest_id, list_missing_ends, open_tokenizer, read_vocabulary

_MOCK_VOCAB_SIZE = 50257


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Datasets (None where a part is empty), the vocabulary, and the end-of-document token: where it masks the loss,
    and where it tells the model that a document ends.
    """

    train: AnyDataset | MockGPTDataset | StreamingDataset
    valid: AnyDataset | MockGPTDataset | StreamingDataset | None
    vocab_size: int
    eod_id: int | None
    notes: tuple[str, ...]
    document_end: int | None = None
    by_documents: bool = False
    """Whether the model is told of documents as the data store them, not by `document_end`."""
    kept: list[Batch] = field(default_factory=list)
    """This rank's batches of the valid part, where it is text: read and tokenized once for all evaluations."""


def open_data(config: TrainConfig) -> RunData:
    """Open the pairs that the configuration names and check their tokenizer before anything is built.

    Raises:
        MissingFileError: if there is no such pair or tokenizer file.
        DataFormatError: if a sidecar is damaged.
        TokenizerError: if the data were made with another tokenizer than the one the flags name.
        ConfigError: if the train part is empty.
    """
    if config.data.is_mock:
        return _open_mock(config)
    if is_text_run(config.data):
        return _open_stream(config)
    spec = _find_pairs(_read_spec(config))
    prefixes = spec.prefixes
    vocab_size, eod_id, notes = read_vocabulary(prefixes, config)
    for prefix in prefixes:
        indexed = IndexedDataset(prefix)
        check_largest_id(indexed, prefix, vocab_size)
        notes += list_missing_ends(indexed, eod_id, config)
    splits = build_datasets(spec, config, eod_id)
    notes += splits.notes
    if splits.train is None:
        raise ConfigError(
            f"{_name(prefixes)}: the train part of --split {config.data.split} is empty; give it more weight"
        )
    for name, part in splits.datasets.items():
        check_part(part, name, config)
        notes += _describe(part, name)
    if splits.valid is None and config.eval.every:
        is_named = spec.per_split is None or spec.per_split[1] is not None
        notes.append(
            f"no validation: the valid part of --split {config.data.split} is empty"
            if is_named
            else "no validation: no data are named for it"
        )
    return RunData(
        train=splits.train, valid=splits.valid, vocab_size=vocab_size, notes=tuple(notes), **_use_end(config, eod_id)
    )


def _open_stream(config: TrainConfig) -> RunData:
    """Text that is tokenized while it trains."""
    if config.data.order == "cyclic":
        raise ConfigError(
            "--dataloader-type cyclic draws samples by their position, and text is read in order, shuffled in windows; "
            "drop the flag, or preprocess the text"
        )
    tokenizer = open_tokenizer(config.data)
    text = open_text(config, tokenizer)
    return RunData(
        train=text.train,
        valid=text.valid,
        vocab_size=config.model.vocab_size or tokenizer.vocab_size,
        notes=tuple(text.notes),
        **_use_end(config, text.train.eod_id),
    )


def _use_end(config: TrainConfig, eod_id: int | None) -> dict[str, Any]:
    """The end-of-document token where it is used.

    Raises:
        ConfigError: if it cannot occur in the data, and so would never end a document.
    """
    vocab_size = config.model.vocab_size
    by_documents = config.data.keeps_documents_apart and not config.data.is_mock  # made-up documents end with the token
    by_end = config.model.tells_documents and not by_documents
    if by_end and eod_id is not None and vocab_size is not None and eod_id >= vocab_size:
        raise ConfigError(
            f"--reset-position-ids, --reset-attention-mask: the end-of-document token {eod_id} is outside the "
            f"vocabulary of {vocab_size} tokens, so that no document would end; name the tokenizer of the data"
        )
    return {
        "eod_id": eod_id if config.data.eod_mask_loss else None,
        "document_end": eod_id if by_end else None,
        "by_documents": by_documents,
    }


def build_datasets(spec: DataSpec, config: TrainConfig, eod_id: int | None) -> SplitDatasets:
    """The train and valid parts; None for one that is empty (a small corpus may have too few documents for a part).

    The numbers of samples are counted as Megatron counts them: they decide how often the documents are repeated.
    """
    own, phases = config.samples, None
    if own.blend_schedule is not None:
        train = spec.blend if spec.per_split is None else spec.per_split[0]
        phases = read_phases(own.blend_schedule, len(train.prefixes) if train is not None else 0)
    options: dict[str, Any] = {"shuffle": own.shuffle, "packing": own.packing, "num_threads": own.builder_threads}
    if own.fim_rate:
        options |= {"fim": _fill_in_middle(config), "eod_id": eod_id}
    builder = Builder(
        seq_len=config.data.seq_len,
        seed=config.seed,
        split=config.data.split,
        order=own.order,
        weight_kind=own.blend_weights,
        phases=phases,
        cache_dir=own.cache_dir,
        options=options,
    )
    train_samples, valid_samples = _count_samples(config)
    return builder.build(spec, (train_samples, valid_samples, 0))


def _count_samples(config: TrainConfig) -> tuple[int, int]:
    batch, steps = config.step.sizes.global_batch_size, config.last_step
    rounds = steps // config.eval.every + 1 if config.eval.every else 0
    return steps * batch, rounds * config.eval.steps * batch


def check_part(part: AnyDataset, name: str, config: TrainConfig) -> None:
    """Whether every dataset of a part holds at least one sample.

    Raises:
        ConfigError: if one does not, with the numbers.
    """
    for dataset in part.datasets if isinstance(part, BlendedDataset) else [part]:
        if dataset.tokens_per_epoch < config.data.seq_len + 1 and len(dataset):
            raise ConfigError(
                f"{dataset.indexed.prefix}: the {name} part of --split {config.data.split} has "
                f"{dataset.tokens_per_epoch} tokens, and one sample takes --seq-length + 1 = "
                f"{config.data.seq_len + 1}; give the part more weight or shorten the sequence"
            )


def build_loader(dataset: AnyDataset | MockGPTDataset | StreamingDataset, config: TrainConfig, mesh: Mesh) -> Loader:
    """This rank's loader over a dataset, from its first sample on, in the dataset's order."""
    return _loader(dataset, config, mesh)


def build_train_loader(data: RunData, config: TrainConfig, mesh: Mesh) -> Loader:
    """This rank's loader of the training, by the sampler of --dataloader-type (an evaluation has none)."""
    return _loader(data.train, config, mesh, **sampler_of(config))


def sampler_of(config: TrainConfig) -> dict[str, Any]:
    """The loader's arguments that decide in which order the dataset's samples are drawn."""
    return {"order": "cyclic", "seed": config.seed} if config.data.order == "cyclic" else {"order": "single"}


def _loader(
    dataset: AnyDataset | MockGPTDataset | StreamingDataset, config: TrainConfig, mesh: Mesh, **sampler: Any
) -> Loader:
    return Loader(
        dataset,
        config.step.sizes.micro_batch_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        num_threads=config.data.num_threads,
        prefetch=config.data.prefetch,
        document_masking=config.data.keeps_documents_apart,
        **sampler,
    )


@contextmanager
def open_valid(data: RunData, config: TrainConfig, mesh: Mesh) -> Iterator[Any]:
    """This rank's batches of one evaluation, the same ones each time."""
    assert data.valid is not None, "asked only when there is a valid part"
    if not isinstance(data.valid, StreamingDataset):
        with build_loader(data.valid, config, mesh) as loader:
            yield loader
        return
    if not data.kept:
        with build_loader(data.valid, config, mesh) as loader:
            data.kept.extend(islice(loader, config.eval.steps * config.step.sizes.num_micro_batches))
    yield iter(data.kept)


def with_vocabulary(config: TrainConfig, data: RunData) -> TrainConfig:
    """The configuration with the vocabulary size that the data decide."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=data.vocab_size))


def _describe(part: AnyDataset, name: str) -> list[str]:
    """What is said at start: a blend's table, or that a single dataset is read more than once."""
    if isinstance(part, BlendedDataset):
        table = SplitDatasets(part, None, None).tables()["train"]
        return [f"{name} blend:\n{table}"]
    if name == "train" and isinstance(part, GPTDataset) and part.num_epochs > 1:
        return [f"the train part of {part.indexed.prefix} is read {part.num_epochs} times"]
    return []


def _name(prefixes: Sequence[str]) -> str:
    return prefixes[0] if len(prefixes) == 1 else f"the blend of {len(prefixes)} datasets"


def _read_spec(config: TrainConfig) -> DataSpec:
    own = config.data
    return read_data_arguments(
        data_path=own.path,
        per_split=(own.train_path, own.valid_path, own.test_path),
        data_args_path=own.args_path,
        per_split_data_args_path=own.per_split_args_path,
    )


def _find_pairs(spec: DataSpec) -> DataSpec:
    """The same with the prefixes under which the pairs lie."""

    def find(blend: BlendSpec | None) -> BlendSpec | None:
        if blend is None:
            return None
        return BlendSpec(tuple(megaflow.resolve_prefix(prefix) for prefix in blend.prefixes), blend.weights)

    if spec.per_split is None:
        return DataSpec(find(spec.blend))
    train, valid, test = (find(blend) for blend in spec.per_split)
    return DataSpec(per_split=(train, valid, test))


def _fill_in_middle(config: TrainConfig) -> FillInMiddle:
    own = config.samples
    tokenizer = open_tokenizer(config.data)
    tokens = {"prefix": own.fim_prefix_token, "middle": own.fim_middle_token, "suffix": own.fim_suffix_token}
    ids: dict[str, int] = {}
    for name, token in tokens.items():
        found = tokenizer.token_id(token)
        if found is None:
            raise ConfigError(
                f"--fim-rate {own.fim_rate}: the tokenizer has no token {token!r}; name its own by --fim-{name}-token, "
                "and the tokenizer by --tokenizer-model or --vocab-file"
            )
        ids[f"{name}_id"] = found
    return FillInMiddle(rate=own.fim_rate, spm_rate=own.fim_spm_rate, tokenizer=tokenizer, **ids)


def _open_mock(config: TrainConfig) -> RunData:
    vocab_size = config.model.vocab_size or _MOCK_VOCAB_SIZE
    train_samples, valid_samples = _count_samples(config)

    def make(name: str, num_samples: int) -> MockGPTDataset:
        return MockGPTDataset(
            vocab_size=vocab_size,
            eod_id=vocab_size - 1,
            seq_len=config.data.seq_len,
            num_samples=num_samples,
            seed=config.seed,
            split_name=name,
        )

    return RunData(
        train=make("train", train_samples),
        valid=make("valid", valid_samples) if valid_samples else None,
        vocab_size=vocab_size,
        notes=("made-up data (--mock-data): the loss tells nothing of a language",),
        **_use_end(config, vocab_size - 1),
    )
