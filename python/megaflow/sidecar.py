"""The `.json` beside a pair: where it came from."""

import json
import os
from pathlib import Path
from typing import Any

from megaflow.errors import DataFormatError, FileAccessError


def read_sidecar(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Content of `PREFIX.json`.

    Args:
        prefix: full prefix of a pair, such as `corpus_text_document`.

    Returns:
        The sidecar, or None for a pair without one (made by Megatron-LM, for example).

    Raises:
        DataFormatError: if the file is not a sidecar of a version that is known.
        FileAccessError: if it cannot be read.
    """
    path = Path(f"{os.fspath(prefix)}.json")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DataFormatError(f"{path}: expected a sidecar in UTF-8, byte {error.start} is not") from None
    except OSError as error:
        raise FileAccessError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataFormatError(f"{path}: expected the JSON sidecar of a token file: {error}") from None
    if not isinstance(content, dict) or content.get("format_version") != 1:
        version = content.get("format_version") if isinstance(content, dict) else None
        raise DataFormatError(f"{path}: expected a sidecar of format_version 1, found {version!r}")
    return content
