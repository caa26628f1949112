"""Text to token ids and back."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow import _core
from megaflow.errors import ConfigError, MissingFileError, TokenizerError, tell_break
from megaflow.processors import count_processors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GPT2 = "GPT2BPETokenizer"
HUGGING_FACE = "HuggingFaceTokenizer"
SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TIKTOKEN = "TikTokenizer"
TYPES = (GPT2, HUGGING_FACE, *SENTENCE_PIECE, TIKTOKEN)

StrPath = str | os.PathLike[str]


class Tokenizer:
    """A tokenizer: shared by threads, safe to use after fork, pickled by its files."""

    def __init__(self, core: _core.Tokenizer, tokenizer_type: str) -> None:
        self._core = core
        self.type = tokenizer_type
        """Megatron's name of the kind, such as `GPT2BPETokenizer` or `HuggingFaceTokenizer`."""

    @classmethod
    def gpt2(cls) -> Tokenizer:
        """GPT-2's tokenizer, whose files come with this package: 50,257 ids, end of document 50256."""
        folder = Path(str(files("megaflow"))) / "data" / "gpt2"
        return cls(_core.Tokenizer.load(folder / "vocab.json", folder / "merges.txt"), GPT2)

    @classmethod
    def from_file(cls, path: StrPath) -> Tokenizer:
        """From a `tokenizer.json`, a SentencePiece `.model`, tiktoken ranks, or a folder that holds a tokenizer.

        Content decides what a file is. A folder may also hold `vocab.json` and `merges.txt`.

        Raises:
            MissingFileError: if there is nothing at `path`.
            TokenizerError: if it is no tokenizer; the message names the file and what was found in it.
        """
        core = _core.Tokenizer.load(Path(path))
        if len(core.files) == 2:
            return cls(core, TIKTOKEN if _has_ranks(core.files) else GPT2)
        return cls(core, HUGGING_FACE)

    @classmethod
    def from_name(cls, name: str, *, revision: str | None = None) -> Tokenizer:
        """From a repository `org/name` of the Hugging Face hub: from its local cache, or downloaded into it.

        Raises:
            ConfigError: if the package huggingface_hub is missing.
            MissingFileError: if the repository has no tokenizer, or cannot be reached and is not in the cache.
            TokenizerError: as `from_file`.
        """
        try:
            from huggingface_hub import snapshot_download
        except (Exception, SystemExit) as error:  # missing, or whatever a broken package raises
            broken = tell_break(error, "huggingface_hub")
            found = f"{name}: tokenizers are fetched by name with the package huggingface_hub{broken}"
            raise ConfigError(f"{found}: pip install huggingface_hub") from None
        wanted = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"]
        wanted += ["tekken.json", "*.tiktoken", "tiktoken.model", "tiktoken_config.json"]
        try:
            folder = snapshot_download(name, revision=revision, allow_patterns=wanted)
        except (OSError, ValueError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise MissingFileError(
                f"{name}: not in the local cache of the Hugging Face hub and not to be fetched ({first}); download it "
                "where there is a network, or give the tokenizer's file"
            ) from None
        return cls.from_file(folder)

    @classmethod
    def from_files(
        cls,
        *,
        tokenizer_type: str | None = None,
        tokenizer_model: StrPath | None = None,
        vocab_file: StrPath | None = None,
        merge_file: StrPath | None = None,
    ) -> Tokenizer:
        """From Megatron's arguments; without any of them, GPT-2's tokenizer.

        Args:
            tokenizer_type: one of `TYPES`, or None to tell by what is given.
            tokenizer_model: a `tokenizer.json`, a SentencePiece `.model`, tiktoken ranks, or a folder that holds one.
            vocab_file: GPT-2's JSON vocabulary, whatever its name.
            merge_file: GPT-2's merges.

        Raises:
            ConfigError: if the arguments contradict one another.
            MissingFileError, TokenizerError: as `from_file`.
        """
        given = [
            name for name, value in (("--vocab-file", vocab_file), ("--merge-file", merge_file)) if value is not None
        ]
        if tokenizer_model is not None and given:
            raise ConfigError(f"--tokenizer-model and {given[0]} name two tokenizers; give one of them")
        if tokenizer_type not in (None, *TYPES):
            raise ConfigError(f"--tokenizer-type {tokenizer_type} is not available; there are {', '.join(TYPES)}")
        if tokenizer_type not in (None, GPT2) and tokenizer_model is None:
            raise ConfigError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model: its file or folder")
        if tokenizer_model is not None:
            tokenizer = cls.from_file(tokenizer_model)
            if tokenizer_type == GPT2 and tokenizer.type != GPT2:
                raise ConfigError(
                    f"{os.fspath(tokenizer_model)}: --tokenizer-type {GPT2} needs a JSON vocabulary and its merges, "
                    f"found another tokenizer; leave the type out, or name {HUGGING_FACE}"
                )
            tokenizer.type = tokenizer_type or tokenizer.type
            return tokenizer
        if len(given) == 1 and merge_file is not None:
            raise ConfigError("--merge-file needs the vocabulary that the merges belong to: --vocab-file")
        if vocab_file is None:
            return cls.gpt2()
        if merge_file is None:
            return cls.from_file(vocab_file)
        return cls(_core.Tokenizer.load(Path(vocab_file), Path(merge_file)), GPT2)

    @classmethod
    def _reread(cls, files: Sequence[str]) -> Tokenizer:
        """From the files that a tokenizer said it was read from."""
        if len(files) == 2 and not _has_ranks(files):
            return cls.from_files(vocab_file=files[0], merge_file=files[1])
        return cls.from_file(files[0])

    def encode(
        self,
        text: str,
        *,
        special_tokens_in_text: str = "text",
        add_special_tokens: bool = False,
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> npt.NDArray[np.uint32]:
        """Token ids of a text.

        Args:
            text: any text.
            special_tokens_in_text: what text that spells a special token becomes: `text` (ordinary text), `encode` (the
                token) or `error`.
            add_special_tokens: whether the tokenizer's post-processor adds its tokens, often a BOS.
            add_bos: whether `bos_id` goes before the text.
            add_eos: whether `eos_id` goes behind the text.

        Returns:
            uint32 `[tokens]`.

        Raises:
            TokenizerError: if tokens are to be added and the tokenizer has none to add (`added_special_tokens`,
                `bos_id`, `eos_id`), or the post-processor would add the BOS or EOS a second time; under `error`, if the
                text spells a special token; if the text has a lone surrogate.
        """
        try:
            return self._core.encode(
                text,
                special_tokens_in_text=special_tokens_in_text,
                add_special_tokens=add_special_tokens,
                add_bos=add_bos,
                add_eos=add_eos,
            )
        except UnicodeEncodeError as error:
            raise _lone_surrogate(error, "the text") from None

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        special_tokens_in_text: str = "text",
        add_special_tokens: bool = False,
        add_bos: bool = False,
        add_eos: bool = False,
        threads: int | None = None,
        cache_bytes: int = 64 << 20,
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Token ids of many texts, on several threads, without a Python object for each token.

        Args:
            texts: any texts; the GIL is released while they are encoded.
            special_tokens_in_text: as for `encode`.
            add_special_tokens: as for `encode`.
            add_bos: as for `encode`, before each text.
            add_eos: as for `encode`, behind each text.
            threads: by default (None or 0) one for each processor; the result does not depend on it.
            cache_bytes: most bytes that the word cache of one thread may take. Caches stay warm for the next call with
                the same settings, so this tokenizer holds their memory, one for each processor at most. What they leave
                of it, the memory of `ids` that nobody reads any more may take, for the next call.

        Returns:
            ids: uint32 `[tokens]`, one text after the other.
            offsets: int64 `[texts + 1]`; text `i` has `ids[offsets[i]:offsets[i + 1]]`.

        Raises:
            ConfigError: if `threads` or `cache_bytes` is negative.
            TokenizerError: as `encode`, for the first text that cannot be encoded.
        """
        texts = list(texts)
        for name, number in (("threads", threads or 0), ("cache_bytes", cache_bytes)):
            if number < 0:
                raise ConfigError(f"{name} must be 0 or more, got {number}")
        try:
            return self._core.encode_batch(
                texts,
                special_tokens_in_text=special_tokens_in_text,
                add_special_tokens=add_special_tokens,
                add_bos=add_bos,
                add_eos=add_eos,
                threads=min(threads or count_processors(), sys.maxsize),
                cache_bytes=min(cache_bytes, sys.maxsize),
            )
        except UnicodeEncodeError as error:
            raise _lone_surrogate(error, f"text {texts.index(error.object)}") from None

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of token ids, special tokens included.

        Args:
            ids: whole numbers `[tokens]`.

        Raises:
            TokenizerError: for an id outside the vocabulary, and for anything but one row of whole numbers.
        """
        import numpy as np  # here: commands that only encode start without it

        numbers = np.asarray(ids)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            found = f"{numbers.dtype} of shape {numbers.shape}"
            raise TokenizerError(f"expected one row of whole numbers as token ids, found {found}")
        outside = numbers[(numbers < 0) | (numbers >= self.vocab_size)]
        if outside.size:
            raise TokenizerError(f"token id {outside[0]} is outside the vocabulary of {self.vocab_size} ids")
        return self._core.decode(numbers.tolist())

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text, None if there is none."""
        return self._core.token_id(token)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._core.vocab_size

    @property
    def eod_id(self) -> int | None:
        """Id that ends a document: the EOS that the tokenizer declares, else the first of the known names."""
        eod = self._core.eod()
        return None if eod is None else eod[1]

    @property
    def bos_id(self) -> int | None:
        """Id that `add_bos` puts before a text; None if there is none.

        It is the `bos_token` of a `tokenizer_config.json` beside the tokenizer's file, else what the file itself
        declares (SentencePiece, tekken), else the first known name, such as `<s>`, that is a token of its own.

        Raises:
            TokenizerError: if the declared token is not in the vocabulary.
        """
        bos = self._core.bos()
        return None if bos is None else bos[1]

    @property
    def eos_id(self) -> int | None:
        """Id that `add_eos` puts behind a text, found as `bos_id`; None if there is none."""
        eos = self._core.eos()
        return None if eos is None else eos[1]

    @property
    def special_ids(self) -> list[int]:
        """Ids of the special tokens, in rising order."""
        return self._core.special_ids

    @property
    def added_special_tokens(self) -> list[int]:
        """Ids that the post-processor adds to each text if that is asked for, such as a BOS; often there are none."""
        return self._core.added_special_tokens()

    @property
    def fingerprint(self) -> str:
        """SHA-256 over vocabulary, merges and rules: equal for two files that describe the same tokenizer."""
        return self._core.fingerprint

    @property
    def engine(self) -> str:
        """Which code turns text into ids."""
        return self._core.engine

    def __repr__(self) -> str:
        return f"Tokenizer({self.type}, {self.vocab_size} ids, {self.engine})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.type, [str(path) for path in self._core.files], self.fingerprint)


def _lone_surrogate(error: UnicodeEncodeError, which: str) -> TokenizerError:
    """What is wrong with a string that is no Unicode text."""
    half = ascii(error.object[error.start])
    return TokenizerError(
        f"{which} has half of a surrogate pair, {half}, at character {error.start}, and cannot be encoded; replace it, "
        'for example with text.encode("utf-8", "replace").decode()'
    )


def _has_ranks(files: Sequence[StrPath]) -> bool:
    """Whether the files of a tokenizer are tiktoken's: ranks, and beside them the split rule, which loading finds."""
    return len(files) == 2 and Path(files[1]).name == "tiktoken_config.json"


def _load(tokenizer_type: str, paths: list[str], fingerprint: str) -> Tokenizer:
    """What a pickle becomes: the same files read again, if they still hold the same tokenizer."""
    named = paths[:1] if _has_ranks(paths) else paths
    core = _core.Tokenizer.load(*(Path(path) for path in named))
    if core.fingerprint != fingerprint:
        raise TokenizerError(
            f"{paths[0]}: holds another tokenizer than the one that was pickled: its fingerprint is "
            f"{core.fingerprint}, that of the pickled one {fingerprint}; put the file back, or make the tokenizer anew"
        )
    return Tokenizer(core, tokenizer_type)
