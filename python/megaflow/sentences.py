"""Texts to sentences, by NLTK's Punkt, in processes of their own: pure Python would hold up the threads that tokenize.

`python -m megaflow.sentences LANGUAGE keep|drop` is such a process: a JSON string a line in, a JSON list of its
sentences a line out.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megaflow.errors import ConfigError, tell_break

if TYPE_CHECKING:
    from megaflow.preprocessing import PreprocessOptions

SLICE_CHARACTERS = 1_000_000
"""Texts are cut into slices of this size first, as in Megatron-LM: a sentence across a cut is cut."""


def load_punkt(language: str, *, keep_newlines: bool) -> Callable[[str], list[str]]:
    """A function from a text to its sentences.

    Args:
        language: name of a Punkt model among NLTK's data, such as `english`.
        keep_newlines: whether the white space behind a sentence stays in it; else it is dropped.

    Raises:
        ConfigError: if the package nltk or the model is missing.
    """
    try:
        from nltk.tokenize import punkt
    except (Exception, SystemExit) as error:  # missing, or whatever a broken package raises
        found = f"--split-sentences needs the package nltk{tell_break(error, 'nltk')}"
        raise ConfigError(f"{found}: pip install 'megaflow[sentences]'") from None
    try:
        model = punkt.PunktTokenizer(language)
    except (LookupError, ValueError):
        raise ConfigError(
            f"--lang {language}: NLTK's data have no Punkt model of this name here. `python -m nltk.downloader "
            "punkt_tab` fetches all of them into ~/nltk_data, once; where there is no network, copy that folder from "
            "elsewhere and let NLTK_DATA name it"
        ) from None
    if not keep_newlines:
        return model.tokenize  # type: ignore[no-any-return]

    class KeepsWhiteSpace(punkt.PunktLanguageVars):  # type: ignore[misc]
        """Punkt's pattern of a possible end, which also takes in the white space behind it."""

        _period_context_fmt = r"\S*" + punkt.PunktLanguageVars._period_context_fmt.replace(
            "(?=(?P<after_tok>", r"\s*(?=(?P<after_tok>"
        ).replace(r"\s+(?P<next_tok>", "(?P<next_tok>")

    return punkt.PunktSentenceTokenizer(train_text=model._params, lang_vars=KeepsWhiteSpace()).tokenize  # type: ignore[no-any-return]


def split_slices(split: Callable[[str], list[str]], text: str) -> list[str]:
    """Sentences of all slices of a text."""
    slices = (text[begin : begin + SLICE_CHARACTERS] for begin in range(0, len(text), SLICE_CHARACTERS))
    return [sentence for part in slices for sentence in split(part)]


class SplitterPool:
    """Processes that split, one for each thread that asks. `split` may be called from several threads at once."""

    def __init__(self, language: str, *, keep_newlines: bool, size: int) -> None:
        self.name = f"nltk punkt {language}, white space {'kept' if keep_newlines else 'dropped'}"
        self._command = [sys.executable, "-m", "megaflow.sentences", language, "keep" if keep_newlines else "drop"]
        self._idle: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
        for _ in range(size):
            self._idle.put(None)  # started when first needed
        self._started: list[subprocess.Popen[str]] = []

    def split(self, text: str) -> list[str]:
        """Sentences of a text.

        Raises:
            ConfigError: if the process ended; the message has its last words.
        """
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._start()
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps(text) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
            if answer.endswith("\n"):
                sentences: list[str] = json.loads(answer)
                return sentences
            raise BrokenPipeError
        except BrokenPipeError:
            raise ConfigError(self._last_words(worker)) from None
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._started:
            worker.kill()
            worker.communicate()

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        worker = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8")
        self._started.append(worker)
        return worker

    @staticmethod
    def _last_words(worker: subprocess.Popen[str] | None) -> str:
        if worker is None or worker.stderr is None:
            return "the process that splits sentences could not be started"
        words = worker.stderr.read().strip().splitlines()
        return words[-1] if words else f"the process that splits sentences ended with exit code {worker.wait()}"


@contextmanager
def splitter_for(options: PreprocessOptions) -> Iterator[SplitterPool | None]:
    """The splitter that the options ask for, if they ask for one.

    Raises:
        ConfigError: as `load_punkt`.
    """
    if not options.split_sentences:
        yield None
        return
    pool = SplitterPool(options.language, keep_newlines=options.keep_newlines, size=options.workers)
    try:
        pool.split("")  # says before any work if something is missing
        yield pool
    finally:
        pool.close()


def main(arguments: list[str]) -> int:
    """The process: ends when its input does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job, which ends us
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        split = load_punkt(arguments[0], keep_newlines=arguments[1] == "keep")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for line in sys.stdin:
        text: Any = json.loads(line)
        sys.stdout.write(json.dumps(split_slices(split, text)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
