"""Codecs and tiers of one's own, as docs/extending.md shows them, and what the settings say of
them."""

from __future__ import annotations

import re
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlinker.base import registry
from kvlinker.base.errors import InvalidRequestError
from kvlinker.store import ChunkKV, ChunkStore, LayerKV, open_store
from kvlinker.store.format.codecs import base, find_codec, known_codecs
from kvlinker.store.tiers import configured
from tests.store.store_chunks import Recorder, key_of, same_kv, sized

PLENTY = 1 << 20
GUIDE_NAME = "extending.md"
GUIDE = (Path(__file__).parents[2] / "docs" / GUIDE_NAME).read_text()
REGISTRIES = (base._registry, configured._registry)


def run(section: str) -> None:
    """Run the program that a section of the guide shows."""
    (program,) = re.findall(
        r"```python\n(.*?)```", GUIDE.split(f"## {section}\n")[1].split("\n## ")[0], re.DOTALL
    )
    exec(compile(program, GUIDE_NAME, "exec", dont_inherit=True), {"__name__": "my_package"})


@pytest.fixture(autouse=True)
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten afterwards."""
    for one in REGISTRIES:
        monkeypatch.setattr(one, "_values", dict(one.known()))


def numbers(seed: int) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    layers = (
        LayerKV(*(torch.randn(2, 9, 8, generator=generator) for _ in range(2))) for _ in range(2)
    )
    return ChunkKV(tuple(layers))


def test_the_guides_codec_works(tmp_path: Path) -> None:
    run("A codec")
    kv = numbers(1)
    with closing(
        open_store(sized(tmp_path, PLENTY, PLENTY, disk_codec="half+zstd"), Recorder().events)
    ) as store:
        store.put(key_of(1), kv)
        store.flush()
    with closing(open_store(sized(tmp_path, 0, PLENTY), Recorder().events)) as store:
        found = store.get(key_of(1))
    assert found is not None
    for layer, given in zip(found.layers, kv.layers, strict=True):
        assert layer.key.dtype == torch.float32
        assert torch.equal(layer.key, given.key.half().float())
    with pytest.raises(ValueError, match="no half precision"):
        find_codec("half").encode(kv.layers[0].key * 1e6)


def test_a_chunk_in_a_codec_that_is_not_known_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(base._registry, "_values", dict(base._registry.known()))
        run("A codec")
        with closing(
            open_store(sized(tmp_path, 0, PLENTY, disk_codec="half"), Recorder().events)
        ) as store:
            store.put(key_of(1), numbers(1))
    with closing(open_store(sized(tmp_path, 0, PLENTY), Recorder().events)) as store:
        assert store.get(key_of(1)) is None
        assert "'half' is not known here" in caplog.text
        assert [check.damaged for check in store.check()] == [(), ()]
    run("A codec")
    with closing(open_store(sized(tmp_path, 0, PLENTY), Recorder().events)) as store:
        assert store.get(key_of(1)) is not None


def archived(folder: Path, host_bytes: int = PLENTY, **options: Any) -> ChunkStore:
    tiers = {"archive": {"folder": str(folder / "archive"), "space": "1MiB"} | options}
    return open_store(sized(folder, host_bytes, PLENTY, tiers=tiers), Recorder().events)


def test_the_guides_tier_works(tmp_path: Path) -> None:
    run("A tier")
    with closing(open_store(sized(tmp_path, PLENTY, PLENTY), Recorder().events)) as store:
        assert [usage.name for usage in store.usage()] == ["host", "disk"]
    with closing(archived(tmp_path, codec="raw")) as store:
        store.put(key_of(1), numbers(1))
        store.flush()
        assert [usage.name for usage in store.usage()] == ["host", "disk", "archive"]
        assert [usage.chunks for usage in store.usage()] == [1, 1, 1]
    for path in tmp_path.glob("chunks/??/*"):
        path.unlink()
    with closing(archived(tmp_path, 0)) as store:
        assert store.tier_of(key_of(1)) == "archive"
        found = store.get(key_of(1))
        assert found is not None
        assert same_kv(found, numbers(1))
    with closing(archived(tmp_path, space=0)) as store:
        assert [usage.name for usage in store.usage()] == ["host", "disk"]


def test_options_that_are_wrong_are_told(tmp_path: Path) -> None:
    run("A tier")
    with pytest.raises(
        InvalidRequestError, match=r"tiers.archive are wrong: space: .*; speed: Extra"
    ):
        archived(tmp_path, space="plenty", speed=1)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("archive", r"'archive', but known tiers are device, disk, host, object, redis. Install"),
        ("redis", "takes no options in tiers; set redis_url, redis_codec"),
    ],
)
def test_a_tier_that_the_settings_cannot_name_is_told(
    tmp_path: Path, name: str, complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        open_store(sized(tmp_path, PLENTY, 0, tiers={name: {}}), Recorder().events)


def test_packages_bring_codecs_and_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"kvlinker.codecs": "A codec", "kvlinker.tiers": "A tier"}

    def installed(*, group: str) -> list[EntryPoint]:
        return [EntryPoint("one", "my_package.one", group)]

    monkeypatch.setattr(registry, "entry_points", installed)
    monkeypatch.setattr(EntryPoint, "load", lambda entry: run(modules[entry.group]))
    for one in REGISTRIES:
        monkeypatch.setattr(one, "_loaded", False)
    assert "half" in known_codecs()
    archived(tmp_path, codec="half").close()


def test_a_name_is_taken_once() -> None:
    run("A tier")
    with pytest.raises(ValueError, match="tier 'archive' is registered already"):
        run("A tier")


def test_what_was_opened_is_closed_where_another_tier_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("A tier")
    closed: list[str] = []
    monkeypatch.setattr(
        "kvlinker.store.tiers.disk.DiskTier.close", lambda tier: closed.append(tier.name)
    )
    (tmp_path / "archive").write_text("not a folder")
    with pytest.raises(Exception, match="cannot be used"):
        archived(tmp_path)
    assert closed == ["disk"]
