"""Evaluation sets: the same samples every time, and no trace in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megaflow.errors import ConfigError
from megaflow.loader import Loader, SampleSet


class EvalSets:
    """Several sets to be scored side by side while a training goes on.

    Each evaluation reads its sets from their first sample on with loaders of its own: it gives the same batches every
    time, on any rank its share of them, and moves nothing in the loader of the training.

        sets = EvalSets({"books": books, "code": code}, micro_batch_size=8, num_batches=50)
        for name, loader in sets:
            losses[name] = mean(score(batch) for batch in loader)

    Args:
        sets: the samples of each set, by name.
        micro_batch_size: samples in a batch.
        num_batches: batches of this rank that are scored of each set; None takes all whole ones. A set with fewer is
            refused at the start of its evaluation.
        options: of `Loader`, such as `dp_rank` and `dp_size`.
    """

    def __init__(
        self, sets: Mapping[str, SampleSet], micro_batch_size: int, *, num_batches: int | None = None, **options: Any
    ) -> None:
        refused = {"consumed_samples", "order", "seed"} & options.keys()
        if refused:
            raise ConfigError(f"an evaluation begins at the first sample, in the order of the set: drop {min(refused)}")
        if num_batches is not None and num_batches < 1:
            raise ConfigError(f"num_batches = {num_batches}: expected 1 or more")
        self.sets = dict(sets)
        self.micro_batch_size = micro_batch_size
        self.num_batches = num_batches
        self.options = options

    def __iter__(self) -> Iterator[tuple[str, Iterator[Any]]]:
        for name in self.sets:
            yield name, self.batches(name)

    def batches(self, name: str) -> Iterator[Any]:
        """The batches of one set; its threads end with the iteration.

        Raises:
            ConfigError: if the set has fewer batches than asked for.
        """
        with Loader(self.sets[name], self.micro_batch_size, **self.options) as loader:
            for number, batch in enumerate(loader, start=1):
                yield batch
                if number == self.num_batches:
                    return
            if self.num_batches is not None:
                found = loader.stats()["batches"]
                raise ConfigError(
                    f"evaluation set {name!r} ends after {found} batches of {self.micro_batch_size} samples a rank, "
                    f"and {self.num_batches} were asked for; ask for fewer, or give it more data"
                )
