"""`megaflow stats PREFIX...`."""

from collections.abc import Sequence
from typing import Any

from megaflow.cli import exit_codes
from megaflow.cli.options import add_json, add_tokenizer, build_parser, named_tokenizer, print_json, show_bytes
from megaflow.errors import ConfigError
from megaflow.inspection import statistics


def main(arguments: Sequence[str] | None = None, *, prog: str = "megaflow stats") -> int:
    """The command.

    Returns:
        The exit code; `--help` lists them.
    """

    def command() -> None:
        parser = build_parser(prog, "Count documents, tokens and ids of pairs.")
        parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="pairs, with or without _text_document")
        parser.add_argument("--top", type=int, default=10, metavar="N", help="most frequent ids shown (default: 10)")
        add_tokenizer(parser)
        add_json(parser)
        parsed = parser.parse(arguments)
        if parsed.top < 0:
            raise ConfigError(f"--top must be at least 0, got {parsed.top}")
        tokenizer = named_tokenizer(parsed)
        pairs = []
        for prefix in parsed.prefixes:
            with show_bytes("counting") as progress:
                pairs.append(statistics(prefix, top=parsed.top, tokenizer=tokenizer, progress=progress))
        if parsed.json:
            print_json({"pairs": pairs, "documents": _sum(pairs, "documents"), "tokens": _sum(pairs, "tokens")})
        else:
            print("\n".join([*_table(pairs), *(line for pair in pairs for line in _id_words(pair))]))

    return exit_codes.run(prog, command, arguments=arguments)


def _sum(pairs: list[dict[str, Any]], name: str) -> int:
    return sum(pair[name] for pair in pairs)


def _table(pairs: list[dict[str, Any]]) -> list[str]:
    """A column for each pair, and one for the sum of several."""
    rows: list[tuple[str, list[str]]] = [("", [pair["prefix"].rsplit("/", 1)[-1] for pair in pairs])]
    for name in ("documents", "empty_documents", "sequences", "tokens"):
        rows.append((name.replace("_", " "), [f"{pair[name]:,}" for pair in pairs]))
    rows.append(("type", [pair["dtype"] for pair in pairs]))
    rows.append(("mean length", [f"{pair['mean_length']:,.1f}" for pair in pairs]))
    for share in pairs[0]["lengths"]:
        word = {"p0": "shortest", "p50": "median", "p100": "longest"}.get(share, f"{share[1:]} % are at most")
        rows.append((word, [f"{pair['lengths'][share]:,}" for pair in pairs]))
    rows.append(("distinct ids", [_of(pair["distinct_ids"], pair["vocab_size"]) for pair in pairs]))
    rows.append(("special ids", [_share(pair["special_tokens"], pair["tokens"]) for pair in pairs]))
    if any(pair["impossible_ids"] for pair in pairs):
        rows.append(("impossible ids", [f"{pair['impossible_ids']:,}" for pair in pairs]))
    if len(pairs) > 1:
        summed = {"documents", "empty documents", "sequences", "tokens"}
        totals = {name: f"{_sum(pairs, name.replace(' ', '_')):,}" for name in summed}
        rows = [(name, [*cells, totals.get(name, "all" if not name else "")]) for name, cells in rows]
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(rows[0][1]))]
    return [
        f"{name:<17}" + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for name, cells in rows
    ]


def _of(count: int, size: int | None) -> str:
    return f"{count:,}" if size is None else f"{count:,} of {size:,}"


def _share(count: int | None, total: int) -> str:
    return "not known" if count is None else f"{count:,} ({count / max(total, 1):.2%})"


def _id_words(pair: dict[str, Any]) -> list[str]:
    if not pair["frequent_ids"]:
        return []
    lines = [f"most frequent ids of {pair['prefix']}"]
    for row in pair["frequent_ids"]:
        text = "" if row["text"] is None else f"  {row['text']!r}"
        lines.append(f"  {row['id']:>8} {row['count']:>15,} {row['share']:>7.2%}{text}")
    return lines
