"""EngineSlot: one engine at a time, built where need be, replaced only after it was closed."""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice
from threading import Thread

import pytest

from engines.base import LOADING, WAITING, Backend, BackendStatus, BuildProgress, Engine
from engines.benchmark import RunEvent, RunRecord
from engines.config import EngineConfig
from engines.errors import EngineBuildError, ModelLoadError, ModelNotBuiltError
from engines.events import Finish
from engines.replay import ReplayEngine
from engines.slot import EngineSlot
from tests.conftest import load_engine


class PluginEngine(ReplayEngine):
    """An engine that says when it is closed."""

    def __init__(self, target: str, log: list[str]) -> None:
        record = RunRecord("prompt", {"target": target}, {})
        record.apply(RunEvent("speculative", 0, Finish("stop", 0.0)))
        super().__init__(record, speed=None)
        self._target = target
        self._log = log
        self.has_ended = False

    @property
    def is_open(self) -> bool:
        return not self.has_ended

    def close(self) -> None:
        self._log.append(f"close {self._target}")


class PluginBackend(Backend):
    """A back end as a plug-in brings it, which writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.built: set[str] = set()

    def probe(self, config: EngineConfig | None = None) -> BackendStatus:
        return BackendStatus("plugin", usable=True, detail="")

    def build(self, config: EngineConfig) -> Generator[BuildProgress, None, None]:
        self.log.append(f"build {config.target}")
        yield BuildProgress(1, 2, "fetch", 0.0)
        if config.target == "broken":
            raise EngineBuildError("it is broken")
        yield BuildProgress(2, 2, "convert", 0.0)
        self.built.add(config.target)

    def load(self, config: EngineConfig) -> Engine:
        self.log.append(f"load {config.target}")
        if config.target == "broken":
            raise ModelLoadError("it is broken")
        if config.target not in self.built:
            raise ModelNotBuiltError("build it first")
        return PluginEngine(config.target, self.log)


class SlowBackend(PluginBackend):
    """A back end that says what it does while it loads, and writes down when it is done."""

    builds_on_device = True

    def loading(self, config: EngineConfig) -> Generator[BuildProgress, None, Engine]:
        try:
            yield BuildProgress(1, 1, LOADING, 0.5, message="reading the weights")
            return self.load(config)
        finally:
            self.log.append("done")


@pytest.fixture
def backend() -> PluginBackend:
    return PluginBackend()


@pytest.fixture
def slot(backend: PluginBackend) -> EngineSlot:
    return EngineSlot(create=lambda name: backend)


def ensure(slot: EngineSlot, target: str) -> tuple[list[str], Engine]:
    """Return the names of the stages, and the engine."""
    progress, names = slot.ensure(EngineConfig(target=target)), []
    while True:
        try:
            names.append(next(progress).name)
        except StopIteration as ended:
            return names, ended.value


def test_what_is_not_built_is_built_first(slot: EngineSlot, backend: PluginBackend):
    names, engine = ensure(slot, "one")

    assert names == [LOADING, "fetch", "convert", LOADING]
    assert backend.log == ["load one", "build one", "load one"]
    assert engine.info.target == "one (recorded)"


def test_what_is_built_is_only_loaded(slot: EngineSlot, backend: PluginBackend):
    backend.built.add("one")

    assert ensure(slot, "one")[0] == [LOADING]
    assert backend.log == ["load one"]


def test_an_equal_config_gets_the_loaded_engine(slot: EngineSlot, backend: PluginBackend):
    _, first = ensure(slot, "one")
    names, second = ensure(slot, "one")

    assert second is first
    assert names == []


def test_the_old_engine_is_closed_before_the_new_one_is_loaded(
    slot: EngineSlot, backend: PluginBackend
):
    backend.built |= {"one", "two"}
    ensure(slot, "one")
    ensure(slot, "two")

    assert backend.log == ["load one", "close one", "load two"]


def test_after_a_failed_load_the_slot_loads_what_it_is_asked_for(
    slot: EngineSlot, backend: PluginBackend
):
    backend.built.add("one")
    ensure(slot, "one")
    with pytest.raises(ModelLoadError, match="it is broken"):
        ensure(slot, "broken")
    ensure(slot, "one")

    assert backend.log == ["load one", "close one", "load broken", "load one"]


def test_a_stopped_build_loads_nothing(slot: EngineSlot, backend: PluginBackend):
    progress = slot.ensure(EngineConfig(target="one"))
    for _ in range(2):  # load, fetch
        next(progress)
    progress.close()

    assert backend.log == ["load one", "build one"]
    assert ensure(slot, "one")[1].info.target == "one (recorded)"


def test_building_loads_nothing(slot: EngineSlot, backend: PluginBackend):
    names = [step.name for step in slot.build(EngineConfig(target="one"))]

    assert names == ["fetch", "convert"]
    assert backend.log == ["build one"]


def test_an_engine_that_has_ended_is_closed_and_loaded_again(
    slot: EngineSlot, backend: PluginBackend
):
    backend.built.add("one")
    _, first = ensure(slot, "one")
    assert isinstance(first, PluginEngine)
    first.has_ended = True
    names, second = ensure(slot, "one")

    assert names == [LOADING]
    assert second is not first
    assert backend.log == ["load one", "close one", "load one"]
    assert ensure(slot, "one") == ([], second)


def test_what_is_said_while_loading_is_passed_on():
    backend = SlowBackend()
    backend.built.add("one")
    progress = list(EngineSlot(lambda name: backend).ensure(EngineConfig(target="one")))

    assert [step.message for step in progress] == [None, "reading the weights"]


def test_a_stopped_load_is_closed_and_leaves_the_slot_empty():
    backend = SlowBackend()
    backend.built |= {"one", "two"}
    slot = EngineSlot(lambda name: backend)
    ensure(slot, "one")
    progress = slot.ensure(EngineConfig(target="two"))
    while next(progress).message is None:
        pass
    progress.close()

    assert backend.log == ["load one", "done", "close one", "done"]
    ensure(slot, "one")
    assert backend.log[4:] == ["load one", "done"]


def test_what_is_loaded_makes_way_for_a_build_that_needs_the_device():
    backend = SlowBackend()
    backend.built.add("one")
    slot = EngineSlot(lambda name: backend)
    ensure(slot, "one")
    list(slot.build(EngineConfig(target="two")))

    assert backend.log == ["load one", "done", "close one", "build two"]


# -- taking turns


def is_free(slot: EngineSlot) -> bool:
    """Return whether nobody uses the engine; it is left as it was."""
    if list(islice(slot.acquire(), 1)):
        return False
    slot.release()
    return True


def test_the_first_user_does_not_wait(slot: EngineSlot):
    assert list(slot.acquire()) == []
    assert not is_free(slot)


def test_a_second_user_waits_until_the_first_is_done(slot: EngineSlot):
    list(slot.acquire())
    second = slot.acquire()
    signs = list(islice(second, 2))
    slot.release()

    assert [sign.name for sign in signs] == [WAITING] * 2
    assert 0 < signs[0].elapsed_s < signs[1].elapsed_s
    assert list(second) == []
    assert not is_free(slot)


def test_a_user_on_another_thread_gets_the_engine_when_it_is_free(slot: EngineSlot):
    list(slot.acquire())
    second = Thread(target=lambda: list(slot.acquire()))
    second.start()
    slot.release()
    second.join(timeout=10)

    assert not second.is_alive()
    assert not is_free(slot)


def test_who_stops_waiting_takes_nothing(slot: EngineSlot):
    list(slot.acquire())
    second = slot.acquire()
    next(second)
    second.close()
    slot.release()

    assert is_free(slot)


def test_a_build_waits_for_who_uses_the_engine(slot: EngineSlot, backend: PluginBackend):
    list(slot.acquire())
    build = slot.build(EngineConfig(target="one"))

    assert next(build).name == WAITING
    assert backend.log == []
    slot.release()
    assert [step.name for step in build] == ["fetch", "convert"]
    assert is_free(slot)


def test_a_build_that_stops_waiting_takes_nothing(slot: EngineSlot, backend: PluginBackend):
    list(slot.acquire())
    build = slot.build(EngineConfig(target="one"))
    next(build)
    build.close()
    slot.release()

    assert is_free(slot)
    assert backend.log == []


def test_nobody_uses_the_engine_during_a_build(slot: EngineSlot):
    build = slot.build(EngineConfig(target="one"))
    next(build)

    assert not is_free(slot)


def test_a_stopped_build_frees_the_engine(slot: EngineSlot):
    build = slot.build(EngineConfig(target="one"))
    next(build)
    build.close()

    assert is_free(slot)


def test_a_failed_build_frees_the_engine(slot: EngineSlot):
    with pytest.raises(EngineBuildError, match="it is broken"):
        list(slot.build(EngineConfig(target="broken")))

    assert is_free(slot)


def test_what_was_built_again_is_loaded_again(slot: EngineSlot, backend: PluginBackend):
    _, first = ensure(slot, "one")
    list(slot.build(EngineConfig(target="one")))
    _, second = ensure(slot, "one")

    assert second is not first
    assert backend.log[3:] == ["build one", "close one", "load one"]


def test_a_stopped_build_keeps_the_loaded_engine(slot: EngineSlot):
    _, first = ensure(slot, "one")
    build = slot.build(EngineConfig(target="one"))
    next(build)
    build.close()

    assert ensure(slot, "one")[1] is first


def test_a_build_of_another_config_keeps_the_loaded_engine(slot: EngineSlot):
    _, first = ensure(slot, "one")
    list(slot.build(EngineConfig(target="two")))

    assert ensure(slot, "one")[1] is first


def test_who_need_not_stop_gets_the_engine_at_once(slot: EngineSlot):
    seen: list[BuildProgress] = []
    engine = slot.load(EngineConfig(target="one"), seen.append)

    assert [progress.name for progress in seen] == [LOADING, "fetch", "convert", LOADING]
    assert slot.load(EngineConfig(target="one")) is engine


# -- the end


def test_closing_the_slot_closes_its_engine_once(slot: EngineSlot, backend: PluginBackend):
    backend.built.add("one")
    ensure(slot, "one")
    slot.close()
    slot.close()

    assert backend.log == ["load one", "close one"]


def test_an_unknown_back_end_is_told_with_those_there_are():
    with pytest.raises(
        ValueError,
        match=r"backend is 'abacus': use one of auto, onnxruntime, transformers, tensorrt_llm$",
    ):
        load_engine(EngineConfig(backend="abacus"))
