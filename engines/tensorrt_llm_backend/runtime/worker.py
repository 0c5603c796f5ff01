"""Runs in TensorRT-LLM's interpreter: holds loaded models, and does what the page's process asks.

Standard library and TensorRT-LLM only, for Python 3.10 and newer. Requests and replies are lines
of JSON through two named pipes, since a launcher keeps standard input to itself and the library
prints to standard output. A request is {"op": …}; its replies are any number of {"type": "item"}
or {"type": "progress"}, then one {"type": "result"} or {"type": "error"}. In between come beats.
When the other side is gone, so is this process.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

PROTOCOL = 1
BEAT_S = 0.5
STATS_TIMEOUT_S = 1.0  # to wait for the last statistics of a run
STALE_STATS_TIMEOUT_S = 0.05  # for those of a run before it, which was stopped or failed
CACHED_TEXTS = 2  # as long as the longest that a KV cache has room for
MEMORY_FRACTION = 0.9  # of what is free, at most: the number of tokens is what limits a cache
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
NGRAM_SIZE = 3
CERTAIN = -1e30  # the logit of an id that a draft cannot be
NO_ID = -1  # as an end id: no text ends with it


def main() -> None:
    """Answer requests until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", required=True)
    parser.add_argument("--replies", required=True)
    args = parser.parse_args()
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    if rank != "0":
        raise SystemExit(
            f"this is rank {rank}, and only one process may answer: let the launcher end with "
            "trtllm-llmapi-launch"
        )
    channel = Channel(args.requests, args.replies)
    channel.send("hello", protocol=PROTOCOL, pid=os.getpid())
    flow: Any = None
    flows: dict[str, type] = {"engine": EngineFlow, "pytorch": PyTorchFlow}
    while True:
        request = channel.next_request()
        operation = request.pop("op")
        try:
            if operation == "open":
                flow = flows[request.pop("flow")](channel, **request)
                result = None
            else:
                result = getattr(flow, operation)(**request)
        except Exception as exc:  # whatever the library raises is for the other side to judge
            channel.send("error", error=type(exc).__name__, message=str(exc))
        else:
            channel.send("result", **(result or {}))


