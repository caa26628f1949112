"""Small SentencePiece models of every kind, written here field by field, and texts that try them.

Field numbers and kinds: sentencepiece_model.proto of google/sentencepiece.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE, WORD, CHAR = 1, 2, 3, 4
MARK = "\u2581"
SPEECH = (
    "the theatre then thanked the other brother; they gather there, neither here nor there. another mother bathes the "
    "tether in the weather \u4e2d\u6587\u4e2d \u00e9t\u00e9 tete 1221 122 the thing, that thing, nothing"
)


class Piece(NamedTuple):
    """An entry of a vocabulary."""

    text: str
    score: float
    kind: int = NORMAL


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def model(
    pieces: Iterable[Piece], kind: int, *, byte_fallback: bool = False, suffix: bool = False, plain: bool = False
) -> bytes:
    """A `.model` file.

    Args:
        pieces: the vocabulary; `<unk>`, `<s>` and `</s>` come before it, and the 256 bytes under `byte_fallback`.
        kind: `UNIGRAM`, `BPE`, `WORD` or `CHAR`.
        byte_fallback: whether unknown characters become bytes.
        suffix: whether the mark of a blank stands at the end of words.
        plain: no blank in front, and no blanks removed.
    """
    first = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    if byte_fallback:
        first += [Piece(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    out = b""
    for piece in (*first, *pieces):
        score = struct.pack("<f", piece.score)
        body = _message(1, piece.text.encode()) + _varint(2 << 3 | 5) + score + _number(3, piece.kind)
        out += _message(1, body)
    out += _message(2, _number(3, kind) + _number(24, suffix) + _number(35, byte_fallback))
    return out + _message(3, _number(3, not plain) + _number(4, not plain) + _number(5, 1))


def substrings(longest: int) -> list[str]:
    """Parts of the words of `SPEECH`, marks in front, that occur twice, the frequent ones first; and all characters."""
    words = [MARK + word for word in SPEECH.split()]
    parts = Counter(
        word[at : at + size] for word in words for size in range(1, longest + 1) for at in range(len(word) - size + 1)
    )
    kept = [part for part, count in parts.items() if count > 1 or len(part) == 1]
    return sorted(kept, key=lambda part: (-parts[part] * len(part), part))


def with_kind(pieces: list[Piece], kind: int, texts: Iterable[str]) -> list[Piece]:
    """The pieces, those of `texts` as another kind; texts that are no piece come at the end."""
    wanted = list(texts)
    known = {piece.text for piece in pieces}
    changed = [piece._replace(kind=kind) if piece.text in wanted else piece for piece in pieces]
    return changed + [Piece(text, 0.0, kind) for text in wanted if text not in known]


def models() -> dict[str, bytes]:
    """One model of each kind that decides ids in a way of its own."""
    parts = substrings(5)
    bpe = [Piece(part, -float(rank)) for rank, part in enumerate(parts)]
    scores = {part: -3.7 - 0.37 * rank**0.5 - 2.1 * (len(part) == 1) for rank, part in enumerate(parts)}
    unigram = [Piece(part, score) for part, score in scores.items()]
    # All rows of a text have the same sum but for rounding; and sums pass 100,000, where SentencePiece starts anew.
    steep = [Piece(part, sum(-1000.037 - 0.713 * (ord(letter) % 13) for letter in part)) for part in parts]
    characters = [Piece(part, -float(rank)) for rank, part in enumerate(substrings(1))]
    words = [MARK + word for word in dict.fromkeys(SPEECH.split())]
    unused = ["the", f"{MARK}the", "ther", "th", "er", "e", f"{MARK}t", "other", "in"]
    own = ["the", "<x>", f"{MARK}nothing", "ing th", "\uff26"]
    word_model = [Piece(word, -float(rank)) for rank, word in enumerate(words)]
    return {
        "bpe": model(bpe, BPE),
        "bpe unused": model(with_kind(bpe, UNUSED, unused), BPE),
        "bpe unused, all but characters": model(with_kind(bpe, UNUSED, [p for p in parts if len(p) > 1][::2]), BPE),
        "bpe unused, bytes": model(with_kind(bpe, UNUSED, [*unused, MARK]), BPE, byte_fallback=True),
        "bpe without mark, bytes": model([p for p in bpe if p.text != MARK], BPE, byte_fallback=True, plain=True),
        "bpe user-defined": model(with_kind(bpe, USER_DEFINED, own), BPE),
        "bpe user-defined and unused": model(with_kind(with_kind(bpe, UNUSED, unused[1:]), USER_DEFINED, own), BPE),
        "bpe control": model(with_kind(bpe, CONTROL, ["e", "th", "the"]), BPE),
        "unigram": model(unigram, UNIGRAM),
        "unigram unused": model(with_kind(unigram, UNUSED, unused), UNIGRAM),
        "unigram user-defined": model(with_kind(unigram, USER_DEFINED, own), UNIGRAM),
        "unigram steep": model(steep, UNIGRAM),
        "unigram steep, bytes": model([p for p in steep if p.text != MARK], UNIGRAM, byte_fallback=True, plain=True),
        "word": model(word_model, WORD),
        "word unused": model(with_kind(word_model, UNUSED, words[::3]), WORD),
        "word suffix": model(word_model, WORD, suffix=True),
        "word bytes": model(word_model, WORD, byte_fallback=True),
        "char": model(characters, CHAR),
        "char unused": model(with_kind(characters, UNUSED, ["t", "e"]), CHAR),
        "char user-defined": model(with_kind(characters, USER_DEFINED, own), CHAR, plain=True),
        "char bytes": model(characters, CHAR, byte_fallback=True),
    }


def texts() -> list[str]:
    """The speech, and 400 short and long mixtures of its words with what is odd."""
    generator = random.Random(7)
    pool = [
        *SPEECH.split(),
        "the",
        "th",
        "e",
        " ",
        "  ",
        "<x>",
        "</s>",
        "<unk>",
        MARK,
        "\U0001f600",
        "\u65e5",
        "\uff26",
    ]
    pool += ["\n", "\t", "\x01", "Z", "ing th", "nothing", "<0x41>"]
    made = [SPEECH, "", " ", "  the  ", SPEECH * 20]
    for _ in range(400):
        joint = generator.choice(["", " ", " "])
        made.append(joint.join(generator.choices(pool, k=generator.randrange(1, 60))))
    return made
