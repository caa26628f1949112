"""Whatever the container, compression or number of threads: the same bytes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pa = pytest.importorskip("pyarrow")

from helpers.containers import LINES, TABLES, table_of, write_lines, write_table  # noqa: E402
from megaflow import IndexedDataset, PreprocessOptions, Tokenizer, preprocess, read_sidecar  # noqa: E402
from megaflow.cli.preprocess import main  # noqa: E402
from megaflow.errors import ConfigError, DataFormatError, MissingFileError  # noqa: E402

TEXTS = [f"Document {number}: zürich 東京 \U0001f642 " + "words " * (number * 7 % 40) for number in range(400)]


def pair_bytes(prefix: Path) -> bytes:
    return b"".join(Path(f"{prefix}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.gpt2()


@pytest.fixture(scope="module")
def lines() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, lines: bytes, tokenizer: Tokenizer) -> bytes:
    folder = tmp_path_factory.mktemp("plain")
    source = write_lines(folder, "in", ".jsonl", lines)
    preprocess(source, PreprocessOptions(workers=1), tokenizer=tokenizer)
    return pair_bytes(folder / "in")


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("ending", [*LINES, *TABLES])
def test_every_container_gives_the_bytes_of_plain_lines(
    ending: str, workers: int, lines: bytes, expected: bytes, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    if ending in LINES:
        source = write_lines(tmp_path, "in", ending, lines)
    else:
        source = write_table(tmp_path, "in", ending, table_of(TEXTS))
    options = PreprocessOptions(output_prefix=str(tmp_path / "out"), workers=workers, block_bytes=5000 * workers)
    report = preprocess(source, options, tokenizer=tokenizer)
    assert pair_bytes(tmp_path / "out") == expected
    assert report.warnings == []
    assert report.input_bytes == source.stat().st_size
    sidecar = read_sidecar(tmp_path / "out_text_document")
    assert sidecar is not None
    [record] = sidecar["sources"]
    formats = {".parquet": "parquet", ".arrow": "arrow", ".arrows": "arrow-stream"}
    assert (record["format"], record["num_records"]) == (formats.get(ending, "jsonl"), len(TEXTS))


def test_members_frames_and_streams_follow_one_another_and_gzip_is_padded_with_zeros(
    lines: bytes, expected: bytes, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    cuts = [0, lines.index(b"\n", 99) + 1, len(lines) // 2, len(lines)]  # at a line, and inside one
    for ending in (".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz"):
        parts = [LINES[ending](lines[begin:end]) for begin, end in pairwise(cuts)]
        for padding in (0, 512) if ending == ".jsonl.gz" else (0,):
            path = tmp_path / f"joined{padding}{ending}"
            path.write_bytes(b"".join(part + bytes(padding) for part in parts))
            preprocess(str(path), PreprocessOptions(output_prefix=str(tmp_path / "joined")), tokenizer=tokenizer)
            assert pair_bytes(tmp_path / "joined") == expected, path.name
    (tmp_path / "rubbish.jsonl.gz").write_bytes(LINES[".jsonl.gz"](lines) + bytes(512) + b"rubbish")
    with pytest.raises(DataFormatError, match=r"rubbish\.jsonl\.gz"):
        preprocess(str(tmp_path / "rubbish.jsonl.gz"), tokenizer=tokenizer)


def test_an_input_that_is_named_twice_is_told(
    lines: bytes, expected: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, link, prefix = tmp_path / "in.jsonl", tmp_path / "link.jsonl", tmp_path / "out"
    path.write_bytes(lines)
    assert main([str(path), str(tmp_path / "*.jsonl"), "--output-prefix", str(prefix)]) == 0
    assert f"warning: {path} is named 2 times; it is read once, at its first place" in capsys.readouterr().err
    assert pair_bytes(prefix) == expected
    link.symlink_to(path)
    assert main([str(path), str(link), "--output-prefix", str(prefix)]) == 0
    assert f"warning: {path} and {link} are the same file; it is read twice" in capsys.readouterr().err
    assert len(pair_bytes(prefix)) > len(expected)
    (tmp_path / "copy.jsonl").write_bytes(lines)
    assert main([str(path), str(tmp_path / "copy.jsonl"), "--output-prefix", str(prefix)]) == 0
    assert "warning" not in capsys.readouterr().err


def test_tables_in_memory_are_sources(expected: bytes, tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = table_of(TEXTS)
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=37))
    dictionary = pa.table({"text": table["text"].dictionary_encode()})
    large = pa.table({"text": table["text"].cast(pa.large_string())})
    for number, source in enumerate([table, reader, dictionary, large, [table.slice(0, 150), table.slice(150)]]):
        options = PreprocessOptions(output_prefix=str(tmp_path / f"t{number}"), workers=2)
        preprocess(source, options, tokenizer=tokenizer)
        assert pair_bytes(tmp_path / f"t{number}") == expected, number
    with pytest.raises(ConfigError, match="gives no name for the output"):
        preprocess(table, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="input 0 is a int"):
        preprocess([3], PreprocessOptions(output_prefix=str(tmp_path / "x")), tokenizer=tokenizer)  # type: ignore[list-item]


def test_standard_input_folders_patterns_and_lists(lines: bytes, expected: bytes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megaflow.cli.preprocess", "-", "--output-prefix", str(tmp_path / "stdin")]
    packed = LINES[".jsonl.zst"](lines)
    run = subprocess.run(command, input=packed, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    assert pair_bytes(tmp_path / "stdin") == expected
    parts = tmp_path / "parts"
    parts.mkdir()
    half = lines.index(b"\n", len(lines) // 2) + 1
    write_lines(parts, "b", ".jsonl.gz", lines[half:])
    write_lines(parts, "a", ".jsonl", lines[:half])
    (parts / "README.md").write_text("not a corpus")
    (tmp_path / "list").write_text(f"{parts}/a.jsonl\n{parts}/b.jsonl.gz\n")
    for number, name in enumerate([str(parts), f"{parts}/*.jsonl*", f"@{tmp_path}/list"]):
        assert main([name, "--output-prefix", str(tmp_path / f"n{number}")]) == 0
        assert pair_bytes(tmp_path / f"n{number}") == expected


def test_remote_files_are_read_through_fsspec(
    lines: bytes, expected: bytes, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    with memory.open("/bucket/in.jsonl.gz", "wb") as file:
        file.write(LINES[".jsonl.gz"](lines))
    buffer = io.BytesIO()
    pa.parquet.write_table(table_of(TEXTS), buffer)
    memory.pipe("/bucket/in.parquet", buffer.getvalue())
    for name in ("memory://bucket/in.jsonl.gz", "memory://bucket/in.parquet", "memory://bucket/*.parquet"):
        prefix = tmp_path / "remote"
        preprocess(name, PreprocessOptions(output_prefix=str(prefix)), tokenizer=tokenizer)
        assert pair_bytes(prefix) == expected, name
    with pytest.raises(MissingFileError, match=r"memory://bucket/gone.jsonl: no (such input|input files)"):
        preprocess("memory://bucket/gone.jsonl", PreprocessOptions(output_prefix=str(tmp_path / "x")))


def test_plain_text_is_a_document_a_file_or_a_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, text in (("a.txt", "one\n\ntwo\n"), ("b.txt", "three")):
        (tmp_path / name).write_text(text)
    counts = {"text": ["one\n\ntwo\n", "three"], "text-lines": ["one", "two", "three"]}
    for kind, texts in counts.items():
        assert main([str(tmp_path), "--input-format", kind, "--no-append-eod", "--output-prefix", f"{tmp_path}/o"]) == 0
        dataset = IndexedDataset(tmp_path / "o_text_document")
        documents = [tokenizer.decode(dataset.document(index)) for index in range(dataset.num_documents)]
        assert documents == texts


def test_a_damaged_container_stops_the_job_even_under_skip(
    lines: bytes, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ending in (".jsonl.gz", ".jsonl.zst", ".jsonl.bz2", ".jsonl.xz", ".parquet", ".arrow", ".arrows"):
        if ending in LINES:
            path = write_lines(tmp_path, "cut", ending, lines)
        else:
            path = write_table(tmp_path, "cut", ending, table_of(TEXTS))
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
        assert main([str(path), "--on-bad-record", "skip", "--output-prefix", str(tmp_path / "out")]) in (4, 5), ending
        assert path.name in capsys.readouterr().err
        assert not (tmp_path / "out_text_document.idx").exists()
        assert main([str(path), "--restart", "--output-prefix", str(tmp_path / "out")]) in (4, 5)


def test_nested_columns_nulls_and_missing_columns_have_words(tokenizer: Tokenizer, tmp_path: Path) -> None:
    table = pa.table({"data": [{"text": "a"}, {"text": None}, None], "n": [1, 2, 3]})
    options = PreprocessOptions(output_prefix=str(tmp_path / "o"), json_keys=("data.text",), on_bad_record="skip")
    report = preprocess(table, options, tokenizer=tokenizer)
    assert (report.records, report.rejected) == (3, {"not-text": 2})
    rejects = [json.loads(line) for line in (tmp_path / "o.rejects.jsonl").read_text().splitlines()]
    assert [reject["row"] for reject in rejects] == [2, 3]
    with pytest.raises(DataFormatError, match='no column "text"; the columns are "data", "n"'):
        preprocess(table, PreprocessOptions(output_prefix=str(tmp_path / "o")), tokenizer=tokenizer)
    with pytest.raises(DataFormatError, match='column "n" is Int64; expected strings'):
        preprocess(table, PreprocessOptions(output_prefix=str(tmp_path / "o"), json_keys=("n",)), tokenizer=tokenizer)


def test_invalid_utf8_can_be_replaced_and_names_that_disagree_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(b'{"text": "a\xffb"}\n')
    assert main([str(path), "--utf8", "replace", "--no-append-eod"]) == 0
    err = capsys.readouterr().err
    assert "the name promises gzip data, the content is not compressed; the content counts" in err
    dataset = IndexedDataset(tmp_path / "in_text_document")
    assert Tokenizer.gpt2().decode(dataset.document(0)) == "a\ufffdb"


def test_python_numbers_in_other_keys_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"score": NaN, "text": "NaN"}\n{"text": "b", "low": -Infinity}\n')
    assert main([str(path)]) == 0
    assert IndexedDataset(tmp_path / "in_text_document").num_documents == 2


def test_a_string_of_parquet_that_is_not_utf8_is_a_bad_record_of_its_own(tmp_path: Path) -> None:
    values = [b"first", b"caf\xe9", "sch\u00f6n".encode(), b"last"]
    binary = pa.array(values * 3, pa.binary())
    strings = pa.Array.from_buffers(pa.string(), len(binary), binary.buffers())
    pytest.importorskip("pyarrow.parquet")
    nested = pa.ListArray.from_arrays(pa.array([0, 2, 4, 12], pa.int32()), strings)
    for name, column, bad in (("plain", strings, [2, 6, 10]), ("list", nested, [1, 3])):
        for encoding in ("dictionary", "plain"):
            path = tmp_path / f"{name}-{encoding}.parquet"
            pa.parquet.write_table(
                pa.table({"text": column}), path, use_dictionary=encoding == "dictionary", row_group_size=7
            )
            prefix = str(tmp_path / f"{name}-{encoding}")
            with pytest.raises(DataFormatError, match=rf"row {bad[0]}: .*UTF-8"):
                preprocess(path, PreprocessOptions(output_prefix=prefix, restart=True))
            report = preprocess(path, PreprocessOptions(output_prefix=prefix, restart=True, on_bad_record="skip"))
            assert report.rejected == {"invalid-utf8": len(bad)}
            rejects = [json.loads(line) for line in Path(f"{prefix}.rejects.jsonl").read_text().splitlines()]
            assert [reject["row"] for reject in rejects] == bad
            mended = PreprocessOptions(output_prefix=prefix, restart=True, invalid_utf8="replace")
            assert preprocess(path, mended).rejected == {}


@pytest.mark.parametrize("kind", ["string", "string_view", "dictionary"])
@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize("form", ["file", "stream"])
def test_a_string_of_arrow_that_is_not_utf8_is_a_bad_record_of_its_own(
    form: str, codec: str | None, kind: str, tmp_path: Path
) -> None:
    values = [b"first", b"caf\xe9", "sch\u00f6n".encode(), b"long enough for a view \xff", b"last"]
    binary = pa.array(values, pa.binary_view() if kind == "string_view" else pa.binary())
    strings = pa.Array.from_buffers(
        pa.string_view() if kind == "string_view" else pa.string(), len(binary), binary.buffers()
    )
    column = strings
    if kind == "dictionary":
        column = pa.DictionaryArray.from_arrays(pa.array(range(5), pa.int8()), strings)
    table = pa.table({"other": ["x", "y"] * 2 + [None], "text": column})
    path = tmp_path / "in.arrow"
    writer = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with writer(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as sink:
        sink.write_table(table)
    prefix = str(tmp_path / "out")
    with pytest.raises(DataFormatError, match=r"row 2: .*UTF-8"):
        preprocess(path, PreprocessOptions(output_prefix=prefix, restart=True))
    report = preprocess(path, PreprocessOptions(output_prefix=prefix, restart=True, on_bad_record="skip"))
    assert report.rejected == {"invalid-utf8": 2}
    rejects = [json.loads(line) for line in Path(f"{prefix}.rejects.jsonl").read_text().splitlines()]
    assert [reject["row"] for reject in rejects] == [2, 4]
    texts = [Tokenizer.gpt2().decode(IndexedDataset(f"{prefix}_text_document").document(row)[:-1]) for row in range(3)]
    assert texts == ["first", "sch\u00f6n", "last"]
    mended = PreprocessOptions(output_prefix=prefix, restart=True, invalid_utf8="replace")
    assert preprocess(path, mended).rejected == {}
