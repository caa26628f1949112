from __future__ import annotations

from typing import Any

from check_crate_layers import ROOT_MANIFEST, cargo_metadata, violations


def metadata(**dependencies: list[str]) -> dict[str, Any]:
    """What `cargo metadata --no-deps` prints, cut down to what is read."""
    return {
        "packages": [
            {"name": name.replace("_", "-"), "dependencies": [{"name": to} for to in edges]}
            for name, edges in dependencies.items()
        ]
    }


def test_this_workspace_keeps_its_layers():
    assert violations(cargo_metadata(ROOT_MANIFEST)) == []


def test_edges_of_the_design_pass():
    good = metadata(
        megaflow_core=["thiserror"],
        megaflow_source=["megaflow-core", "memchr"],
        megaflow_tokenize=["megaflow-core", "tokenizers"],
        megaflow_indexed=["megaflow-core"],
        megaflow_build=["megaflow-core", "megaflow-source", "megaflow-tokenize", "megaflow-indexed"],
        megaflow_sample=["megaflow-core", "megaflow-indexed"],
        megaflow_stream=["megaflow-core", "megaflow-source", "megaflow-tokenize", "megaflow-sample"],
        megaflow_prefetch=["megaflow-core"],
        megaflow_py=["pyo3", "numpy", "megaflow-build", "megaflow-prefetch"],
    )
    assert violations(good) == []


def test_an_edge_against_the_flow_is_named():
    (problem,) = violations(metadata(megaflow_source=["megaflow-indexed"], megaflow_indexed=[]))
    assert problem == "megaflow-source depends on megaflow-indexed: allowed is megaflow-core"


def test_core_may_depend_on_no_sibling():
    (problem,) = violations(metadata(megaflow_core=["megaflow-source"], megaflow_source=[]))
    assert "allowed is nothing" in problem


def test_nothing_may_depend_on_the_boundary():
    (problem,) = violations(metadata(megaflow_prefetch=["megaflow-py"]))
    assert "megaflow-prefetch depends on megaflow-py" in problem


def test_pyo3_and_numpy_stay_at_the_boundary():
    problems = violations(metadata(megaflow_sample=["pyo3", "numpy"]))
    assert [problem.split(":")[0] for problem in problems] == [
        "megaflow-sample depends on pyo3",
        "megaflow-sample depends on numpy",
    ]


def test_a_new_crate_needs_a_row():
    (problem,) = violations(metadata(megaflow_extra=[]))
    assert problem.startswith("megaflow-extra: a new crate needs a row")
