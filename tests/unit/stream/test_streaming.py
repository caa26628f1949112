"""`StreamingDataset`: every token once an epoch, one order for all ranks and threads, exact resume."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.containers import LINES, TABLES, table_of, write_lines, write_table
from megaflow import GPTDataset, Loader, PreprocessOptions, StreamBlend, StreamingDataset, Tokenizer, preprocess
from megaflow.errors import CheckpointError, ConfigError, DataFormatError, MissingFileError, NoDocumentsError

SEQ_LEN = 32
EOD = 50256
SMALL: dict[str, Any] = {"seq_len": SEQ_LEN, "shuffle_window": 600, "shard_bytes": 3000, "block_bytes": 700}


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 30 words, each with its number in front so that no two are equal."""
    rng = np.random.default_rng(seed)
    return [f"{n}: " + " ".join(map(str, rng.integers(0, 10**4, rng.integers(0, 30)))) for n in range(count)]


def write_jsonl(path: Path, some_texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in some_texts))
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three files of different sizes, cut into some twenty shards."""
    folder = tmp_path_factory.mktemp("stream")
    parts = [texts(n, seed) for seed, n in enumerate((170, 40, 300))]
    return [write_jsonl(folder / f"part{index}.jsonl", part) for index, part in enumerate(parts)]


def documents_of(paths: list[str]) -> list[tuple[int, ...]]:
    """Tokens of each document with its end, in input order."""
    tokenizer = Tokenizer.gpt2()
    lines = [line for path in paths for line in Path(path).read_text().splitlines()]
    return [(*tokenizer.encode(json.loads(line)["text"]).tolist(), EOD) for line in lines]


def rows_of(loader: Loader) -> list[list[int]]:
    """All samples of a loader, each with its extra token."""
    return [[*row.tolist(), int(last)] for b in loader for row, last in zip(b.tokens, b.labels[:, -1], strict=True)]


def stream_of(rows: list[list[int]]) -> list[int]:
    """The row of tokens that the samples were cut from."""
    return [*rows[0][:1], *(token for row in rows for token in row[1:])]


def cut_documents(tokens: list[int]) -> list[tuple[int, ...]]:
    ends = [-1, *(place for place, token in enumerate(tokens) if token == EOD)]
    return [tuple(tokens[begin + 1 : end + 1]) for begin, end in pairwise(ends)]


def test_unshuffled_stream_is_the_documents_in_input_order(corpus: list[str]) -> None:
    rows = rows_of(Loader(StreamingDataset(corpus, shuffle=False, epochs=1, **SMALL), 1))
    expected = [token for document in documents_of(corpus) for token in document]
    assert len(rows) == (len(expected) - 1) // SEQ_LEN
    assert stream_of(rows) == expected[: len(rows) * SEQ_LEN + 1]
    assert all(first[-1] == second[0] for first, second in pairwise(rows)), "neighbours share one token"


@pytest.mark.parametrize("epochs", [1, 2])
def test_every_document_of_an_epoch_is_delivered_once(corpus: list[str], epochs: int) -> None:
    dataset = StreamingDataset(corpus, epochs=epochs, keep_partial=True, **SMALL)
    batches = list(Loader(dataset, 1))
    rows = [[*b.tokens[0].tolist(), int(b.labels[0, -1])] for b in batches]
    tokens = stream_of(rows)
    mask = batches[-1].loss_mask
    if mask is not None:
        tokens = tokens[: len(tokens) - int((mask == 0).sum())]
    expected = documents_of(corpus)
    found = cut_documents(tokens)
    assert Counter(found) == Counter(expected * epochs)
    half = found[: len(expected)]
    assert Counter(half) == Counter(expected), "an epoch ends before the next begins"
    assert half != expected, "they are shuffled"
    if epochs == 2:
        assert found[len(expected) :] != half, "each epoch has an order of its own"


def test_a_window_mixes_documents_of_several_shards(corpus: list[str]) -> None:
    dataset = StreamingDataset(corpus, epochs=1, keep_partial=True, **{**SMALL, "shuffle_window": 5000})
    stream = dataset.open_at()
    stream.source.num_samples  # noqa: B018 - it is open
    files = []
    loader = Loader(dataset, 1)
    for index in range(20):
        next(loader)
        files += [piece["path"] for piece in loader._opened.pieces(index + 1)]
    assert len(set(files)) == 3, "the first twenty samples come from all three files"


def test_seed_decides_the_order_and_nothing_else(corpus: list[str]) -> None:
    order = [rows_of(Loader(StreamingDataset(corpus, epochs=1, seed=seed, **SMALL), 1)) for seed in (1, 1, 2)]
    assert order[0] == order[1] != order[2]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("block_bytes", [100, 700, 1 << 20])
def test_samples_do_not_depend_on_threads_or_blocks(corpus: list[str], num_threads: int, block_bytes: int) -> None:
    straight = rows_of(Loader(StreamingDataset(corpus, epochs=1, **SMALL), 1))
    options = {**SMALL, "num_threads": num_threads, "block_bytes": block_bytes}
    assert rows_of(Loader(StreamingDataset(corpus, epochs=1, **options), 1, num_threads=num_threads)) == straight


@pytest.mark.parametrize("num_threads", [0, 1, 2, 4])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_global_batches_do_not_depend_on_ranks(
    corpus: list[str], micro_batch_size: int, dp_size: int, num_threads: int
) -> None:
    dataset = StreamingDataset(corpus, epochs=1, **SMALL)
    straight = rows_of(Loader(dataset, 1))
    ranks = [
        rows_of(Loader(dataset, micro_batch_size, dp_rank=rank, dp_size=dp_size, num_threads=num_threads))
        for rank in range(dp_size)
    ]
    step = micro_batch_size * dp_size
    assert {len(rows) for rows in ranks} == {len(straight) // step * micro_batch_size}, "ranks end together"
    merged: list[list[int]] = []
    for first in range(0, len(ranks[0]), micro_batch_size):
        for rows in ranks:
            merged += rows[first : first + micro_batch_size]
    assert merged == straight[: len(straight) // step * step]


def test_stopped_at_every_position_it_goes_on_exactly(corpus: list[str]) -> None:
    dataset = StreamingDataset(corpus, epochs=3, **SMALL)
    loader = Loader(dataset, 4)
    states, straight = [json.dumps(loader.state_dict())], []
    for batch in loader:
        straight.append(batch.tokens.tolist())
        states.append(json.dumps(loader.state_dict()))
    assert len(straight) > 100
    positions = np.unique(np.linspace(0, len(straight), 60).astype(int)).tolist()
    assert len(positions) >= 50
    for position in positions:
        resumed = Loader(dataset, 4, num_threads=position % 3)
        resumed.load_state_dict(json.loads(states[position]))
        assert resumed.consumed_samples == 4 * position
        rest = [next(resumed).tokens.tolist() for _ in range(min(12, len(straight) - position))]
        assert rest == straight[position : position + 12], position
        assert json.dumps(resumed.state_dict()) == states[min(position + 12, len(straight))], position
        resumed.close()


def test_state_is_the_same_on_every_rank_and_fits_another_dp_size(corpus: list[str]) -> None:
    dataset = StreamingDataset(corpus, epochs=2, **SMALL)
    straight = rows_of(Loader(dataset, 1))
    for stop in (0, 1, 7, 20):
        ranks = [Loader(dataset, 2, dp_rank=rank, dp_size=2) for rank in range(2)]
        for _ in range(stop):
            for loader in ranks:
                next(loader)
        states = [loader.state_dict() for loader in ranks]
        assert states[0] == states[1]
        for loader in ranks:
            loader.close()
        for dp_size, size in ((1, 1), (1, 4), (4, 1)):
            again = [Loader(dataset, size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
            merged: list[list[int]] = []
            for loader in again:
                loader.load_state_dict(states[0])
            for _ in range(4):
                for loader in again:
                    batch = next(loader)
                    merged += [
                        [*row, last] for row, last in zip(batch.tokens.tolist(), batch.labels[:, -1], strict=True)
                    ]
            assert merged == straight[4 * stop : 4 * stop + len(merged)], (stop, dp_size)


def test_micro_batch_size_may_grow_while_it_runs(corpus: list[str]) -> None:
    dataset = StreamingDataset(corpus, epochs=1, **SMALL)
    straight = [batch.tokens[0].tolist() for batch in Loader(dataset, 1)]
    loader, found = Loader(dataset, 1), []
    for size in (1, 2, 5):
        loader.set_micro_batch_size(size)
        found += [row for _ in range(3) for row in next(loader).tokens.tolist()]
    assert found == straight[: len(found)]
    assert loader.consumed_samples == 3 + 6 + 15


def test_every_container_gives_the_same_samples(tmp_path: Path) -> None:
    some_texts = texts(60)
    data = "".join(json.dumps({"text": text}) + "\n" for text in some_texts).encode()
    table = table_of(some_texts)
    sources: list[Any] = [write_lines(tmp_path, "lines", ending, data) for ending in LINES]
    sources += [write_table(tmp_path, "table", ending, table) for ending in TABLES]
    sources += [table, f"file://{tmp_path}/lines.jsonl"]
    options = {"seq_len": SEQ_LEN, "shuffle": False, "epochs": 2}
    expected = rows_of(Loader(StreamingDataset(sources[0], **options), 1))
    assert len(expected) > 20
    for source in sources[1:]:
        dataset = StreamingDataset(source, **options)
        loader = Loader(dataset, 1)
        head = [next(loader) for _ in range(9)]
        state = loader.state_dict()
        loader.close()
        resumed = Loader(dataset, 1)
        resumed.load_state_dict(state)
        rows = [[*batch.tokens[0].tolist(), int(batch.labels[0, -1])] for batch in head] + rows_of(resumed)
        assert rows == expected, source


def test_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    some_texts = texts(400)
    path = tmp_path / "corpus.parquet"
    pq.write_table(table_of(some_texts), path, row_group_size=50)
    options = {"seq_len": SEQ_LEN, "epochs": 1, "keep_partial": True, "shard_bytes": 100}
    loader = Loader(StreamingDataset(path, **options), 1)
    rows = rows_of(loader)
    found = {document[:-1] for document in cut_documents(stream_of(rows))}
    tokenizer = Tokenizer.gpt2()
    expected = {tuple(tokenizer.encode(text).tolist()) for text in some_texts}
    assert len(expected - found) <= 1, "all but the document that the padding follows"


def test_origins_lead_to_the_tokens(corpus: list[str]) -> None:
    loader = Loader(StreamingDataset(corpus, epochs=1, **SMALL), 1, prefetch=1)
    tokenizer = Tokenizer.gpt2()
    for index in range(60):
        pieces = loader._opened.pieces(index)
        batch = next(loader)
        tokens: list[int] = []
        for piece in pieces:
            line = Path(piece["path"]).read_bytes()[piece["byte"] :].split(b"\n", 1)[0]
            ids = [*tokenizer.encode(json.loads(line)["text"]).tolist(), EOD]
            tokens += ids[piece["first_token"] : piece["first_token"] + piece["tokens"]]
        assert tokens == [*batch.tokens[0].tolist(), int(batch.labels[0, -1])]


def test_short_last_sample_is_padded_and_masked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one two three"])
    options: dict[str, Any] = {"seq_len": 8, "epochs": 1}
    assert list(Loader(StreamingDataset(path, **options), 1)) == []
    for dtype in ("int64", "uint16"):
        (batch,) = Loader(StreamingDataset(path, keep_partial=True, **options), 1, dtype=dtype)  # type: ignore[arg-type]
        ids = Tokenizer.gpt2().encode("one two three").tolist()
        assert batch.tokens.tolist() == [[*ids, EOD, 0, 0, 0, 0]]
        assert batch.labels.tolist() == [[*ids[1:], EOD, 0, 0, 0, 0, 0]]
        assert batch.loss_mask is not None
        assert batch.loss_mask.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]


def test_bad_records_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = texts(40)
    lines = [json.dumps({"text": text}) for text in good]
    lines[20:20] = ["{", '{"other": 1}']
    path.write_text("\n".join(lines) + "\n")
    loader = Loader(StreamingDataset(path, shuffle=False, epochs=1, seq_len=16, shuffle_window=100), 1)
    with pytest.raises(DataFormatError, match=r"bad\.jsonl, line 21 .*invalid JSON"):
        list(loader)
    assert loader.stats()["batches"] > 3, "the windows before it were handed out"
    skipping: dict[str, Any] = {"shuffle": False, "epochs": 1, "seq_len": 16, "on_bad_record": "skip"}
    loader = Loader(StreamingDataset(path, **skipping), 1)
    clean = Loader(StreamingDataset(write_jsonl(tmp_path / "good.jsonl", good), shuffle=False, epochs=1, seq_len=16), 1)
    assert rows_of(loader) == rows_of(clean)
    counts = loader.stats()["stream"]
    assert (counts["bad_records"], counts["epoch"]) == (2, 0)
    assert counts["documents"] in (39, 40), "the last one may not fill a sample"
    with pytest.raises(DataFormatError, match="2 bad records, and 1 are allowed"):
        list(Loader(StreamingDataset(path, max_bad_records=1, **skipping), 1))


def test_parts_of_a_split_share_the_documents_out_by_their_text(corpus: list[str], tmp_path: Path) -> None:
    def read(sources: list[str], **part: Any) -> Counter[tuple[int, ...]]:
        dataset = StreamingDataset(sources, epochs=1, keep_partial=True, **(SMALL | {"shard_bytes": 900}), **part)
        rows = stream_of(rows_of(Loader(dataset, 1)))
        return Counter(cut_documents(rows[: len(rows) - rows[::-1].index(EOD)]))

    parts = [read(corpus, split="80,15,5", split_name=name) for name in ("train", "valid", "test")]
    assert sum(parts, Counter()) == Counter(documents_of(corpus))
    assert [380 < len(parts[0]) < 436, 50 < len(parts[1]) < 105, 10 < len(parts[2]) < 45] == [True] * 3
    assert read(corpus[::-1], split="80,15,5", split_name="valid", seed=8) == parts[1], "order and seed have no say"
    table = pa.table(
        {"text": [json.loads(line)["text"] for path in corpus for line in Path(path).read_text().splitlines()]}
    )
    pq.write_table(table, tmp_path / "all.parquet", row_group_size=50)
    assert read([str(tmp_path / "all.parquet")], split="80,15,5", split_name="test") == parts[2]
    assert read(corpus, split="80,20", split_name="train") == parts[0], "a border stays where the shares before it stay"
    whole, part = (StreamingDataset(corpus, **SMALL, split=split) for split in (None, "80,15,5"))
    assert whole.fingerprint != part.fingerprint
    assert StreamingDataset.from_recipe(part.recipe()).fingerprint == part.fingerprint
    for split, name, words in (
        ("1,0,0", "valid", "the valid part is empty"),
        ("80,15,5", "dev", "expected one of train, valid, test"),
        ("a", "train", "split"),
    ):
        with pytest.raises(ConfigError, match=words):
            StreamingDataset(corpus, **SMALL, split=split, split_name=name)


def test_inputs_that_cannot_be_used_are_told_in_words(tmp_path: Path, corpus: list[str]) -> None:
    with pytest.raises(MissingFileError, match="nothing"):
        Loader(StreamingDataset(tmp_path / "nothing.jsonl", seq_len=8), 1)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(NoDocumentsError, match="hold no document"):
        next(Loader(StreamingDataset(empty, seq_len=8), 1))
    with pytest.raises(ConfigError, match="standard input can be read once"):
        StreamingDataset("-", seq_len=8)
    for option, value in (("seq_len", 0), ("shuffle_window", 0), ("interleave", 0), ("epochs", 0), ("num_threads", 0)):
        with pytest.raises(ConfigError, match=f"{option} = 0: expected 1 or more"):
            Loader(StreamingDataset(corpus, **{"seq_len": 8, option: value}), 1)
    with pytest.raises(ConfigError, match="no known length"):
        len(StreamingDataset(corpus, seq_len=8))
    with pytest.raises(ConfigError, match="leave order at single"):
        Loader(StreamingDataset(corpus, seq_len=8), 1, order="cyclic")


def test_arrow_stream_that_can_be_read_once_serves_one_epoch() -> None:
    table = table_of(texts(30))
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
    loader = Loader(StreamingDataset(reader, seq_len=16, epochs=1), 1)
    assert len(list(loader)) > 5
    with pytest.raises((DataFormatError, NoDocumentsError, OSError)):  # whichever of them the reader ends in
        list(Loader(StreamingDataset(reader, seq_len=16, epochs=1), 1))


def test_state_of_other_inputs_is_refused(tmp_path: Path, corpus: list[str]) -> None:
    loader = Loader(StreamingDataset(corpus, **SMALL), 2)
    next(loader)
    state = loader.state_dict()
    other = Loader(StreamingDataset(corpus[:2], **SMALL), 2)
    with pytest.raises(CheckpointError, match="sources was"):
        other.load_state_dict(state)
    other = Loader(StreamingDataset(corpus, **{**SMALL, "seed": 5}), 2)
    with pytest.raises(CheckpointError, match="seed was 1234 and is 5"):
        other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="no `position`"):
        loader.load_state_dict({key: value for key, value in state.items() if key != "position"})
    with pytest.raises(CheckpointError, match="not a position in a stream"):
        loader.load_state_dict({**state, "position": "{}"})


def test_streams_blend_with_streams_and_pairs_exactly(tmp_path: Path, corpus: list[str]) -> None:
    pair = preprocess(corpus[1], PreprocessOptions(output_prefix=str(tmp_path / "pair"))).pairs[0].prefix
    sets = [
        StreamingDataset(corpus[0], **SMALL),
        StreamingDataset(corpus[2], **SMALL, num_threads=2),
        GPTDataset(pair, seq_len=SEQ_LEN, num_samples=200),
    ]
    blend = StreamBlend(sets, [3, 2, 1], num_samples=120)
    alone = [rows_of_first(Loader(part, 1), 70) for part in sets]
    straight = rows_of(Loader(blend, 1))
    assert len(straight) == 120
    taken = [0, 0, 0]
    for number, row in enumerate(straight):
        (owner,) = [index for index in range(3) if alone[index][taken[index]] == row]
        taken[owner] += 1
        assert all(abs(taken[part] - (number + 1) * share / 6) <= 2 for part, share in enumerate((3, 2, 1)))
    loader = Loader(blend, 2, dp_size=2)
    for stop in range(0, 24, 6):
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = Loader(blend, 1)
        resumed.load_state_dict(state)
        assert rows_of_first(resumed, 9) == straight[4 * stop : 4 * stop + 9]
        for _ in range(6):
            next(loader)
    with pytest.raises(ConfigError, match="the same seq_len"):
        StreamBlend([sets[0], StreamingDataset(corpus, seq_len=9)], [1, 1], num_samples=4)


def rows_of_first(loader: Loader, count: int) -> list[list[int]]:
    """The first samples of a loader with batches of one, each with its extra token."""
    batches = [next(loader) for _ in range(count)]
    return [[*batch.tokens[0].tolist(), int(batch.labels[0, -1])] for batch in batches]


def test_num_samples_ends_the_stream_and_consumed_samples_passes_over(corpus: list[str]) -> None:
    dataset = StreamingDataset(corpus, num_samples=11, **SMALL)
    assert len(dataset) == 11
    rows = rows_of(Loader(dataset, 2))
    assert len(rows) == 10
    assert rows_of(Loader(dataset, 2, consumed_samples=4)) == rows[4:]
