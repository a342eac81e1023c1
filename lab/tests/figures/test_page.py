"""Parts of the page are replaced where they stand, and nothing around them changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.report import Report
from kvlinker_lab.figures.figure import Figure, find_figure, known_figures
from kvlinker_lab.figures.page import show_figure, write_figure

ORDER = ("first", "second", "third")


def figure(name: str, claim: str = "a claim") -> Figure:
    return Figure(
        name=name,
        title=f"Title of {name}",
        source="Paper, figure 1",
        claim=claim,
        columns=("policy", "score", "missing"),
        measure=lambda lab: [],
        draw=lambda canvas, rows: canvas.subplots().plot([row["score"] for row in rows]),
        finding=lambda rows: f"{len(rows)} rows.",
        table=lambda rows: rows[:1],
    )


def report(*scores: float) -> Report:
    rows = [{"policy": "naive", "score": score} for score in scores]
    machine = {"processor": "P", "threads": 1}
    settings = {"model": "M", "dtype": "float32"}
    return Report("kvlinker-lab figure", machine, {"kvlinker": "1", "torch": "2"}, settings, rows)


def test_parts_stand_in_order_and_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\nBefore.\n")
    write_figure(page, figure("third"), report(0.5), ORDER)
    write_figure(page, figure("first"), report(0.25, 0.5), ORDER)
    page.write_text(
        page.read_text().replace("<!-- end of first -->", "<!-- end of first -->\nA remark.")
        + "After.\n"
    )
    write_figure(page, figure("second"), report(1.0), ORDER)
    write_figure(page, figure("first", claim="a claim with a \\1"), report(0.75), ORDER)

    text = page.read_text()
    assert text.startswith("# Mine\n\nBefore.\n")
    assert text.endswith("After.\n")
    assert "<!-- end of first -->\nA remark." in text
    places = [text.index(f"## Title of {name}") for name in ORDER]
    assert places == sorted(places)
    assert text.count("## Title of first") == 1
    assert "a claim with a \\1" in text
    assert "| naive | 0.75 |  |" in text
    assert "| naive | 0.25 |" not in text
    assert "1 rows." in text


def test_stored_rows_are_shown_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_figure(page, figure("first"), report(0.5), ORDER)
    show_figure(page, figure("first", claim="another"), ORDER)
    assert "another" in page.read_text()
    assert "| naive | 0.5 |  |" in page.read_text()


def test_plots_go_to_a_folder_of_their_own(tmp_path: Path) -> None:
    page, plots = tmp_path / "lab" / "page.md", tmp_path / "docs" / "plots"
    page.parent.mkdir()
    write_figure(page, figure("first"), report(0.5), ORDER, plots)
    assert "](../docs/plots/first.png)" in page.read_text()
    assert (plots / "first.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in page.with_suffix("").iterdir()] == ["first.json"]


def test_prose_is_wrapped(tmp_path: Path) -> None:
    write_figure(
        tmp_path / "page.md", figure("first", claim="several words " * 30), report(0.5), ORDER
    )
    assert max(map(len, (tmp_path / "page.md").read_text().splitlines())) <= 100


def test_nothing_stored(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="without --redraw"):
        show_figure(tmp_path / "page.md", figure("first"), ORDER)


def test_figures_stand_in_the_order_of_papers_and_numbers() -> None:
    assert list(known_figures()) == [
        *("epic-6", "epic-7", "epic-8", "epic-9"),
        *(
            "cacheblend-2",
            "cacheblend-6",
            "cacheblend-7",
            "cacheblend-8",
            "cacheblend-14",
            "cacheblend-16",
        ),
        *("cachecraft-table3", "cachecraft-12", "cachecraft-13", "cachecraft-14", "cachecraft-15"),
        *("cachecraft-20", "cachecraft-22", "cachecraft-23", "cachecraft-26"),
        *("choices", "chunk-lengths", "contexts", "frontier"),
    ]


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(InvalidRequestError, match=r"no figure 'fig'; there are .*cacheblend-16"):
        find_figure("fig")
