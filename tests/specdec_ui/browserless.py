"""The page's own events without a browser: what Run sends and receives over the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx


class PageClient:
    """Presses a button of the page by its element id, as the front end does."""

    def __init__(self, url: str, session: str) -> None:
        self.url = url.rstrip("/")
        self.session = session
        self.num_bytes = 0  # received over the event stream
        self.config = httpx.get(f"{self.url}/config").json()
        self.components = {item["id"]: item for item in self.config["components"]}

    def inputs(self, **changes: Any) -> list[Any]:
        """Return the values of Run's inputs, some changed; controls are named by their label."""
        values = []
        for id_ in self.event("sd-run")["inputs"]:
            props = self.components[id_]["props"]
            label = str(props.get("label", "")).lower().replace(" ", "_")
            values.append(changes.pop(label, props.get("value")))
        assert not changes, f"no control is labelled {list(changes)}"
        return values

    def event(self, element_id: str) -> dict[str, Any]:
        """Return the event that a click on an element triggers."""
        button = next(
            id_
            for id_, item in self.components.items()
            if item["props"].get("elem_id") == element_id
        )
        clicked = next(
            item for item in self.config["dependencies"] if [button, "click"] in item["targets"]
        )
        # The first answer to a click comes at once; the work follows it.
        return next(
            item
            for item in self.config["dependencies"]
            if item["trigger_after"] == clicked["id"] and not item["trigger_only_on_failure"]
        )

    def press(self, element_id: str, inputs: list[Any]) -> Iterator[dict[str, Any]]:
        """Yield the messages of an event, from its start to its completion."""
        join = httpx.post(
            f"{self.url}/gradio_api/queue/join",
            json={
                "data": inputs,
                "fn_index": self.event(element_id)["id"],
                "session_hash": self.session,
            },
        )
        join.raise_for_status()
        stream = f"{self.url}/gradio_api/queue/data?session_hash={self.session}"
        with httpx.stream("GET", stream, timeout=60) as response:
            for line in response.iter_lines():
                self.num_bytes += len(line.encode()) + 1
                if not line.startswith("data:"):
                    continue
                message: dict[str, Any] = json.loads(line.removeprefix("data:"))
                yield message
                if message["msg"] in ("process_completed", "close_stream"):
                    return
