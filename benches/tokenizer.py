#!/usr/bin/env python3
"""The tokenizer engine against the fastest others: speed, adversarial texts, memory, threads, and ids that differ.

    python3 tools/run_benches.py tokenizer                       # makes the rivals' environments, then runs it all
    python benches/tokenizer.py --only real multi --quick        # some sections, less input, one round
    python benches/tokenizer.py --rival-python stable=PATH --rival-python rc=PATH

Every measurement is a fresh process (benches/tokenizer_worker.py) that loads one engine, and the engines take turns.
Speeds are MB of UTF-8 text per CPU second of all threads. `cold`: the first pass over the input, first call included;
`warm`: a later pass over the same. Reading the tokenizer is told apart. Each engine runs its fastest batch call from
Python; ours builds no Python object a token and neither does gigatoken, the others do as their calls do. `megaflow` is
one call over the input, `megaflow-batches` one for each 1,500 documents, as rivals get them; word caches of all engines
last from call to call. Texts that are measured cold get a tokenizer of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measure import machine, save
from tokenizer_inputs import MAKERS, write_big

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("tokenizer_worker.py")
OURS = "megaflow"
ENVIRONMENT_OF = {
    "fastokens": "stable",
    "gigatoken": "stable",
    "tokenizers-rc": "rc",
    "tokenizers": "stable",
    "tiktoken": "stable",
    "sentencepiece": "stable",
}
FAST = (OURS, "fastokens", "gigatoken", "tokenizers-rc")
SLOW = ("tokenizers", "tiktoken")
SLOW_STEP = 10
"""The slow ones get every tenth document: their speed does not depend on what came before."""
MEGABYTE = 1_000_000


class Answer(dict[str, Any]):
    """What a worker said."""


class Setting(NamedTuple):
    """What this run measures with."""

    pythons: dict[str, Path]
    shared: Path
    fetched: Path
    big: Path
    quick: bool
    rounds: int

    def tokenizer(self, name: str) -> Path:
        """File of a tokenizer of the shared test data, or of the fetched ones."""
        own = self.shared / "data" / "tokenizers" / name
        found = [folder for folder in (own, self.fetched / name) if folder.is_dir()]
        if not found:
            sys.exit(f"error: no tokenizer {name} in {own.parent} nor {self.fetched}; run tools/fetch_tokenizers.py")
        files = ("tokenizer.json", "tokenizer.model", "spm.model")
        return next(found[0] / file for file in files if (found[0] / file).is_file())

    def corpus(self, name: str) -> list[str]:
        """Files of an input."""
        corpora = self.shared / "data" / "corpora"
        if name == "big":
            if not self.big.is_file():
                self.big.parent.mkdir(parents=True, exist_ok=True)
                write_big(self.big, 140 * MEGABYTE)
            return [str(self.big)]
        files = {"real": ["prose/prose", "code/code"], "multi": ["multilingual/multi"]}
        return [str(corpora / f"{file}.jsonl") for file in files[name]]

    def step(self, engine: str = OURS) -> int:
        """Every which document of a corpus is used."""
        return (SLOW_STEP if engine in SLOW else 1) * (4 if self.quick else 1)


class Engine:
    """A worker process, asked and answered line by line."""

    def __init__(self, setting: Setting, name: str, tokenizer: Path, threads: int = 1) -> None:
        is_ours = name.startswith(OURS)
        python = sys.executable if is_ours else str(setting.pythons[ENVIRONMENT_OF[name]])
        variables = dict(os.environ, RAYON_NUM_THREADS=str(threads), OMP_NUM_THREADS="1")
        variables["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        if not is_ours:
            variables.pop("PYTHONPATH", None)
        if name == "tiktoken":
            tokenizer = tokenizer.with_name("ranks.tiktoken")
        command = [python, str(WORKER), name, str(tokenizer), str(threads)]
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def ask(self, do: str, **arguments: Any) -> Answer:
        """The answer to one line; an engine that refuses or dies answers with `error`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return Answer(error="the process ended")
        line = self.process.stdout.readline()
        return Answer(json.loads(line)) if line else Answer(error=f"the process ended ({self.process.wait()})")


def one_pass(setting: Setting, name: str, tokenizer: Path, corpus: str, threads: int = 1) -> Answer:
    """Cold and warm pass of one engine in a fresh process."""
    with Engine(setting, name, tokenizer, threads) as engine:
        load = engine.ask("load")
        if "error" in load:
            return load
        texts = engine.ask("texts", file=setting.corpus(corpus), step=setting.step(name))
        first, cold = engine.ask("first"), engine.ask("pass")
        if "error" in cold:
            return cold
        warm = engine.ask("pass")
        return Answer(load=load, first=first, cold=cold, warm=warm, megabytes=texts["bytes"] / MEGABYTE)


