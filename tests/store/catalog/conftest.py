"""Runs the tests of the catalog on both of its databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvlinker.store import Catalog

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer

Place = Path | str


@pytest.fixture(params=["sqlite", "postgresql"])
def make_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Place]:
    """Makes places for catalogs: paths of files that are not there, or URLs of empty databases."""
    if request.param == "sqlite":
        return lambda: tmp_path / f"{len(list(tmp_path.iterdir()))}" / "catalog.sqlite"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.new_database


@pytest.fixture
def place(make_place: Callable[[], Place]) -> Place:
    return make_place()


@pytest.fixture
def catalog(place: Place) -> Iterator[Catalog]:
    with closing(Catalog(place)) as catalog:
        yield catalog