class Channel:
    """The two pipes. A request to cancel is heard while another is being answered."""

    def __init__(self, requests: str, replies: str) -> None:
        self._replies = open(replies, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        pipe = open(requests, encoding="utf-8")  # noqa: SIM115
        threading.Thread(target=self._listen, args=(pipe,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def next_request(self) -> dict[str, Any]:
        """Wait for a request."""
        return self._requests.get()

    def send(self, kind: str, **values: Any) -> None:
        """Write a reply."""
        line = json.dumps({"type": kind, **values})
        try:
            with self._lock:
                self._replies.write(f"{line}\n")
                self._replies.flush()
        except OSError:  # nobody is there to read it
            os._exit(1)

    def _listen(self, pipe: TextIO) -> None:
        for line in pipe:
            request = json.loads(line)
            if request["op"] == "cancel":
                self.cancelled.set()
            else:
                self.cancelled.clear()
                self._requests.put(request)
        os._exit(0)  # the other side is gone; the device must not be held for it

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self.send("beat")


class EngineFlow:
    """Two built engines, or the target's alone: each call drafts and verifies once."""

    def __init__(
        self,
        channel: Channel,
        target: dict[str, Any],
        draft: dict[str, Any] | None,
        max_seq_len: int,
        max_draft_len: int,
        gather_generation_logits: bool,
    ) -> None:
        import torch

        self._torch = torch
        self._channel = channel
        self._gathers = gather_generation_logits
        self._prefix: list[int] = []
        self._sampling: dict[str, Any] | None = None
        self._step = 0
        limits = {
            "max_input_len": max_seq_len - (max_draft_len + 1),
            "max_output_len": max_draft_len + 1,
            "max_tokens_in_paged_kv_cache": CACHED_TEXTS * max_seq_len,
            "gather_generation_logits": gather_generation_logits,
        }
        channel.send("progress", text="loading the target")
        self._target = open_runner(target, limits)
        self._draft = None
        if draft is not None:
            channel.send("progress", text="loading the draft")
            self._draft = open_runner(draft, limits)

    def begin(self, prompt: list[int], sampling: dict[str, Any] | None, uses_draft: bool) -> None:
        """Read a prompt, so that its blocks are cached, and keep it as the text so far.

        `sampling` is None for greedy decoding.
        """
        self._prefix = list(prompt)
        self._sampling = sampling
        self._step = 0
        self._generate(self._target, 1, **self._target_sampling())
        if uses_draft:
            self._generate(self._draft, 1, **self._draft_sampling())

    def step(self, num_draft_tokens: int, draft: list[int] | None) -> dict[str, Any]:
        """Draft, where no draft is given, and verify it in one pass of the target."""
        started = time.perf_counter()
        proposed, given = draft or [], {}
        if draft is None and num_draft_tokens > 0:
            proposed, outputs = self._generate(
                self._draft,
                num_draft_tokens,
                **self._draft_sampling(),
                **({"output_generation_logits": True} if self._sampling else {}),
            )
            if self._sampling:
                logits = outputs["generation_logits"][0, 0, -len(proposed) :].float()
                if self._torch.isnan(logits).any():
                    raise RuntimeError("the draft's logits are not numbers")
                given["draft_logits_list"] = [logits / self._sampling["temperature"]]
        elif proposed and self._sampling:
            given["draft_logits_list"] = [self._certain(proposed)]
        drafted = time.perf_counter()
        if proposed:
            given["draft_tokens_list"] = [proposed]
        new, _ = self._generate(self._target, len(proposed) + 1, **self._target_sampling(), **given)
        verified = time.perf_counter()
        self._prefix += new
        self._step += 1
        return {
            "proposed": proposed,
            "tokens": new,
            "draft_s": drafted - started,
            "target_s": verified - drafted,
        }

    def plain(self, max_new_tokens: int, stop_token_ids: list[int]) -> None:
        """Decode without drafts, sending tokens as they come. It cannot be interrupted."""
        num_known = len(self._prefix)
        started = time.perf_counter()
        outputs = self._target.generate(
            [self._torch.tensor(self._prefix, dtype=self._torch.int32)],
            max_new_tokens=max_new_tokens,
            end_id=NO_ID,  # an end id would be left out of the output, a stop word is not
            pad_id=0,
            stop_words_list=[[[id_] for id_ in stop_token_ids]] if stop_token_ids else None,
            streaming=True,
            return_dict=True,
            output_sequence_lengths=True,
            **self._target_sampling(),
        )
        for output in outputs:
            length = int(output["sequence_lengths"][0, 0])
            new = output["output_ids"][0, 0, num_known:length].tolist()
            if new:
                now = time.perf_counter()
                self._channel.send("item", tokens=new, step_s=now - started)
                started, num_known = now, length

    def close(self) -> None:
        """Let go of the device."""
        for runner in (self._draft, self._target):
            if runner is not None:
                runner.session.shutdown()

    def _generate(self, runner: Any, max_new_tokens: int, **given: Any) -> tuple[list[int], Any]:
        """Return what a runner adds to the text, and all that it returned."""
        outputs = runner.generate(
            [self._torch.tensor(self._prefix, dtype=self._torch.int32)],
            max_new_tokens=max_new_tokens,
            end_id=NO_ID,  # never left out, never a reason to end: the other side cuts
            pad_id=0,
            return_dict=True,
            output_sequence_lengths=True,
            **given,
        )
        length = int(outputs["sequence_lengths"][0, 0])
        new = outputs["output_ids"][0, 0, len(self._prefix) : length].tolist()
        if self._torch.cuda.is_available():  # before a clock is read
            self._torch.cuda.synchronize()
        return new, outputs

    def _draft_sampling(self) -> dict[str, Any]:
        if self._sampling is None:
            return {"top_k": 1, "temperature": 1.0}
        # What the library compares the draft with is its plain softmax: it draws from all of it.
        return {
            "temperature": self._sampling["temperature"],
            "top_k": 0,
            "top_p": 1.0,
            "random_seed": self._sampling["seed"] + 2 * self._step,
        }

    def _target_sampling(self) -> dict[str, Any]:
        if self._sampling is None:
            return {"top_k": 1, "temperature": 1.0}
        return {
            "temperature": self._sampling["temperature"],
            "top_k": self._sampling["top_k"],
            "top_p": self._sampling["top_p"],  # without it the library is greedy
            "random_seed": self._sampling["seed"] + 2 * self._step + 1,
        }

    def _certain(self, token_ids: list[int]) -> Any:
        """Return the logits of a draft that was not drawn but chosen."""
        shape = (len(token_ids), self._target.vocab_size_padded)
        logits = self._torch.full(shape, CERTAIN, dtype=self._torch.float32)
        logits[range(len(token_ids)), token_ids] = 0.0
        return logits


def open_runner(engine: dict[str, Any], limits: dict[str, Any]) -> Any:
    """Load a built engine: by this process on one GPU, by processes of the library's on several."""
    from tensorrt_llm.runtime import ModelRunnerCpp

    devices = engine["devices"]
    return ModelRunnerCpp.from_dir(
        engine["folder"],
        rank=0,
        max_batch_size=1,
        max_beam_width=1,
        kv_cache_enable_block_reuse=True,  # each call brings the whole text, and reads what is new
        enable_chunked_context=False,  # else drafts may be dropped
        kv_cache_free_gpu_memory_fraction=MEMORY_FRACTION,
        is_orchestrator_mode=devices is not None,
        device_ids=devices,
        **limits,
    )


class PyTorchFlow:
    """A model that the library runs itself, with its own drafting where it is asked for."""

    def __init__(
        self,
        channel: Channel,
        model: str,
        draft_kind: str,
        draft: str | None,
        num_draft_tokens: int,
        max_seq_len: int,
        dtype: str,
        tensor_parallel_size: int,
    ) -> None:
        from tensorrt_llm.llmapi import LLM, KvCacheConfig

        self._channel = channel
        channel.send("progress", text="loading the models")
        speculative: dict[str, Any] = {}
        if draft_kind != "none":
            speculative = {
                "speculative_config": speculative_config(draft_kind, draft, num_draft_tokens),
                "disable_overlap_scheduler": True,
            }
        self._has_drafts = bool(speculative)
        self._llm = LLM(
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=True,  # so that reading the prompt can be kept apart
                max_tokens=CACHED_TEXTS * max_seq_len,
                free_gpu_memory_fraction=MEMORY_FRACTION,
            ),
            max_batch_size=1,
            max_seq_len=max_seq_len,
            max_num_tokens=max_seq_len,
            enable_iter_perf_stats=True,
            stream_interval=1,
            trust_remote_code=False,
            **speculative,
        )

    def begin(self, prompt: list[int]) -> None:
        """Read a prompt, so that its blocks are cached."""
        from tensorrt_llm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._llm.generate_async(prompt, params, streaming=False).result()
        self._llm.get_stats(STALE_STATS_TIMEOUT_S)

    def stream(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop_token_ids: list[int],
        sampling: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Generate, sending what each pass of the target adds.

        `sampling` is None for greedy decoding.
        """
        from tensorrt_llm.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=max_new_tokens,
            end_id=NO_ID,  # some versions would leave an end id out of the output
            pad_id=0,
            stop_token_ids=stop_token_ids or None,
            include_stop_str_in_output=True,
            detokenize=False,
            **(sampling or {"temperature": 0.0}),
        )
        iteration, num_known, started = 0, 0, time.perf_counter()
        output = self._llm.generate_async(prompt, params, streaming=True)
        for chunk in output:  # one object, which changes: what is wanted of it is read at once
            now, passed = time.perf_counter(), chunk.decoding_iter
            token_ids = list(chunk.outputs[0].token_ids)
            new = token_ids[num_known:]
            if new:
                self._channel.send(
                    "item", tokens=new, num_passes=passed - iteration, step_s=now - started
                )
                num_known, started, iteration = len(token_ids), now, passed
            if self._channel.cancelled.is_set():
                output.abort()
                return {}
        return {"statistics": list(self._statistics()) if self._has_drafts else []}

    def close(self) -> None:
        """Let go of the device."""
        self._llm.shutdown()

    def _statistics(self) -> Iterator[dict[str, Any]]:
        """Yield what the library says of each pass that verified drafts."""
        for iteration in self._llm.get_stats(STATS_TIMEOUT_S):
            verified = iteration.get("specDecodingStats") or {}
            if verified.get("numRequestsWithDraftTokens"):
                yield {
                    "num_draft_tokens": verified["numDraftTokens"],
                    "num_accepted_tokens": verified["numAcceptedTokens"],
                    "draft_s": verified.get("iterLatencyMS", 0.0) / 1000,
                }


def speculative_config(draft_kind: str, draft: str | None, num_draft_tokens: int) -> Any:
    """Return the library's own drafting of a kind. A field's name depends on the version."""
    from tensorrt_llm.llmapi import DraftTargetDecodingConfig, NGramDecodingConfig

    if draft_kind == "prompt_lookup":
        return NGramDecodingConfig(
            max_draft_len=num_draft_tokens, max_matching_ngram_size=NGRAM_SIZE
        )
    fields = DraftTargetDecodingConfig.model_fields
    name = "speculative_model" if "speculative_model" in fields else "speculative_model_dir"
    return DraftTargetDecodingConfig(max_draft_len=num_draft_tokens, **{name: draft})


if __name__ == "__main__":
    main()
