"""A fleet that follows a file."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.errors import ConfigError
from dynaserve.instance_file import InstanceFile, read


@dataclass
class Fleet:
    """Refuses to add what is `down`, and to lose its last member."""

    members: set[str] = field(default_factory=lambda: {"http://a", "http://b"})
    down: set[str] = field(default_factory=set)

    async def add(self, url: str) -> None:
        if url in self.down:
            raise ConfigError(f"instance {url} does not answer")
        self.members.add(url)

    async def remove(self, url: str) -> None:
        if self.members == {url}:
            raise ConfigError(f"instance {url} is the last one of the fleet")
        self.members.remove(url)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def look(tmp_path: Path, fleet: Fleet) -> Callable[[str | None], set[str]]:
    """Writes the file, or takes it away, lets the fleet look at it, and returns its members."""
    path = tmp_path / "instances"
    file = InstanceFile(path, lambda: fleet.members, fleet.add, fleet.remove)

    def write_and_look(text: str | None) -> set[str]:
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        asyncio.run(file.look())
        return fleet.members

    return write_and_look


Look = Callable[[str | None], set[str]]


def test_what_the_file_names_joins_and_what_it_names_no_longer_leaves(look: Look) -> None:
    assert look("http://b/\n# spare\n\nhttp://c\n") == {"http://b", "http://c"}
    assert look("http://c\n") == {"http://c"}


def test_an_instance_that_came_otherwise_stays(look: Look, fleet: Fleet) -> None:
    fleet.members.add("http://by-hand")
    assert look("http://a\n") == {"http://a", "http://by-hand"}


@pytest.mark.parametrize("text", [None, "", "# all gone\n"])
def test_a_file_that_is_gone_or_empty_changes_nothing(look: Look, text: str | None, caplog: pytest.LogCaptureFixture) -> None:
    assert look(text) == {"http://a", "http://b"}
    assert look(text) == {"http://a", "http://b"}
    assert len(caplog.records) == 1, "said once"


def test_an_instance_that_does_not_answer_joins_when_it_does(look: Look, fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.down = {"http://c"}
    names = "http://a\nhttp://b\nhttp://c\n"
    assert look(names) == look(names) == {"http://a", "http://b"}
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "said once"
    fleet.down = set()
    assert look(names) == {"http://a", "http://b", "http://c"}


def test_the_last_instance_leaves_once_another_has_joined(look: Look, fleet: Fleet) -> None:
    fleet.down = {"http://c"}
    look("http://c\n")
    assert len(fleet.members) == 1
    fleet.down = set()
    look("http://c\n")
    assert look("http://c\n") == {"http://c"}


@settings(deadline=None)
@given(st.lists(st.sets(st.sampled_from("abcde"), min_size=1), min_size=1, max_size=6))
def test_the_fleet_ends_as_the_last_file_says(files: list[set[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "instances"
        fleet = Fleet(members=set(files[0]))
        file = InstanceFile(path, lambda: fleet.members, fleet.add, fleet.remove)
        for names in [*files, files[-1]]:  # one that was to leave as the last could not, before another came
            path.write_text("\n".join(names))
            asyncio.run(file.look())
        assert fleet.members == files[-1]


def test_a_file_without_instances_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "instances"
    with pytest.raises(ConfigError, match="cannot be read"):
        read(path)
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="names no instance"):
        read(path)
    path.write_text("http://a/\nhttp://a\nhttp://b\n")
    assert read(path) == ("http://a", "http://b")
