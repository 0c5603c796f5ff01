"""The LLM of the PyTorch flow yields chunks, statistics and refusals."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.fake_tensorrt_llm.calls import (
    PROMPT,
    Install,
    K,
    copy_checkpoint,
    lib,
)
from tests.fake_tensorrt_llm.scenario import Scenario


def open_llm(model: Path, draft: Path | None = None, **changes: Any) -> Any:
    api = lib("tensorrt_llm.llmapi")
    settings: dict[str, Any] = {"disable_overlap_scheduler": True, "enable_iter_perf_stats": True}
    if draft is not None:
        settings["speculative_config"] = api.DraftTargetDecodingConfig(
            max_draft_len=K, speculative_model=draft
        )
    return api.LLM(model=str(model), **(settings | changes))


def chunks_of(llm: Any, num_tokens: int, **params: Any) -> list[list[int]]:
    sampling = lib("tensorrt_llm").SamplingParams(max_tokens=num_tokens, **params)
    outputs = llm.generate_async(PROMPT, sampling, streaming=True)
    return [list(output.outputs[0].token_ids_diff) for output in outputs]


def test_chunks_are_steps(install: Install, tiny_target: Path, tiny_draft: Path):
    install(Scenario(version="1.4.0rc1"))
    params = {"temperature": 0.0, "ignore_eos": True}
    with open_llm(tiny_target) as llm:
        plain = chunks_of(llm, 40, **params)
    with open_llm(tiny_target, tiny_draft) as llm:
        chunks = chunks_of(llm, 40, **params)
        stats = llm.get_stats(timeout=1)

    assert all(len(chunk) == 1 for chunk in [*plain, chunks[0]])
    assert [*chain(*chunks)] == [*chain(*plain)]
    assert max(map(len, chunks)) > 1
    prefill, *steps = stats
    assert prefill["inflightBatchingStats"] == {"numContextRequests": 1, "numGenRequests": 0}
    accepted = [step["specDecodingStats"]["numAcceptedTokens"] for step in steps]
    assert accepted[:-1] == [len(chunk) - 1 for chunk in chunks[1:-1]]
    assert llm.get_stats() == []


def test_a_request_tells_how_it_ended(install: Install, tiny_target: Path, tiny_draft: Path):
    install(Scenario(version="1.4.0rc1"))
    llm = open_llm(tiny_target, tiny_draft)
    sampling = lib("tensorrt_llm").SamplingParams
    whole = llm.generate(PROMPT, sampling(max_tokens=30, ignore_eos=True), use_tqdm=False)
    ids = whole.outputs[0].token_ids
    assert (whole.finished, whole.outputs[0].finish_reason) == (True, "length")
    assert whole.prompt_token_ids == PROMPT
    assert whole.avg_decoded_tokens_per_iter == 30 / whole.decoding_iter
    accepted, drafted = whole.spec_dec_totals
    assert 0 < accepted < drafted == K * (whole.decoding_iter - 1)
    assert sum(whole.per_pos_accepted) == accepted

    ended = llm.generate(PROMPT, sampling(max_tokens=30, end_id=ids[7])).outputs[0]
    stop = {"max_tokens": 30, "ignore_eos": True, "stop_token_ids": [ids[7]]}
    stopped = llm.generate(PROMPT, sampling(**stop)).outputs[0]
    kept = llm.generate(PROMPT, sampling(**stop, include_stop_str_in_output=True)).outputs[0]
    assert (ended.finish_reason, ended.token_ids) == ("stop", ids[:8])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", ids[:7])
    assert (kept.finish_reason, kept.token_ids) == ("stop", ids[:8])

    stream = llm.generate_async(PROMPT, sampling(max_tokens=30), streaming=True)
    next(stream).abort()
    (last,) = stream
    assert (last.outputs[0].finish_reason, last.outputs[0].token_ids_diff) == ("cancelled", [])


def test_slow_readers_get_merged_chunks(install: Install, tiny_target: Path):
    install(Scenario(version="1.4.0rc1", merge=3, no_stats=True))
    llm = open_llm(tiny_target)

    assert [len(chunk) for chunk in chunks_of(llm, 7, ignore_eos=True)] == [3, 3, 1]
    assert llm.get_stats() == []


def test_text_is_encoded_and_decoded(install: Install, tiny_target: Path):
    install(Scenario(version="1.4.0rc1"))
    llm = open_llm(tiny_target)
    output = llm.generate("ab", lib("tensorrt_llm").SamplingParams(max_tokens=3, ignore_eos=True))

    assert output.prompt_token_ids == llm.tokenizer.encode("ab").ids
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_drafts_may_come_from_the_text(install: Install, tiny_target: Path):
    install(Scenario(version="1.4.0rc1"))
    config = lib("tensorrt_llm.llmapi").NGramDecodingConfig(max_draft_len=K)
    prompt = [5, 6, 7] * 3
    sampling = lib("tensorrt_llm").SamplingParams(max_tokens=60, ignore_eos=True)

    plain = open_llm(tiny_target).generate(prompt, sampling)
    drafted = open_llm(tiny_target, speculative_config=config).generate(prompt, sampling)

    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("version", "changes", "error", "message"),
    [
        ("1.2.1", {"disable_overlap_scheduler": False}, RuntimeError, "disable_overlap_scheduler"),
        ("1.4.0rc1", {"pipeline_parallel_size": 2}, NotImplementedError, "executor loop"),
        ("1.4.0rc1", {"tensor_parallel_size": 2}, RuntimeError, "invalid device"),
    ],
)
def test_an_llm_is_refused(
    version: Any,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    install: Install,
    tiny_target: Path,
    tiny_draft: Path,
):
    install(Scenario(version=version))

    with pytest.raises(error, match=message):
        open_llm(tiny_target, tiny_draft, **changes)


def test_other_wrong_uses_of_an_llm(
    install: Install, tiny_target: Path, tiny_draft: Path, tmp_path: Path
):
    install(Scenario(version="1.4.0rc1"))
    api, sampling = lib("tensorrt_llm.llmapi"), lib("tensorrt_llm").SamplingParams
    with pytest.raises(OSError, match="local folder"):
        open_llm(tmp_path / "none")
    with pytest.raises(ValueError, match="vocabulary"):
        open_llm(tiny_target, copy_checkpoint(tiny_draft, tmp_path / "other", vocab_size=300))
    with pytest.raises(ValueError, match="max_draft_len"):
        api.DraftTargetDecodingConfig(max_draft_len=0, speculative_model="draft")
    with pytest.raises(ValueError, match="Draft model"):
        api.DraftTargetDecodingConfig(max_draft_len=1)
    llm = open_llm(tiny_target, tiny_draft, max_seq_len=20)
    with pytest.raises(ValueError, match="logprobs"):
        llm.generate(PROMPT, sampling(logprobs=1))
    with pytest.raises(ValueError, match="max_seq_len"):
        llm.generate(PROMPT, sampling(max_tokens=18))
    llm.shutdown()
    with pytest.raises(RuntimeError):
        llm.generate(PROMPT, sampling(max_tokens=1))


def test_only_some_versions_count_drafts(install: Install, tiny_target: Path, tiny_draft: Path):
    for version, is_counted in {"1.1.0": False, "1.2.1": True, "1.3.0rc22": True}.items():
        install(Scenario(version=version))  # type: ignore[arg-type]
        name = "speculative_model_dir" if version == "1.1.0" else "speculative_model"
        config = lib("tensorrt_llm.llmapi").DraftTargetDecodingConfig
        llm = open_llm(
            tiny_target, speculative_config=config(max_draft_len=K, **{name: str(tiny_draft)})
        )
        output = llm.generate(
            PROMPT, lib("tensorrt_llm").SamplingParams(max_tokens=5, return_perf_metrics=True)
        )

        assert all(("specDecodingStats" in stats) == is_counted for stats in llm.get_stats())
        metrics = output.outputs[0].request_perf_metrics.speculative_decoding
        assert metrics.total_draft_tokens == 0
        assert not hasattr(output, "spec_dec_totals")