def rate(row: Sequence[Answer], key: str, clock: str = "cpu_s") -> float:
    """Median speed of several runs."""
    extra = (lambda run: run["first"][clock]) if key == "cold" else (lambda run: 0.0)
    return median(run["megabytes"] / max(run[key][clock] + extra(run), 1e-9) for run in row)


def speeds(setting: Setting, title: str, tokenizer: Path, corpus: str, engines: Sequence[str]) -> dict[str, Any]:
    """One table of cold and warm speeds, engines in turn."""
    runs: dict[str, list[Answer]] = {name: [] for name in engines}
    for _ in range(setting.rounds):
        for name in engines:
            runs[name].append(one_pass(setting, name, tokenizer, corpus))
    good = {name: row for name, row in runs.items() if not any("error" in run for run in row)}
    print(f"\n### {title}: {good[OURS][0]['megabytes']:.1f} MB, one thread, medians of {setting.rounds} rounds")
    print("| engine | cold | warm | of cold, first call s | load CPU s |\n|---|---|---|---|---|")
    figures = {}
    for name, row in runs.items():
        if name not in good:
            print(f"| {name} | {next(run['error'] for run in row if 'error' in run)} | | | |")
            continue
        cold, warm = rate(row, "cold"), rate(row, "warm")
        first, load = (median(run[key]["cpu_s"] for run in row) for key in ("first", "load"))
        version = row[0]["load"]["version"]
        figures[name] = {"version": version, "cold": cold, "warm": warm, "first_s": first, "load_s": load}
        print(f"| {name} {version} | {cold:.1f} | {warm:.1f} | {first:.2f} | {load:.2f} |", flush=True)
    for key in ("cold", "warm"):
        rivals = {name: figure[key] for name, figure in figures.items() if not name.startswith(OURS)}
        best = max(rivals, key=lambda name: rivals[name])
        print(f"{key}: {figures[OURS][key] / rivals[best]:.2f} x the fastest other, {best}")
    return {"input": corpus, "megabytes": good[OURS][0]["megabytes"], "engines": figures}


def corpus_section(corpus: str, engines: Sequence[str]) -> Callable[[Setting], dict[str, Any]]:
    """A section over one corpus with both byte-level tokenizers."""

    def run(setting: Setting) -> dict[str, Any]:
        chosen = {"GPT-2": "gpt2", "100k vocabulary, Llama 3 split": "bbpe-100k-llama3split"}
        results = {}
        for title, name in chosen.items():
            tokenizer = setting.tokenizer(name)
            usable = [e for e in engines if e != "tiktoken" or tokenizer.with_name("ranks.tiktoken").is_file()]
            results[name] = speeds(setting, f"{title}, {corpus}", tokenizer, corpus, usable)
        return results

    return run


def sentencepiece_section(setting: Setting) -> dict[str, Any]:
    """SentencePiece BPE."""
    results = {}
    for name in ("mistral-v1", "spm-bpe-16k-bytefallback"):
        for corpus in ("real", "multi"):
            engines = (OURS, "gigatoken", "sentencepiece")
            results[f"{name} {corpus}"] = speeds(setting, f"{name}, {corpus}", setting.tokenizer(name), corpus, engines)
    return results


def adversarial_section(setting: Setting) -> dict[str, Any]:
    """Texts of one megabyte without anything that helps."""
    engines = (OURS, *FAST[1:], "tiktoken")
    tokenizer = setting.tokenizer("bbpe-100k-llama3split")
    spent: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in engines} for kind in MAKERS}
    for _ in range(setting.rounds):
        for name in engines:
            with Engine(setting, name, tokenizer) as engine:
                engine.ask("load")
                engine.ask("first")  # tables and caches that are made once
                for kind in MAKERS:
                    engine.ask("text", kind=kind, size=MEGABYTE)
                    answer = engine.ask("pass")
                    spent[kind][name].append(answer.get("cpu_s", float("nan")))
    print(f"\n### 1 MB of adversarial text, 100k vocabulary: CPU milliseconds, medians of {setting.rounds}")
    print("| text | " + " | ".join(engines) + " | ours / best other |\n" + "|---" * (len(engines) + 2) + "|")
    results = {}
    for kind, row in spent.items():
        figures = {name: median(values) * 1000 for name, values in row.items()}
        best = min(value for name, value in figures.items() if name != OURS and value == value)
        cells = " | ".join("fails" if figures[name] != figures[name] else f"{figures[name]:.1f}" for name in engines)
        print(f"| {kind} | {cells} | {figures[OURS] / best:.2f} |", flush=True)
        results[kind] = figures
    return results


