#!/usr/bin/env python3
"""Writes the pages of docs/ that are made from sources: flags, error messages, measured figures.

`python tools/make_pages.py` writes them, `--check` only says which are stale (exit code 1); a test runs the check. The
list of error messages is made when the documentation is built, and no checkout holds it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python")]

from doors import run_door  # noqa: E402
from megaflow_trainer.config import fields, read_command  # noqa: E402
from megaflow_trainer.config.flags import FLAGS, LEGACY, NOT_BUILT  # noqa: E402
from megaflow_trainer.config.hardware import find_gpu  # noqa: E402
from megaflow_trainer.config.help import DERIVED  # noqa: E402
from megaflow_trainer.config.memory import estimate_memory  # noqa: E402
from megaflow_trainer.config.step_time import predict_step  # noqa: E402

NOTE = "<!-- made by tools/make_pages.py: change the source and run it -->\n"
SOURCES = ("python/megaflow", "trainer", "tools")


def make_flags() -> str:
    """Every flag of the trainer."""
    known, docs = fields.list_fields(), fields.read_help()
    lines = [NOTE, "# Flags of the trainer, and what became of Megatron-LM's\n"]
    lines.append(
        "Names are Megatron's where Megatron has the setting. A recipe (`--config`) sets the same fields by the names\n"
        "in the second column. [coming-from.md](coming-from.md) says what differs beyond names.\n"
    )
    for section in fields.sections():
        own = [flag for flag in FLAGS if flag.field.rpartition(".")[0] == section]
        lines += [f"## {section or 'run'}\n", "| flag | field | what | default |", "|---|---|---|---|"]
        for flag in own:
            value = f" (sets {flag.constant})" if flag.is_switch else ""
            default = "" if flag.is_switch else show_default(flag.field, known[flag.field].default)
            lines.append(f"| `{flag.name}` | `{flag.field}` | {escape(docs[flag.field])}{value} | {default} |")
        lines.append("")
    lines += ["## Accepted without effect\n", "| flag | why |", "|---|---|"]
    lines += [f"| `{flag.name}` | {escape(flag.why) or 'a launcher passes it'} |" for flag in LEGACY]
    lines += ["\n## Not in this version\n", "| flags | what | instead |", "|---|---|---|"]
    for item in NOT_BUILT:
        names = [*item.switches, *(name for name, _ in item.valued)]
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {item.feature} | {escape(item.remedy)} |")
    return "\n".join(lines) + "\n"


def show_default(name: str, default: object) -> str:
    """A default in a table."""
    if default is None:
        return "derived" if name in DERIVED else "none"
    return f"`{' '.join(default) or 'none'}`" if isinstance(default, tuple) else f"`{default}`"


def escape(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def make_errors() -> str:
    """Every message of an error, by where it comes from."""
    lines = [NOTE, "# Error messages\n"]
    lines.append(
        "Everything that a user, a file or a cluster can cause ends in one sentence: what, where, what was expected,\n"
        "what was found, what to do. Parts in braces are filled in. [recovery.md](recovery.md) has the exit codes.\n"
    )
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found = list(dict.fromkeys(list_messages(path)))
            if found:
                lines += [f"## `{path.relative_to(ROOT).as_posix()}`\n", *(f"- `{message}`" for message in found), ""]
    for crate in sorted((ROOT / "crates").iterdir()):
        texts = [path.read_text(encoding="utf-8") for path in sorted((crate / "src").rglob("*.rs"))]
        found = [" ".join(text.split()) for text in re.findall(r'#\[error\(\s*"((?:[^"\\]|\\.)*)"', "\n".join(texts))]
        if found:
            cleaned = [message.replace('\\"', '"').replace("`", "'") for message in dict.fromkeys(found)]
            lines += [f"## `crates/{crate.name}`\n", *(f"- `{message}`" for message in cleaned), ""]
    return "\n".join(lines)


def list_messages(path: Path) -> Iterator[str]:
    """What a user may be told: the messages of errors raised and of wrong flags, the faults that checks of a
    configuration (`check_...`) put together, sentences with a remedy that the configuration and `explain_...` return,
    and what doctor does not find good.
    """
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        found: list[ast.AST] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and names_error(node.exc):
            found = list(node.exc.args[:1])
        elif isinstance(node, ast.FunctionDef):
            is_check = node.name.startswith("check_")
            is_description = node.name.startswith("describe_") or path.stem == "help"
            if is_check or node.name.startswith("explain_") or ("config" in path.parts and not is_description):
                texts = list_strings(node)
                found = [part for part in texts if is_check and isinstance(part, ast.JoinedStr)]
                found += [part for part in texts if part not in found and is_sentence(spell(part))]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and tells_fault(node.func):
            found = list(node.args[:1])
        elif isinstance(node, ast.keyword) and node.arg == "fault":
            found = [node.value]
        elif isinstance(node, ast.Call) and names(node, "Line") and spell(node.args[0]) != "ok":
            found = list(node.args[2:])
        yield from (message for message in map(spell, found) if len(message) > 20 and " " in message.strip())


def list_strings(function: ast.FunctionDef) -> list[ast.AST]:
    """Texts that a function makes, but for its docstring, parts of larger texts, and what it raises or tells itself."""
    told = [part for part in ast.walk(function) if names(part, "Line") or isinstance(part, ast.Raise)]
    texts = [part for part in ast.walk(function) if isinstance(part, ast.JoinedStr)]
    inner = {id(part) for owner in [*told, *texts] for part in ast.walk(owner) if part is not owner}
    plain = [part for part in ast.walk(function) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    notes = {id(part.value) for part in ast.walk(function) if isinstance(part, ast.Expr)}
    return [part for part in [*texts, *plain] if id(part) not in inner | notes]


def is_sentence(text: str) -> bool:
    """Whether a text is a whole message: it says what is not so, or ends in what to do."""
    return text[:1] not in tuple(" ;:,") and ("; " in text or " is not " in text)


def names(node: ast.AST, name: str) -> bool:
    """Whether a node calls a function of this name."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def tells_fault(method: ast.Attribute) -> bool:
    """Whether a method is `parser.error`, or adds to a list of faults."""
    return method.attr == "error" or (method.attr == "append" and ast.unparse(method.value).endswith("faults"))


