"""The pictures of the documentation: taken anew, and kept by ``make pictures``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.doors.http.serving import Served
from tests.doors.page.conftest import Watched, fresh_page
from tests.waiting import PATIENCE

IMAGES = Path(__file__).parents[3] / "docs" / "images"
SCREEN = {"width": 1180, "height": 1000}
PHONE = {"width": 390, "height": 844}
COLOURS = 96

HOMES = (
    (
        "north",
        (
            "Tom Reyes lives in Oslo. He works as a pilot.\nIda Okoye lives in Turku. She works as"
            " a teacher.\n"
        ),
    ),
    (
        "south",
        (
            "Mira Holt lives in Varna. She works as a baker.\nLeo Novak lives in Rome. He works as"
            " a painter.\n"
        ),
    ),
    (
        "west",
        (
            "Ana Petrov lives in Lima. She works as a nurse.\nJon Berg lives in Quito. He works as"
            " a lawyer.\n"
        ),
    ),
    (
        "east",
        (
            "Max Chen lives in Hanoi. He works as a farmer.\nEva Silva lives in Osaka. She works as"
            " a tailor.\n"
        ),
    ),
)


@pytest.fixture
def keep(tmp_path: Path) -> Callable[[str, bytes], None]:
    """Keeps a picture with few colours, for it is drawn and not photographed."""
    folder = IMAGES if os.environ.get("KVLINKER_PICTURES") else tmp_path

    def keep_picture(name: str, taken: bytes) -> None:
        path = folder / f"page{name}.png"
        path.write_bytes(taken)
        Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
        assert 5_000 < path.stat().st_size < 100_000

    return keep_picture


def asked(watched: Watched, question: str) -> Watched:
    """Ask a question about four documents."""
    watched.drop_all({f"people/{name}.md": text for name, text in HOMES})
    watched.ask(question)
    watched.page.locator("#question").blur()
    return watched


def houses() -> dict[str, str]:
    """Eleven texts of some ninety tokens, each of a person of its own."""
    firsts = ["Tom", "Ida", "Mira", "Leo", "Ana", "Jon", "Max", "Eva", "Paul", "Vera", "Hugo"]
    lasts = [
        "Reyes",
        "Okoye",
        "Holt",
        "Novak",
        "Petrov",
        "Berg",
        "Chen",
        "Silva",
        "Weber",
        "Costa",
        "Moreau",
    ]
    cities = [
        "Oslo",
        "Turku",
        "Varna",
        "Rome",
        "Lima",
        "Quito",
        "Hanoi",
        "Osaka",
        "Accra",
        "Turin",
        "Cairo",
    ]
    looks = ["old", "new", "red", "blue", "small", "tall", "grey", "green"]
    texts = {}
    for at, (first, last, city) in enumerate(zip(firsts, lasts, cities, strict=True)):
        windows = [
            f"The {looks[(at + each) % 8]} house has {at * 8 + each} windows." for each in range(8)
        ]
        texts[f"houses/{last.lower()}.md"] = (
            f"{first} {last} lives in {city}. {' '.join(windows)}\n"
        )
    return texts


def test_picture_of_the_first_screen(
    reading: Served, opened: Callable[..., Watched], keep: Callable[[str, bytes], None]
) -> None:
    watched = fresh_page(reading, opened, viewport=SCREEN | {"height": 720})
    keep("-first", watched.page.screenshot())


REPORT = (
    "# The harbour\n\nTom Reyes lives in Oslo. He works as a pilot.\n\nThe quay was rebuilt in"
    " 1998, after the flood. Since then, 340 ships have come in a year, most of them in"
    " summer.\n\nIda Okoye lives in Turku. She works as a teacher.\n\nThe harbour's office opens at"
    " eight, and closes when the last pilot is back.\n"
)
"""A document of several chunks."""

ANSWER = """The quay was rebuilt in **1998**, after the flood [1]; some 340 ships come a year [1].