def linear_section(setting: Setting) -> dict[str, Any]:
    """Whether 16 times the text costs 16 times as much."""
    tokenizer = setting.tokenizer("bbpe-100k-llama3split")
    print("\n### 16 MB against 1 MB of the same kind, ours, 100k vocabulary: CPU milliseconds")
    print("| text | 1 MB | 16 MB | ratio |\n|---|---|---|---|")
    results = {}
    with Engine(setting, OURS, tokenizer) as engine:
        for kind in MAKERS:
            figures = []
            for size in (MEGABYTE, 16 * MEGABYTE):
                engine.ask("text", kind=kind, size=size)
                figures.append(median(_cold_seconds(engine) for _ in range(1 if setting.quick else 3)) * 1000)
            small, large = figures
            print(f"| {kind} | {small:.1f} | {large:.1f} | {large / small:.1f} |", flush=True)
            results[kind] = {"1 MB": small, "16 MB": large}
    return results


def _cold_seconds(engine: Engine) -> float:
    """CPU time of a pass with a tokenizer that has seen nothing yet."""
    engine.ask("load")
    engine.ask("first")
    return float(engine.ask("pass")["cpu_s"])


def memory_section(setting: Setting) -> dict[str, Any]:
    """Growth of anonymous memory during a batch of 140 MB, beyond the texts; ids are four bytes each."""
    tokenizer = setting.tokenizer("gpt2")
    print("\n### Peak growth of anonymous memory while encoding, GPT-2, big: MB (the texts were there before)")
    print("| engine | threads | text MB | growth | of it ids | beyond ids, a thread |\n|---|---|---|---|---|---|")
    results = {}
    for name, threads in ((OURS, 1), (OURS, 2), *((rival, 1) for rival in FAST[1:])):
        with Engine(setting, name, tokenizer, threads) as engine:
            engine.ask("load")
            texts = engine.ask("texts", file=setting.corpus("big"), step=setting.step())
            answer = engine.ask("peak")
        if "error" in answer:
            print(f"| {name} | {threads} | {answer['error']} | | | |")
            continue
        growth, ids = answer["growth_bytes"] / MEGABYTE, answer["ids"] * 4 / MEGABYTE
        # Rivals return batches of 1,500 documents, which are dropped: their ids are not added up.
        beyond = (growth - ids) / threads if name == OURS else growth
        text = texts["bytes"] / MEGABYTE
        print(f"| {name} | {threads} | {text:.0f} | {growth:.0f} | {ids:.0f} | {beyond:.0f} |", flush=True)
        results[f"{name}, {threads}"] = {"growth_mb": growth, "ids_mb": ids, "beyond_mb_a_thread": beyond}
    return results


def threads_section(setting: Setting) -> dict[str, Any]:
    """One thread and two."""
    tokenizer = setting.tokenizer("gpt2")
    print("\n### One thread and two, GPT-2, big, cold: MB/s of wall time, and MB per CPU second of two in parts of one")
    print("| engine | 1 thread, wall | 2 threads, wall | wall ratio | CPU efficiency |\n|---|---|---|---|---|")
    results = {}
    for name in FAST:
        runs = {
            threads: [one_pass(setting, name, tokenizer, "big", threads) for _ in range(setting.rounds)]
            for threads in (1, 2)
        }
        if any("error" in run for row in runs.values() for run in row):
            continue
        one, two = (rate(runs[threads], "cold", "wall_s") for threads in (1, 2))
        efficiency = rate(runs[2], "cold") / rate(runs[1], "cold")
        print(f"| {name} | {one:.1f} | {two:.1f} | {two / one:.2f} | {efficiency:.2f} |", flush=True)
        results[name] = {"wall_1": one, "wall_2": two, "cpu_efficiency": efficiency}
    return results