def names_error(call: ast.Call) -> bool:
    """Whether an exception is one of ours, or ends a command."""
    return isinstance(call.func, ast.Name) and (call.func.id.endswith("Error") or call.func.id == "SystemExit")


def spell(node: ast.AST) -> str:
    """A string expression with braces where values go."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(spell(part) if isinstance(part, ast.Constant) else "{...}" for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = spell(node.left) + spell(node.right)
    else:
        text = "{...}"
    return re.sub(r"\s+", " ", text).replace("`", "'") if text.strip() else text


def make_performance() -> str:
    """Figures that were measured, beside what is predicted."""
    lines = [NOTE, "# Measured figures\n"]
    lines.append(
        "Every figure comes from a JSON file in `docs/measured/`, which names device, versions, date and command.\n"
        "Ratios to other tools are in [tokenizers.md](tokenizers.md), [notes](notes/preprocess-measurements.md) and\n"
        "`benches/`, each with its rival in the same run.\n"
    )
    for path in sorted(
        [*(ROOT / "docs/measured").glob("planner_*.json"), *(ROOT / "docs/measured").glob("training_*.json")]
    ):
        content = json.loads(path.read_text(encoding="utf-8"))
        device = content["device"].split()[-1]
        kind = "not compiled" if "--no-compile" in content["flags"] else "compiled"
        lines += [f"## Training steps on one {content['device']}, {kind}\n", f"{content.get('what', '')}.", ""]
        taken = f"torch {content['torch']}, {content['date']}, {content.get('commit', 'the commit of the file')}"
        lines += [f"{taken}, {content['command']} ([JSON](measured/{path.name})).\n"]
        lines += [
            f"| run (`{content['flags']}`) | tokens/s | predicted | peak GiB | by formula |",
            "|---|---|---|---|---|",
        ]
        for run in content["runs"]:
            words = [*run["flags"].split(), *content["flags"].split(), "--train-iters", "1", "--data-path", "x"]
            config, _ = read_command(words, world_size=1)
            memory = sum(estimate_memory(config)[0].values()) / 2**30
            speed = predict_step(config, find_gpu(device)).tokens_per_s
            peak = run["peak_bytes"] / 2**30
            cells = (f"{run['tokens_per_s']:,}", f"{speed:,.0f}", f"{peak:.1f}", f"{memory:.1f}")
            lines.append(f"| `{run['flags']}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "flags.md": make_flags,
    "performance.md": make_performance,
}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, name the stale pages")
    options = parser.parse_args()
    stale = [name for name, make in PAGES.items() if read(name) != make()]
    for name in stale:
        print(f"docs/{name}: {'stale: run python tools/make_pages.py' if options.check else 'written'}")
        if not options.check:
            (ROOT / "docs" / name).write_text(PAGES[name](), encoding="utf-8")
    return int(options.check and bool(stale))


def read(name: str) -> str:
    """A page as it is; empty if there is none."""
    path = ROOT / "docs" / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(run_door(main))
