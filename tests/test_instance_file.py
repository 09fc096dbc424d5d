"""A fleet that follows a file."""

from __future__ import annotations

import asyncio
import errno
import logging
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve import instance_file
from dynaserve.errors import ConfigError
from dynaserve.instance_file import InstanceFile, read
from tests.test_fleet_links import until


@dataclass
class Fleet:
    """Refuses to add what is `down`, waits for what is `silent`, and refuses to lose its last member. lacks: what this machine lacks."""

    members: set[str] = field(default_factory=lambda: {"http://a", "http://b"})
    down: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    lacks: Exception | None = None
    asked: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    async def add(self, url: str) -> None:
        self.asked.append(url)
        while url in self.silent:  # noqa: ASYNC110 - of several tasks at once
            await asyncio.sleep(0.001)
        if self.lacks is not None:
            raise self.lacks
        if url in self.down:
            raise ConfigError(f"instance {url} does not answer")
        self.members.add(url)

    async def remove(self, url: str) -> None:
        if self.members == {url}:
            raise ConfigError(f"instance {url} is the last one of the fleet")
        self.members.remove(url)
        self.left.append(url)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def look(tmp_path: Path, fleet: Fleet) -> Callable[[str | None], set[str]]:
    """Writes the file, or takes it away, lets the fleet look at it, and returns its members when all is done."""
    path = tmp_path / "instances"
    file = InstanceFile(path, lambda: fleet.members, fleet.add, fleet.remove)

    def write_and_look(text: str | None) -> set[str]:
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        for _ in range(2):
            asyncio.run(look_and_wait(file))
        return fleet.members

    return write_and_look


async def look_and_wait(file: InstanceFile) -> None:
    async with asyncio.TaskGroup() as changes:
        await file.look(changes)


Look = Callable[[str | None], set[str]]


def test_what_the_file_names_joins_and_what_it_names_no_longer_leaves(look: Look) -> None:
    assert look("http://b/\n# spare\n\nhttp://c\n") == {"http://b", "http://c"}
    assert look("http://c\n") == {"http://c"}


def test_a_file_that_is_seen_half_written_has_nobody_leave(tmp_path: Path, fleet: Fleet) -> None:
    path = tmp_path / "instances"
    file = InstanceFile(path, lambda: fleet.members, fleet.add, fleet.remove)
    for text, members in (("http://a\n", "ab"), ("http://a\nhttp://b\n", "ab"), ("http://b\n", "ab"), ("http://b\n", "b")):
        path.write_text(text)
        asyncio.run(look_and_wait(file))
        assert fleet.members == {f"http://{name}" for name in members}


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


@pytest.mark.parametrize(
    "lacks", [OSError(errno.EMFILE, "Too many open files"), FileNotFoundError(errno.ENOENT, "No such file"), zmq.ZMQError(errno.EMFILE)]
)
def test_what_this_machine_lacks_for_a_while_is_told_and_tried_again(
    look: Look, fleet: Fleet, lacks: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.lacks = lacks
    names = "http://a\nhttp://b\nhttp://c\n"
    assert look(names) == look(names) == {"http://a", "http://b"}
    (told,) = caplog.records
    assert (told.levelno, "instance http://c" in told.getMessage(), str(lacks) in told.getMessage()) == (logging.WARNING, True, True)
    fleet.lacks = None
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
            asyncio.run(look_and_wait(file))
        assert fleet.members == files[-1]


@dataclass
class Following:
    """A fleet that follows its file, as in a front-end."""

    fleet: Fleet
    path: Path

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def with_follower() -> None:
            file = InstanceFile(self.path, lambda: self.fleet.members, self.fleet.add, self.fleet.remove)
            task = asyncio.create_task(file.follow())
            await scenario()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

        asyncio.run(with_follower())

    def write(self, *urls: str) -> None:
        self.path.write_text("\n".join(urls))


@pytest.fixture
def following(tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Following:
    monkeypatch.setattr(instance_file, "LOOK_S", 0.001)
    return Following(fleet, tmp_path / "instances")


def test_one_that_does_not_answer_delays_nobody(following: Following, fleet: Fleet) -> None:
    fleet.silent = {"http://silent"}

    async def scenario() -> None:
        following.write("http://a", "http://silent", "http://c")
        await until(lambda: fleet.members == {"http://a", "http://c"})
        following.write("http://a", "http://silent", "http://d")
        await until(lambda: fleet.members == {"http://a", "http://d"})
        fleet.silent = set()
        await until(lambda: fleet.members == {"http://a", "http://d", "http://silent"})
        assert fleet.asked.count("http://silent") == 1, "not again while it is asked"

    following.run(scenario)


def test_one_that_is_taken_out_while_it_is_asked_leaves_once_it_has_joined(following: Following, fleet: Fleet) -> None:
    fleet.silent = {"http://silent"}

    async def scenario() -> None:
        following.write("http://a", "http://silent")
        await until(lambda: "http://silent" in fleet.asked)
        for url in ("http://c", "http://d"):
            following.write("http://a", url)
            await until(lambda: fleet.members == {"http://a", url})  # noqa: B023 - called at once
        fleet.silent = set()
        await until(lambda: "http://silent" in fleet.left)
        assert fleet.members == {"http://a", "http://d"}

    following.run(scenario)


def test_one_that_has_left_and_comes_otherwise_stays(look: Look, fleet: Fleet) -> None:
    assert look("http://a\n") == {"http://a"}
    fleet.members.add("http://b")
    assert look("http://a\n") == {"http://a", "http://b"}


def test_a_file_without_instances_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "instances"
    with pytest.raises(ConfigError, match="cannot be read"):
        read(path)
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="names no instance"):
        read(path)
    path.write_text("http://a/\nhttp://a\nhttp://b\n")
    assert read(path) == ("http://a", "http://b")


def test_what_the_file_names_is_not_to_be_taken_out_otherwise(tmp_path: Path, fleet: Fleet) -> None:
    path = tmp_path / "instances"
    path.write_text("http://a\n")
    file = InstanceFile(path, lambda: fleet.members, fleet.add, fleet.remove)
    asyncio.run(look_and_wait(file))
    file.check_not_named("http://b")
    with pytest.raises(ConfigError, match=rf"^instance http://a is named by --instances-file {path}: take its line out$"):
        file.check_not_named("http://a")
