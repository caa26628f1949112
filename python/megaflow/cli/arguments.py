"""Flags of the preprocessing commands: Megatron's names, and what an unknown one probably meant."""

import argparse
import difflib
import os
from collections.abc import Sequence
from typing import NoReturn

from megaflow.cli import exit_codes
from megaflow.errors import ConfigError
from megaflow.preprocessing import PreprocessOptions
from megaflow.shards import MAX_SHARDS

_NO_EFFECT = {
    "dataset_impl": "--dataset-impl: every pair is memory-mapped",
    "tokenizer_hf_no_use_fast": "--tokenizer-hf-no-use-fast: there is one implementation of each tokenizer",
    "trust_remote_code": "--trust-remote-code: no code of a tokenizer is ever run",
    "use_gigatoken": "--use-gigatoken: there is one implementation of each tokenizer",
}


MAX_WORKERS = 1024


class Parser(argparse.ArgumentParser):
    """Raises ConfigError, and names the nearest known flag."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError instead of ending the process."""
        raise ConfigError(message)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses all arguments.

        Raises:
            ConfigError: for an unknown flag or a value that does not fit.
        """
        found, unknown = self.parse_known_args(arguments)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; the nearest known one is {near[0]}" if near else ""
            raise ConfigError(f"unknown argument {unknown[0]}{hint} (--help lists all)")
        return found


KEPT = "What a stopped job has done stays in PREFIX.partial, and the same\ncommand goes on from there."


def build_parser(prog: str, *, megatron_defaults: bool) -> Parser:
    """The parser of `megaflow-preprocess`, or of `tools/preprocess_data.py` with Megatron-LM's defaults."""
    parser = Parser(
        prog=prog,
        description="Turn text (JSON lines, Parquet, Arrow, plain text; compressed or not) into Megatron's .bin/.idx.",
        epilog=f"{exit_codes.TABLE} {KEPT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(megatron_defaults=megatron_defaults)
    _add_files(parser)
    _add_tokenizer(parser)
    _add_documents(parser, megatron_defaults)
    _add_job(parser)
    _add_no_effect(parser)
    return parser


def _add_files(parser: Parser) -> None:
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="read in this order: a file, a folder, a pattern, @list, - (standard input), or a URL (s3:// gs:// hf:// https://)",
    )
    group.add_argument("--input", nargs="+", default=[], metavar="INPUT", help="the same, as a flag")
    group.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text", "text-lines", "parquet", "arrow", "arrow-stream"),
        default="auto",
        help="auto: the first bytes decide; text: a document a file; text-lines: a document a line (default: auto)",
    )
    group.add_argument(
        "--output-prefix",
        metavar="PREFIX",
        help="names PREFIX_KEY_document.bin/.idx/.json (default: the one input's name)",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns that hold text, a.b for nested ones; a pair each (default: text)",
    )


def _add_tokenizer(parser: Parser) -> None:
    group = parser.add_argument_group("tokenizer (default: GPT-2's, which comes with megaflow)")
    group.add_argument("--tokenizer", metavar="PATH", help="any tokenizer file or folder; content decides what it is")
    group.add_argument("--tokenizer-type", metavar="TYPE", help="Megatron's name of the kind (default: by content)")
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="a tokenizer.json, SentencePiece .model, tiktoken ranks, or a folder",
    )
    group.add_argument("--vocab-file", "--vocab", metavar="FILE", help="for GPT2BPETokenizer: JSON vocabulary")
    group.add_argument("--merge-file", metavar="FILE", help="for GPT2BPETokenizer: merges")
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="HuggingFaceTokenizer: do not let the post-processor add tokens such as a BOS",
    )


def _add_documents(parser: Parser, megatron_defaults: bool) -> None:
    group = parser.add_argument_group("documents")
    group.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=not megatron_defaults,
        help="append the end-of-document token to each document",
    )
    group.add_argument(
        "--add-bos", action="store_true", help="put the tokenizer's BOS before each document (default: no BOS)"
    )
    group.add_argument(
        "--add-eos",
        action="store_true",
        help="put the tokenizer's EOS behind each document, before the end-of-document token (default: no EOS)",
    )
    group.add_argument("--eod-token", metavar="TOKEN", help="the end-of-document token (default: the tokenizer's)")
    group.add_argument(
        "--empty-documents",
        choices=("boundary", "eod"),
        default="boundary",
        help="an empty document is a boundary without a sequence, or one end-of-document token (default: boundary)",
    )
    policy = "encode" if megatron_defaults else "text"
    group.add_argument(
        "--special-tokens-in-text",
        choices=("text", "encode", "error"),
        default=policy,
        help=f"what text that spells a special token becomes (default: {policy})",
    )
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="cut each text into sentences, a sequence each: PREFIX_KEY_sentence",
    )
    group.add_argument(
        "--keep-newlines", action="store_true", help="with --split-sentences: keep the white space behind a sentence"
    )
    group.add_argument("--lang", default="english", metavar="NAME", help="with --split-sentences: NLTK's Punkt model")
    group.add_argument(
        "--on-bad-record",
        choices=("error", "skip"),
        default="error",
        help="stop at a record without text, or write it to PREFIX.rejects.jsonl and go on (default: error)",
    )
    group.add_argument(
        "--utf8",
        choices=("error", "replace"),
        default="error",
        help="bytes that are not UTF-8 make a record bad, or become U+FFFD (default: error)",
    )
    group.add_argument("--max-bad-records", type=int, metavar="N", help="with skip: stop after more than N")


