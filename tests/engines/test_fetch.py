"""Downloads from the Hub: the real client against a small server of our own."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import psutil
import pytest

from engines.checkpoints import built_path, parse_reference
from engines.child import child_lines, own_module
from engines.config import EngineConfig, GenerationRequest
from engines.errors import EngineBuildError, ModelNotBuiltError
from engines.generators import finished
from engines.pairs.reading import check_references
from engines.stats import stats_of
from engines.store import EngineStore
from engines.transformers_backend.backend import TransformersBackend
from tests.conftest import write_tiny_model

COMMIT = "c0ffee" + "0" * 34
WEIGHTS = "model.safetensors"
LONG_FILE = "merges.txt"
LONG_FILE_BYTES = 24 * 1024 * 1024  # the client writes blocks of 10 MiB
TIMEOUT_S = 60


@dataclass(slots=True)
class Hub:
    """What the server knows and how it behaves."""

    files: dict[str, bytes]
    refused: tuple[HTTPStatus, str] | None = None  # status and error code of every file
    num_cuts: int = 0  # how often the connection still breaks in the middle of the long file
    stalls: bool = False  # whether the long file stops coming in the middle
    is_stalled: Event = field(default_factory=Event)
    goes_on: Event = field(default_factory=Event)
    ranges: list[str] = field(default_factory=list)  # asked for
    served: list[str] = field(default_factory=list)  # files whose content was asked for


def make_handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """As much of the Hub as a download needs."""

        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            if path == "/":
                self.answer()
            elif not re.match(r"(/api/models)?/org/tiny\b", path):
                self.refuse(HTTPStatus.NOT_FOUND, "RepoNotFound")
            elif path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": etag(content)}
                    for name, content in hub.files.items()
                ]
                self.answer(json.dumps(tree).encode())
            elif path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
                self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT}).encode())
            elif match := re.fullmatch(rf"/org/tiny/resolve/(?:main|{COMMIT})/(.+)", path):
                self.answer_file(match[1])
            else:
                self.refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")

        def answer_file(self, name: str) -> None:
            if hub.refused is not None:
                self.refuse(*hub.refused)
            elif name not in hub.files:
                self.refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
            else:
                content = hub.files[name]
                headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": COMMIT}
                if self.command == "GET":
                    hub.served.append(name)
                start = 0
                if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                    start = int(match[1])
                    hub.ranges.append(match[0])
                    headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.answer(content[start:], headers, is_long=name == LONG_FILE)

        def answer(
            self,
            body: bytes = b"",
            headers: dict[str, str] | None = None,
            *,
            is_long: bool = False,
        ) -> None:
            headers = headers or {}
            is_part = "Content-Range" in headers
            self.send_response(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            half = len(body) // 2
            self.wfile.write(body[:half])
            if is_long and hub.num_cuts > 0:
                hub.num_cuts -= 1
                self.close_connection = True
                return
            if is_long and hub.stalls:
                self.wfile.flush()
                hub.is_stalled.set()
                hub.goes_on.wait(TIMEOUT_S)
            self.wfile.write(body[half:])

        def refuse(self, status: HTTPStatus, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_tiny_model(tmp_path_factory.mktemp("hub") / "tiny", seed=3)
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(
    model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    hub = Hub({**model_files, LONG_FILE: bytes(LONG_FILE_BYTES)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(hub))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    # What the child that downloads sees.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield hub
    hub.goes_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


def build(target: str, store: EngineStore) -> list[str]:
    progress = TransformersBackend(store).build(EngineConfig(target=target))
    return [step.message for step in progress if step.message is not None]


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody answers


def test_a_hub_model_is_downloaded_and_generates(hub: Hub, store: EngineStore):
    config = EngineConfig(target="org/tiny")
    messages = build("org/tiny", store)

    with TransformersBackend(store).load(config) as engine:
        prompt = engine.encode("hello", chat_template=True)
        events = engine.generate(GenerationRequest(prompt, "prompt_lookup", 2, max_new_tokens=8))
        assert stats_of(events).num_output_tokens == 8
        assert engine.info.target == "org/tiny"
        assert engine.info.commits == {"target": COMMIT}
    assert messages[0] == "org/tiny: 25 MB to download"
    assert messages[1].startswith("fetched ")
    assert messages[2] == "org/tiny: llama, 21 tensors"


def test_other_formats_of_the_same_weights_stay_where_they_are(hub: Hub, store: EngineStore):
    build("org/tiny", store)

    assert WEIGHTS in hub.served
    assert "pytorch_model.bin" not in hub.served


def test_a_download_is_told_in_bytes(hub: Hub, store: EngineStore):
    steps = list(TransformersBackend(store).build(EngineConfig(target="org/tiny")))
    told = [(step.done_bytes, step.total_bytes) for step in steps if step.total_bytes]
    total = sum(len(content) for name, content in hub.files.items() if name != "pytorch_model.bin")
    assert told[-1] == (total, total)
    assert told == sorted(told)
    assert {step.name for step in steps if step.total_bytes} == {"fetch org/tiny"}


def test_a_download_that_the_disk_cannot_hold_is_refused_before_it_begins(
    hub: Hub, store: EngineStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    # The child's own look at the disk: a module of that name comes first on its path.
    (tmp_path / "sitecustomize.py").write_text(
        "import shutil\n"
        "from types import SimpleNamespace\n"
        "shutil.disk_usage = lambda path: SimpleNamespace(total=9, used=9, free=10**6)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineBuildError, match=r"takes 25 MB in .*, where 1 MB are free"):
        build("org/tiny", store)
    assert LONG_FILE not in hub.served


def test_a_pair_is_checked_without_its_weights(hub: Hub, store: EngineStore):
    report = finished(check_references("org/tiny", "org/tiny@main", store))
    assert report.outcome == "warning"  # as large as its target
    assert "tokenizer.json" in hub.served
    assert WEIGHTS not in hub.served
    need = TransformersBackend(store).memory_need(EngineConfig(target="org/tiny"))
    assert need is not None  # by its configuration, before anything large is downloaded
    with pytest.raises(ModelNotBuiltError, match="is not downloaded yet"):
        built_path(parse_reference("org/tiny"), store)
    build("org/tiny", store)
    assert WEIGHTS in hub.served
    assert built_path(parse_reference("org/tiny"), store)


def test_a_repository_of_pickles_alone_is_refused(hub: Hub, store: EngineStore):
    del hub.files[WEIGHTS]
    with pytest.raises(EngineBuildError, match="'org/tiny' has no weights in the safetensors"):
        build("org/tiny", store)
    assert "pytorch_model.bin" not in hub.served


def test_a_second_build_downloads_nothing(hub: Hub, store: EngineStore):
    build("org/tiny", store)
    hub.served.clear()

    build("org/tiny", store)

    assert hub.served == []


def test_without_a_network_the_earlier_download_is_used_and_said_so(
    hub: Hub, store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    build("org/tiny", store)
    go_offline(monkeypatch)

    messages = build("org/tiny", store)

    assert re.search(r"127\.0\.0\.1:9 cannot be reached \(.*; going on with the copy", messages[0])


def test_without_a_network_and_a_copy_the_place_is_named(
    hub: Hub, store: EngineStore, monkeypatch: pytest.MonkeyPatch
):
    go_offline(monkeypatch)

    with pytest.raises(
        EngineBuildError, match=r"'org/tiny' cannot be fetched: http://127\.0\.0\.1:9 cannot be rea"
    ):
        build("org/tiny", store)


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("org/none", "there is no 'org/none' on the Hub that this machine may read; check the"),
        ("org/tiny@v9", "'org/tiny' has no revision 'v9' on the Hub"),
    ],
)
def test_what_the_hub_does_not_have_is_told(
    hub: Hub, store: EngineStore, target: str, sentence: str
):
    with pytest.raises(EngineBuildError, match=f"^'{target}' cannot be fetched: {sentence}"):
        build(target, store)


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (HTTPStatus.FORBIDDEN, "GatedRepo", "'org/tiny' is gated: accept its licence there, then"),
        (HTTPStatus.UNAUTHORIZED, "GatedRepo", "'org/tiny' is gated: accept its licence there"),
        (HTTPStatus.FORBIDDEN, "", "'org/tiny' could not be fetched: .*403"),
    ],
)
def test_files_that_may_not_be_read_are_told(
    hub: Hub, store: EngineStore, status: HTTPStatus, code: str, sentence: str
):
    hub.refused = (status, code)

    with pytest.raises(EngineBuildError, match=f"^'org/tiny' cannot be fetched: {sentence}"):
        build("org/tiny", store)


def test_a_download_that_breaks_off_once_goes_on_where_it_was(hub: Hub, store: EngineStore):
    hub.num_cuts = 1

    build("org/tiny", store)

    (range_asked_for,) = hub.ranges
    assert int(range_asked_for.removeprefix("bytes=").removesuffix("-")) > 0


def test_a_connection_that_keeps_breaking_is_told_and_leaves_no_model(hub: Hub, store: EngineStore):
    hub.num_cuts = 1000

    with pytest.raises(EngineBuildError, match=r"^'org/tiny' cannot be fetched: ") as failure:
        build("org/tiny", store)

    assert "\n" not in str(failure.value)
    with pytest.raises(ModelNotBuiltError):
        built_path(parse_reference("org/tiny"), store)


def test_closing_a_build_kills_its_download_and_the_next_one_succeeds(hub: Hub, store: EngineStore):
    hub.stalls = True
    others = set(psutil.Process().children())
    progress = TransformersBackend(store).build(EngineConfig(target="org/tiny"))
    while not hub.is_stalled.is_set():
        next(progress)
    (child,) = set(psutil.Process().children()) - others

    progress.close()

    assert not child.is_running()
    with pytest.raises(ModelNotBuiltError):
        built_path(parse_reference("org/tiny"), store)
    hub.stalls = False
    hub.goes_on.set()
    build("org/tiny", store)


def test_one_file_can_be_fetched_and_linked(hub: Hub, tmp_path: Path):
    link = tmp_path / "linked"
    options = ["--revision", COMMIT, "--file", "config.json", "--link", str(link)]

    command = own_module("engines.fetch", "org/tiny", *options)
    (line,) = filter(None, child_lines(command, action="fetching"))

    assert line.startswith("fetched ")
    assert link.is_symlink()
    assert link.read_bytes() == hub.files["config.json"]


def test_a_file_that_the_hub_does_not_have_is_told(hub: Hub):
    command = own_module("engines.fetch", "org/tiny", "--revision", COMMIT, "--file", "none.gguf")

    with pytest.raises(EngineBuildError, match=r"^asking: 'org/tiny' could not be fetched: .*404"):
        list(child_lines(command, action="asking"))
