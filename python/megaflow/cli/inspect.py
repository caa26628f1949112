"""`megaflow inspect PREFIX`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaflow.cli import exit_codes
from megaflow.cli.options import (
    add_json,
    add_tokenizer,
    build_parser,
    megabytes,
    named_tokenizer,
    plural,
    print_json,
    show_bytes,
)
from megaflow.dataset import SPLIT_NAMES
from megaflow.errors import ConfigError
from megaflow.inspection import describe, show_document, show_sample

_BAR_WIDTH, _SOURCES_SHOWN, _IDS_SHOWN = 40, 10, 24


def main(arguments: Sequence[str] | None = None, *, prog: str = "megaflow inspect") -> int:
    """The command.

    Returns:
        The exit code; `--help` lists them.
    """

    def command() -> None:
        parsed = _parser(prog).parse(arguments)
        _check(parsed)
        if parsed.run is not None:
            content = _show_iteration(parsed)
            words = _iteration_words
        elif parsed.sample is not None:
            options = {"num_samples": parsed.num_samples, "split": parsed.split, "split_name": parsed.split_name}
            content = show_sample(
                parsed.prefix,
                parsed.sample,
                seq_len=parsed.seq_length,
                seed=parsed.seed,
                tokenizer=named_tokenizer(parsed),
                **options,
            )
            words = _sample_words
        elif parsed.document is not None or parsed.sequence is not None:
            is_sequence = parsed.document is None
            number = parsed.sequence if is_sequence else parsed.document
            tokenizer = named_tokenizer(parsed)
            content = show_document(parsed.prefix, number, tokenizer=tokenizer, as_sequence=is_sequence)
            words = _document_words
        else:
            words = _pair_words
            with show_bytes("counting") as progress:
                content = describe(parsed.prefix, progress=progress)
        print_json(content) if parsed.json else print("\n".join(words(content)))

    return exit_codes.run(prog, command, arguments=arguments)


def _parser(prog: str) -> Any:
    parser = build_parser(prog, "Show what a pair holds, or one document, sequence or training sample of it.")
    parser.add_argument("prefix", nargs="?", metavar="PREFIX", help="the pair, with or without _text_document")
    group = parser.add_argument_group("one of")
    group.add_argument(
        "--document", type=int, metavar="N", help="a document, from 0: its ids, its text, its source line"
    )
    group.add_argument("--sequence", type=int, metavar="N", help="the same for a sequence")
    group.add_argument("--sample", type=int, metavar="N", help="a training sample, from 0; needs --seq-length")
    group = parser.add_argument_group("or, without a prefix, the samples of a training")
    group.add_argument("--run", metavar="DIR", help="run folder: its run.json says which data it was trained on")
    group.add_argument("--iteration", type=int, metavar="N", help="iteration of the log, from 1")
    group = parser.add_argument_group("order of the samples, as in training")
    group.add_argument("--seq-length", type=int, metavar="T", help="tokens of a sample")
    group.add_argument("--num-samples", type=int, metavar="N", help="samples asked for (default: one epoch)")
    group.add_argument("--seed", type=int, default=1234, help="default: 1234")
    group.add_argument("--split", default="1,0,0", metavar="A,B,C", help="shares of the three splits (default: 1,0,0)")
    group.add_argument("--split-name", choices=SPLIT_NAMES, default="train", help="default: train")
    add_tokenizer(parser)
    add_json(parser)
    return parser


def _check(parsed: Any) -> None:
    if (parsed.run is None) != (parsed.iteration is None):
        raise ConfigError("--run and --iteration go together: the run folder, and an iteration of its log")
    if (parsed.run is None) == (parsed.prefix is None):
        raise ConfigError("give a PREFIX, or --run DIR with --iteration N")
    chosen = [name for name in ("document", "sequence", "sample") if getattr(parsed, name) is not None]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]} and --{chosen[1]} exclude each other; give one of them")
    if parsed.sample is not None and parsed.seq_length is None:
        raise ConfigError("--sample needs --seq-length, the tokens of a sample")
    if parsed.sample is None and parsed.seq_length is not None:
        raise ConfigError("--seq-length means something for --sample only")


def _show_iteration(parsed: Any) -> dict[str, Any]:
    from megaflow.origin import find_iteration

    found = find_iteration(parsed.run, parsed.iteration)
    return {
        "run": parsed.run,
        "iteration": found.iteration,
        "first_sample": found.first_sample,
        "num_samples": found.num_samples,
        "samples": [origin.as_dict() | {"places": _places(origin)} for origin in found.origins()],
    }


def _places(origin: Any) -> list[str | None]:
    return [None if piece.origin is None else str(piece.origin) for piece in origin.pieces]


def _iteration_words(content: dict[str, Any]) -> list[str]:
    last = content["first_sample"] + content["num_samples"] - 1
    place = f"samples {content['first_sample']:,} to {last:,} ({plural(content['num_samples'], 'sample')})"
    lines = [f"{content['run']} iteration {content['iteration']}: {place}"]
    for sample in content["samples"]:
        lines.append(f"sample {sample['sample']:,}")
        for piece, place in zip(sample["pieces"], sample["places"], strict=True):
            first, behind = piece["first_token"], piece["first_token"] + piece["tokens"]
            document = "" if piece["document"] is None else f"document {piece['document']:,}, "
            where = place or f"{piece['dataset']}: source not known: no sidecar names it"
            lines.append(f"  {where} ({document}tokens {first} to {behind})")
    return lines


def _pair_words(content: dict[str, Any]) -> list[str]:
    empty = f" ({content['empty_documents']:,} empty)" if content["empty_documents"] else ""
    size = f"{content['dtype']} ({megabytes(content['bin_bytes'])})"
    mean = content["tokens"] / max(content["documents"], 1)
    lines = [
        content["prefix"],
        f"  documents  {content['documents']:,}{empty}",
        f"  sequences  {content['sequences']:,}",
        f"  tokens     {content['tokens']:,} as {size}, {mean:,.1f} a document",
        f"  tokenizer  {_tokenizer_words(content)}",
    ]
    if not content["sidecar"]:
        lines.append("  sidecar    none: where the tokens came from is not known")
    else:
        stamp = content["verified"]
        words = "no (megaflow verify)" if not stamp else f"{stamp['time']}: {', '.join(stamp['checked'])}"
        lines.append(f"  verified   {words}")
        command = content["command"] or ["unknown"]
        words = shlex.join([Path(command[0]).name, *command[1:]])
        lines.append(f"  made by    megaflow {content['megaflow_version']}: {words}")
        lines += _source_words(content["sources"])
    return [*lines, "tokens of a document", *_plot(content["histogram"])]


def _tokenizer_words(content: dict[str, Any]) -> str:
    record = content["tokenizer"]
    if record is None:
        return "not known"
    eod = "no end of document"
    if record["eod_id"] is not None:
        eod = f"end of document {record['eod_id']} {'appended' if record['append_eod'] else 'not appended'}"
    added = [f"{end.upper()} {record[f'{end}_id']} added, " for end in ("bos", "eos") if record.get(f"add_{end}")]
    kind = f"{record['type']}, {record['vocab_size']:,} ids"
    return f"{kind}, {''.join(added)}{eod}, fingerprint {record['fingerprint'][:16]}"


def _source_words(sources: list[dict[str, Any]]) -> list[str]:
    lines = []
    for source in sources[:_SOURCES_SHOWN]:
        inside = "" if source["range"] is None else f" bytes {source['range'][0]:,} to {source['range'][1]:,}"
        rejected = f", {source['num_rejected']:,} rejected" if source["num_rejected"] else ""
        size = f"{source['format']}, {megabytes(source['content']['bytes'])}"
        first = source["first_document"]
        documents = f"{plural(source['num_documents'], 'document')} from number {first:,}"
        lines.append(f"  source     {source['path']}{inside}: {size}, {documents}{rejected}")
    if len(sources) > _SOURCES_SHOWN:
        lines.append(f"             and {len(sources) - _SOURCES_SHOWN:,} more (--json lists all)")
    return lines


def _plot(classes: list[dict[str, Any]]) -> list[str]:
    """Bars of the documents in each class of length."""
    most = max((row["documents"] for row in classes), default=0)
    lines = []
    for row in classes:
        name = f"{row['from']:,}" if row["from"] == row["to"] else f"{row['from']:,}-{row['to']:,}"
        bar = "#" * (-(-_BAR_WIDTH * row["documents"] // most))
        lines.append(f"  {name:>21} {row['documents']:>13,} {bar}".rstrip())
    return lines


def _document_words(content: dict[str, Any]) -> list[str]:
    begin, end = content["sequences"]
    sequences = (
        "no sequence" if begin == end else f"sequence {begin}" if end - begin == 1 else f"sequences {begin} to {end}"
    )
    return [
        f"{content['prefix']} document {content['document']} ({sequences}, {plural(len(content['ids']), 'token')})",
        f"  source  {content['place'] or 'not known: no sidecar names it'}",
        f"  ids     {_ids(content['ids'])}",
        *_text_words(content),
    ]


def _sample_words(content: dict[str, Any]) -> list[str]:
    size = f"{content['seq_len']} tokens and the next, {plural(len(content['pieces']), 'piece')}"
    lines = [f"{content['prefix']} sample {content['sample']} of {content['samples']:,} ({size})"]
    for piece in content["pieces"]:
        first, count = piece["first_token"], piece["tokens"]
        place = f"tokens {first} to {first + count} of {piece['sequence_tokens']}"
        lines += [
            f"document {piece['document']}, sequence {piece['sequence']}: {place}",
            f"  source  {piece['place'] or 'not known: no sidecar names it'}",
            f"  ids     {_ids(piece['ids'])}",
            *_text_words({**piece, "no_text": content["no_text"]}),
        ]
    return lines


def _ids(ids: list[int]) -> str:
    shown = " ".join(str(number) for number in ids[:_IDS_SHOWN])
    return shown if len(ids) <= _IDS_SHOWN else f"{shown} ... ({len(ids) - _IDS_SHOWN:,} more)"


def _text_words(content: dict[str, Any]) -> list[str]:
    if content["text"] is None:
        return [f"  text    not shown: {content['no_text'] or 'an id is outside the vocabulary'}"]
    return ["  text", *(f"    {line}" for line in content["text"].splitlines())]