| | before | since |
|---|---:|---:|
| ships in a year | unknown | 340 |
| quays | 2 | 3 |

Were they spread evenly, a day would have $\\frac{340}{365} \\approx 0.93$ of a ship.
"""
"""As a larger model writes it than the one in the box, which names no sources."""


def test_picture_of_sources(
    reading: Served, opened: Callable[..., Watched], keep: Callable[[str, bytes], None]
) -> None:
    watched = fresh_page(reading, opened, viewport=SCREEN | {"width": 1440, "height": 820})
    page = watched.page
    page.get_by_text("How they are split").click()
    page.select_option("#split-method", "paragraph")
    page.fill("#split-tokens", "48")
    page.get_by_text("How they are split").click()
    watched.drop_all({"harbour.md": REPORT, **{f"people/{name}.md": text for name, text in HOMES}})
    with watched.settings():
        page.fill("#limit", "1")
    watched.answer_with(ANSWER)
    watched.ask("When was the quay rebuilt, and how many ships come in a year?")
    page.locator("math").wait_for()
    page.locator(".answered .mark").first.click()
    page.locator("#passage-text", has_text="Ida Okoye").wait_for()
    page.evaluate("scrollTo(0, 0)")
    keep("-sources", page.screenshot())


@pytest.mark.parametrize(
    ("scheme", "name", "question"),
    [
        ("light", "", "What does Leo Novak work as?"),
        ("dark", "-dark", "Where does Ida Okoye live?"),
    ],
)
def test_picture_of_the_page(
    reading: Served,
    opened: Callable[..., Watched],
    keep: Callable[[str, bytes], None],
    scheme: str,
    name: str,
    question: str,
) -> None:
    watched = fresh_page(reading, opened, viewport=SCREEN, color_scheme=scheme)
    asked(watched, question)
    keep(name, watched.page.screenshot())


def test_picture_of_a_phone_in_the_dark(
    reading: Served, opened: Callable[..., Watched], keep: Callable[[str, bytes], None]
) -> None:
    watched = fresh_page(reading, opened, viewport=PHONE, color_scheme="dark", is_mobile=True)
    asked(watched, "Where does Eva Silva live?")
    watched.page.evaluate("scrollTo(0, 0)")
    keep("-phone", watched.page.screenshot())


def test_picture_of_a_comparison(
    reading: Served, opened: Callable[..., Watched], keep: Callable[[str, bytes], None]
) -> None:
    watched = fresh_page(reading, opened, viewport=SCREEN)
    watched.drop_all(houses())
    with watched.settings():
        watched.page.fill("#limit", "11")
    watched.ask("Where does Leo Novak live?")
    watched.page.get_by_role("button", name="Compare with the full computation").click()
    watched.page.locator(".verdict").wait_for()
    watched.page.get_by_label("Recompute more or less").fill("0")
    watched.page.get_by_role("button", name="Measure").click()
    watched.page.locator(".side").nth(2).wait_for()
    keep("-comparison", watched.page.locator("#comparison").screenshot())


def test_picture_of_the_server(
    reading: Served, opened: Callable[..., Watched], keep: Callable[[str, bytes], None]
) -> None:
    """After four minutes of questions, by the page's clock."""
    watched = fresh_page(reading, opened, viewport=SCREEN)
    watched.page.clock.install()
    watched.page.reload()
    watched.wait_until_begun()
    watched.drop_all({f"people/{name}.md": text for name, text in HOMES})
    for name in ("Leo Novak", "Ana Petrov", "Tom Reyes", "Eva Silva"):
        watched.ask(f"Where does {name} live?")
        watched.page.clock.run_for(60_000)
    assert reading.llm.policy_manager.auditor is not None
    assert reading.llm.policy_manager.auditor.wait(PATIENCE)
    watched.page.get_by_role("tab", name="Server").click()
    watched.page.locator("#chart-first polyline").first.wait_for(state="attached")
    keep("-server", watched.page.screenshot())
