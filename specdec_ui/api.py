"""The page's actions as named endpoints for `gradio_client`: /run, /compare, /build and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import gradio as gr
from gradio.events import api

from engines import (
    AUTO,
    BUNDLED,
    DEFAULT_NUM_DRAFT_TOKENS,
    LOADING,
    WAITING,
    BuildProgress,
    DraftKind,
    EngineSlot,
    EngineStore,
    check_references,
    doctor,
    resolve_draft,
)
from specdec_ui.handlers import stream_run, throttled
from specdec_ui.state import RunForm, RunState, engine_config
from specdec_ui.views import USER_ERRORS, running_text

CONCURRENCY_ID = "engine"  # whatever touches the device waits in one queue


@contextmanager
def as_page_error() -> Iterator[None]:
    """Turn an error for the user into Gradio's, which reaches the client as its sentence."""
    try:
        yield
    except USER_ERRORS as exc:
        raise gr.Error(str(exc), print_exception=False) from exc


def add_endpoints(slot: EngineSlot) -> None:
    """Add the endpoints to the page that is being built."""

    def stream(form: RunForm) -> Iterator[dict[str, Any]]:
        with (
            as_page_error(),
            closing(stream_run(slot, form)) as items,
            closing(throttled(items)) as shown,
        ):
            state = None
            for item in shown:
                if isinstance(item, RunState):
                    state = item
                yield _progress(item)
            if state is not None:
                yield state.record.to_dict()

    def generator(*, baseline: bool) -> Callable[..., Iterator[dict[str, Any]]]:
        def generate(
            prompt: str,
            num_draft_tokens: int | None = None,
            draft_kind: str | None = None,
            max_new_tokens: int = 64,
            temperature: float = 0.0,
            top_k: int = 0,
            top_p: float = 1.0,
            seed: int = 0,
            target: str = BUNDLED,
            draft: str = "",
            chat_template: bool = True,
            backend: str = AUTO,
            repeats: int = 1,
            dtype: str = "auto",
            tensorrt_llm: dict[str, Any] | None = None,
            min_draft_prob: float | None = None,
        ) -> Iterator[dict[str, Any]]:
            # What is left open is chosen as the page does; the rest is judged with the form.
            chosen_draft, kind = resolve_draft(target, draft, cast(DraftKind | None, draft_kind))
            if num_draft_tokens is None:
                num_draft_tokens = DEFAULT_NUM_DRAFT_TOKENS.get(kind, 0)
            yield from stream(
                RunForm(
                    backend=backend,
                    target=target,
                    draft_kind=kind,
                    draft=chosen_draft or "",
                    prompt=prompt,
                    chat_template=chat_template,
                    num_draft_tokens=num_draft_tokens,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    seed=seed,
                    baseline=baseline,
                    repeats=repeats,
                    min_draft_prob=min_draft_prob,
                    dtype=dtype,
                    tensorrt_llm=tensorrt_llm or {},
                )
            )

        return generate

    def build(
        target: str = BUNDLED,
        draft: str = "",
        backend: str = AUTO,
        dtype: str = "auto",
        tensorrt_llm: dict[str, Any] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Build a pair into the engine store, yielding progress."""
        with as_page_error():
            chosen_draft, _ = resolve_draft(target, draft, None)
            config = engine_config(backend, target, chosen_draft, dtype, tensorrt_llm or {})
            with closing(slot.build(config)) as progress:
                for item in progress:
                    yield _progress(item)
        yield {"state": "built", "built": [name for name in (target, chosen_draft) if name]}

    def check(target: str = BUNDLED, draft: str = "") -> Iterator[dict[str, Any]]:
        """Say whether a draft can propose for a target, rule by rule."""
        with as_page_error():
            chosen_draft, _ = resolve_draft(target, draft, None)
            if chosen_draft is None:
                raise ValueError("draft is missing: name a draft model")
            steps = check_references(target, chosen_draft, EngineStore())
            try:
                while True:
                    yield {"state": "fetching", "message": next(steps)}
            except StopIteration as ended:
                yield ended.value.to_dict()

    def report() -> dict[str, Any]:
        """Say what is installed and usable."""
        return doctor()

    queued: dict[str, Any] = {"concurrency_id": CONCURRENCY_ID, "concurrency_limit": 1}
    api(
        generator(baseline=False),
        api_name="run",
        api_description="Generate, yielding progress; the last value is the whole run.",
        **queued,
    )
    api(
        generator(baseline=True),
        api_name="compare",
        api_description="Generate with and without drafting; the last value compares the two.",
        **queued,
    )
    api(
        build,
        api_name="build",
        api_description="Build a pair into the engine store, yielding progress.",
        **queued,
    )
    api(
        check,
        api_name="check",
        api_description="Say whether a draft can propose for a target; no weights are read.",
        concurrency_id="check",
        concurrency_limit=1,
    )
    api(report, api_name="doctor", api_description="Say what is installed and usable.")


def _progress(item: BuildProgress | RunState) -> dict[str, Any]:
    if isinstance(item, BuildProgress):
        states = {LOADING: "loading", WAITING: "waiting"}
        return {
            "state": states.get(item.name, "building"),
            "stage": item.stage,
            "num_stages": item.num_stages,
            "name": item.name,
            "message": item.message,
            "done_bytes": item.done_bytes,
            "total_bytes": item.total_bytes,
            "elapsed_s": item.elapsed_s,
        }
    text = item.lanes[item.current].stats.text if item.current else ""
    return {"state": "running", "side": item.current, "message": running_text(item), "text": text}