def _add_job(parser: Parser) -> None:
    from megaflow import __version__

    group = parser.add_argument_group("job")
    group.add_argument("--workers", type=int, metavar="N", help="threads that tokenize (default: one a processor)")
    group.add_argument("--resume", action="store_true", help="go on with an interrupted job (the default; for scripts)")
    group.add_argument("--restart", action="store_true", help="throw away what an interrupted job has done")
    group.add_argument(
        "--journal-every",
        type=float,
        default=15.0,
        metavar="S",
        help="seconds between two entries of the journal that a killed job goes on from (default: 15)",
    )
    group.add_argument(
        "--shard", metavar="I/N", help="do part I of N (from 0) into PREFIX_shard_...; megaflow merge joins them"
    )
    group.add_argument(
        "--executor", choices=("threads", "ray"), default="threads", help="where the work runs (default: threads)"
    )
    group.add_argument("--num-shards", type=int, metavar="N", help="with --executor ray: parts to cut the inputs into")
    group.add_argument("--log-interval", type=int, metavar="N", help="a line of progress every N documents")
    group.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="P",
        help="Megatron's order of documents: lines 0, P, 2P ..., then 1, P+1 ..., unless --keep-sequential-samples",
    )
    group.add_argument("--keep-sequential-samples", action="store_true", help="documents keep the order of the input")
    group.add_argument("--version", action="version", version=f"megaflow {__version__}")


def _add_no_effect(parser: Parser) -> None:
    group = parser.add_argument_group("accepted for Megatron's command lines, without effect")
    group.add_argument("--dataset-impl", choices=("mmap", "lazy", "cached", "infer"), help=argparse.SUPPRESS)
    for name in _NO_EFFECT:
        if name != "dataset_impl":
            group.add_argument("--" + name.replace("_", "-"), action="store_true", help=argparse.SUPPRESS)


def notes_on(arguments: argparse.Namespace) -> list[str]:
    """A line for each argument that was accepted and means nothing."""
    notes = [f"no effect: {text}" for name, text in _NO_EFFECT.items() if getattr(arguments, name)]
    if arguments.keep_newlines and not arguments.split_sentences:
        notes.append("no effect: --keep-newlines without --split-sentences")
    return notes


def options_of(arguments: argparse.Namespace) -> tuple[list[str], PreprocessOptions]:
    """Inputs and options of parsed arguments.

    Raises:
        ConfigError: if an argument asks for what this version does not have, or no input is named.
    """
    if arguments.partitions < 1:
        raise ConfigError(f"--partitions must be at least 1, got {arguments.partitions}")
    if arguments.resume and arguments.restart:
        raise ConfigError("--resume and --restart contradict each other")
    if arguments.max_bad_records is not None and arguments.on_bad_record != "skip":
        raise ConfigError("--max-bad-records needs --on-bad-record skip")
    inputs = [*arguments.inputs, *arguments.input]
    if not inputs:
        raise ConfigError("no input: name a file, for example: megaflow-preprocess corpus.jsonl")
    is_hugging_face = arguments.tokenizer_type == "HuggingFaceTokenizer"
    given = {} if arguments.workers is None else {"workers": arguments.workers}
    for flag, value, least, most in (
        ("--workers", arguments.workers, 1, MAX_WORKERS),
        ("--max-bad-records", arguments.max_bad_records, 0, 2**63 - 1),
        ("--log-interval", arguments.log_interval, 1, 2**63 - 1),
        ("--num-shards", arguments.num_shards, 1, MAX_SHARDS),
        ("--journal-every", arguments.journal_every, 0, 10**9),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{flag} must be from {least} to {most}, got {value}")
    options = PreprocessOptions(
        output_prefix=None if arguments.output_prefix is None else os.fspath(arguments.output_prefix),
        json_keys=tuple(arguments.json_keys),
        input_format=arguments.input_format,
        invalid_utf8=arguments.utf8,
        restart=arguments.restart,
        journal_every_s=arguments.journal_every,
        append_eod=arguments.append_eod,
        add_bos=arguments.add_bos,
        add_eos=arguments.add_eos,
        eod_token=arguments.eod_token,
        empty_documents=arguments.empty_documents,
        split_sentences=arguments.split_sentences,
        keep_newlines=arguments.keep_newlines,
        language=arguments.lang,
        on_bad_record=arguments.on_bad_record,
        max_bad_records=arguments.max_bad_records,
        special_tokens_in_text=arguments.special_tokens_in_text,
        add_special_tokens=arguments.megatron_defaults
        and is_hugging_face
        and not arguments.tokenizer_hf_no_include_special_tokens,
        allow_no_documents=arguments.megatron_defaults,
        **given,
    )
    return inputs, options