def ids_section(setting: Setting) -> dict[str, Any]:
    """Documents whose ids differ from the reference's."""
    print("\n### Documents whose ids differ from the reference, real and multi together")
    print("| tokenizer | engine | documents | differ |\n|---|---|---|---|")
    files = [*setting.corpus("real"), *setting.corpus("multi")]
    results = {}
    for name in ("gpt2", "bbpe-100k-llama3split", "mistral-v1", "spm-bpe-16k-bytefallback"):
        tokenizer = setting.tokenizer(name)
        others = ("gigatoken",) if tokenizer.suffix == ".model" else FAST[1:]
        if tokenizer.with_name("ranks.tiktoken").is_file():
            others = (*others, "tiktoken")
        reference = "sentencepiece" if tokenizer.suffix == ".model" else "tokenizers"
        expected = hashes(setting, reference, tokenizer, files)
        for engine in (OURS, *others):
            found = hashes(setting, engine, tokenizer, files)
            if isinstance(found, str) or isinstance(expected, str):
                print(f"| {name} | {engine} | {found if isinstance(found, str) else expected} | |")
                continue
            count = sum(mine != theirs for mine, theirs in zip(found, expected, strict=True))
            print(f"| {name} | {engine} (reference: {reference}) | {len(found)} | {count} |", flush=True)
            results[f"{name} {engine}"] = {"documents": len(found), "differ": count, "reference": reference}
    return results


def hashes(setting: Setting, name: str, tokenizer: Path, files: list[str]) -> list[bytes] | str:
    """A hash for each document's ids, or why there is none."""
    with tempfile.TemporaryDirectory() as folder, Engine(setting, name, tokenizer) as engine:
        target = Path(folder, "hashes")
        step = 10 if setting.quick else 1
        answers = [engine.ask("load"), engine.ask("texts", file=files, step=step)]
        answers.append(engine.ask("hashes", file=str(target)))
        refused = [answer["error"] for answer in answers if "error" in answer]
        if refused:
            return str(refused[0])
        content = target.read_bytes()
        return [content[at : at + 16] for at in range(0, len(content), 16)]


SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "real": corpus_section("real", (*FAST, "megaflow-batches", *SLOW)),
    "multi": corpus_section("multi", FAST),
    "big": corpus_section("big", (*FAST, "megaflow-batches")),
    "sentencepiece": sentencepiece_section,
    "adversarial": adversarial_section,
    "linear": linear_section,
    "memory": memory_section,
    "threads": threads_section,
    "ids": ids_section,
}


def rival_pythons(given: list[str]) -> dict[str, Path]:
    """Interpreters of the rivals' environments; ends the program with the remedy where one is missing."""
    pythons = {name: ROOT / ".rivals" / name / "bin" / "python" for name in ("stable", "rc")}
    for word in given:
        name, _, path = word.partition("=")
        if name not in pythons or not path:
            sys.exit(f"error: --rival-python {word}: expected stable=PATH or rc=PATH")
        pythons[name] = Path(path)
    missing = {name: path for name, path in pythons.items() if not path.is_file()}
    if missing:
        steps = "; ".join(
            f"python3 -m venv .rivals/{name} && .rivals/{name}/bin/python -m pip install -r benches/rivals-{name}.txt"
            for name in missing
        )
        sys.exit(
            f"error: no interpreter with the rivals at {', '.join(map(str, missing.values()))}; "
            f"`python3 tools/run_benches.py tokenizer` makes them, or by hand: {steps}"
        )
    return pythons


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections (default: all)")
    parser.add_argument("--quick", action="store_true", help="a quarter of each input and one round: about a minute")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine (default: 3)")
    parser.add_argument("--rival-python", action="append", default=[], metavar="NAME=PATH", help="stable=... or rc=...")
    shared = os.environ.get("MEGAFLOW_SHARED") or ROOT.parent / "shared"
    parser.add_argument("--shared", type=Path, default=Path(shared), help="the shared test data")
    parser.add_argument(
        "--tokenizers", type=Path, default=ROOT / ".tokenizers", help="what fetch_tokenizers.py fetched"
    )
    parser.add_argument(
        "--big", type=Path, default=ROOT / ".rivals" / "big.jsonl", help="the large input; made if missing"
    )
    options = parser.parse_args()
    setting = Setting(
        pythons=rival_pythons(options.rival_python),
        shared=options.shared,
        fetched=options.tokenizers,
        big=options.big,
        quick=options.quick,
        rounds=1 if options.quick else options.rounds,
    )
    for name in options.only:
        result = SECTIONS[name](setting)
        save(f"tokenizer-{name}", {"quick": setting.quick, "rounds": setting.rounds, "result": result, **machine()})


if __name__ == "__main__":
    main()
