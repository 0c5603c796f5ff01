"""The ONNX graph of a Llama, without its weights: they are named like a checkpoint's tensors.

Inputs:
    input_ids: [1, num_tokens], int64: what is read now.
    total_sequence_length: int32: the number of tokens that are cached after it.
    seqlens_k: [1], int32: that number less one.
    num_logits: [1], int64: rows of logits that are wanted, counted from the end.
    past.N.key, past.N.value: [1, num_key_value_heads, capacity, head_dim], float32. The outputs
        present.N.key and present.N.value are bound to the same buffers and written in place.
Outputs:
    logits: [1, num_logits, vocab_size], float32.
    probs: The same size, their softmax: made while the logits are at hand, by all threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from engines.onnxruntime_backend.llama import EMBEDDINGS, HEAD, LlamaShape
from engines.onnxruntime_backend.narrow import BITS, BLOCK_SIZE, parts_of, sizes_of

CONTRIB = "com.microsoft"  # operators that onnxruntime brings beside those of ONNX
OPSETS = (("", 21), (CONTRIB, 1))
IR_VERSION = 10
COSINES, SINES = "rotary.cosines", "rotary.sines"
INT8_ACTIVATIONS = 4  # accuracy_level of MatMulNBits: products of integers
TO_THE_END = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """A weight that a graph names."""

    sizes: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph, and the weights to hand over with it."""

    serialized: bytes
    weights: Mapping[str, Wanted]


def llama_graph(shape: LlamaShape, *, embeddings_dtype: np.dtype[Any], is_narrow: bool) -> Graph:
    """Return the graph of a Llama.

    Args:
        shape: Its sizes.
        embeddings_dtype: Of the checkpoint's embeddings, which are read by row; where the head
            multiplies by them, too, they are wanted in float32.
        is_narrow: The matrices are 4-bit integers (see `narrow`), else float32 [rows, columns] as
            in a checkpoint.
    """
    builder = _Builder(shape, embeddings_dtype, is_narrow)
    builder.add_all()
    return Graph(builder.serialized(), builder.weights)


def cache_names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield the input and the output that share a KV buffer, key and value of each layer."""
    for layer in range(num_layers):
        for part in ("key", "value"):
            yield f"past.{layer}.{part}", f"present.{layer}.{part}"


class _Builder:
    """Nodes in order, and the weights that they name."""

    def __init__(self, shape: LlamaShape, embeddings_dtype: np.dtype[Any], is_narrow: bool) -> None:
        self.weights: dict[str, Wanted] = {}
        self._shape = shape
        self._is_narrow = is_narrow
        # A tied head is the embeddings, unless it is narrow and they are not.
        self._is_shared = shape.is_tied and not is_narrow
        self._embeddings_dtype = np.dtype(np.float32) if self._is_shared else embeddings_dtype
        self._nodes: list[Any] = []

    def add_all(self) -> None:
        shape = self._shape
        layers = [f"model.layers.{layer}" for layer in range(shape.num_layers)]
        next_norms = [*(f"{layer}.input_layernorm" for layer in layers[1:]), "model.norm"]
        hidden = self._embedded()
        normed = self._add(
            "SimplifiedLayerNormalization",
            [hidden, self._vector(f"{layers[0]}.input_layernorm.weight")],
            axis=-1,
            epsilon=shape.rms_norm_eps,
            stash_type=TensorProto.FLOAT,
        )
        for number, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attended = self._attention(normed, layer, number)
            hidden, normed = self._norm_of_sum(
                hidden, attended, f"{layer}.post_attention_layernorm"
            )
            hidden, normed = self._norm_of_sum(hidden, self._mlp(normed, layer), next_norm)
        start = self._add("Neg", ["num_logits"])
        rows = self._add("Slice", [normed, start, "to_the_end", "the_rows"])
        head = EMBEDDINGS if self._is_shared else HEAD
        self._linear(rows, head, shape.hidden_size, shape.vocab_size, output="logits")
        self._add("Softmax", ["logits"], output="probs", axis=-1)

    def serialized(self) -> bytes:
        shape = self._shape
        cache: list[int | str] = [1, shape.num_key_value_heads, "capacity", shape.head_dim]
        names = list(cache_names(shape.num_layers))
        inputs = [
            _value("input_ids", TensorProto.INT64, [1, "num_tokens"]),
            _value("total_sequence_length", TensorProto.INT32, []),
            _value("seqlens_k", TensorProto.INT32, [1]),
            _value("num_logits", TensorProto.INT64, [1]),
            *(_value(past, TensorProto.FLOAT, cache) for past, _ in names),
        ]
        rows: list[int | str] = [1, "num_rows", shape.vocab_size]
        outputs = [
            *(_value(name, TensorProto.FLOAT, rows) for name in ("logits", "probs")),
            *(_value(present, TensorProto.FLOAT, cache) for _, present in names),
        ]
        constants = [
            helper.make_tensor("to_the_end", TensorProto.INT64, [1], [TO_THE_END]),
            helper.make_tensor("the_rows", TensorProto.INT64, [1], [1]),
        ]
        weights = [_external(name, wanted) for name, wanted in self.weights.items()]
        graph = helper.make_graph(self._nodes, "llama", inputs, outputs, [*constants, *weights])
        opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        serialized: bytes = model.SerializeToString()
        return serialized

    def _embedded(self) -> str:
        sizes = (self._shape.vocab_size, self._shape.hidden_size)
        table = self._weight(EMBEDDINGS, sizes, self._embeddings_dtype)
        rows = self._add("Gather", [table, "input_ids"])
        if self._embeddings_dtype == np.float32:
            return rows
        return self._add("Cast", [rows], to=TensorProto.FLOAT)

    def _attention(self, normed: str, layer: str, number: int) -> str:
        shape = self._shape
        prefix = f"{layer}.self_attn"
        heads = {"q": shape.num_heads, "k": shape.num_key_value_heads}
        heads["v"] = heads["k"]
        projected = [
            self._linear(
                normed, f"{prefix}.{part}_proj.weight", shape.hidden_size, count * shape.head_dim
            )
            for part, count in heads.items()
        ]
        half = (shape.context_length, shape.head_dim // 2)
        past = [f"past.{number}.{part}" for part in ("key", "value")]
        cosines, sines = self._weight(COSINES, half), self._weight(SINES, half)
        attended = f"{prefix}.attended"
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [*projected, *past, "seqlens_k", "total_sequence_length", cosines, sines],
                [attended, *(f"present.{number}.{part}" for part in ("key", "value"))],
                domain=CONTRIB,
                num_heads=shape.num_heads,
                kv_num_heads=shape.num_key_value_heads,
                do_rotary=1,
                scale=shape.head_dim**-0.5,
            )
        )
        width = shape.num_heads * shape.head_dim
        return self._linear(attended, f"{prefix}.o_proj.weight", width, shape.hidden_size)

    def _mlp(self, normed: str, layer: str) -> str:
        hidden, intermediate = self._shape.hidden_size, self._shape.intermediate_size
        gate, up = (
            self._linear(normed, f"{layer}.mlp.{part}_proj.weight", hidden, intermediate)
            for part in ("gate", "up")
        )
        silu = self._add("QuickGelu", [gate], domain=CONTRIB, alpha=1.0)  # x * sigmoid(1.0 * x)
        gated = self._add("Mul", [silu, up])
        return self._linear(gated, f"{layer}.mlp.down_proj.weight", intermediate, hidden)

    def _norm_of_sum(self, hidden: str, update: str, norm: str) -> tuple[str, str]:
        """Return the sum of both, and its norm."""
        total, normed = f"{norm}.sum", f"{norm}.normed"
        self._nodes.append(
            helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [hidden, update, self._vector(f"{norm}.weight")],
                [normed, "", "", total],
                domain=CONTRIB,
                epsilon=self._shape.rms_norm_eps,
            )
        )
        return total, normed

    def _linear(
        self, rows: str, weight: str, columns: int, num_rows: int, *, output: str = ""
    ) -> str:
        """Multiply by a matrix that lies [num_rows, columns] in the checkpoint."""
        output = output or f"{weight}.product"
        if self._is_narrow:
            sizes = sizes_of(num_rows, columns)
            parts = zip(parts_of(weight), sizes, (np.uint8, np.float32, np.uint8), strict=True)
            return self._add(
                "MatMulNBits",
                [rows, *(self._weight(*part) for part in parts)],
                output=output,
                domain=CONTRIB,
                K=columns,
                N=num_rows,
                bits=BITS,
                block_size=BLOCK_SIZE,
                accuracy_level=INT8_ACTIVATIONS,
            )
        matrix = self._weight(weight, (num_rows, columns))
        return self._add("FusedMatMul", [rows, matrix], output=output, domain=CONTRIB, transB=1)

    def _vector(self, name: str) -> str:
        return self._weight(name, (self._shape.hidden_size,))

    def _weight(self, name: str, sizes: Sequence[int], dtype: Any = np.float32) -> str:
        self.weights[name] = Wanted(tuple(sizes), np.dtype(dtype))
        return name

    def _add(
        self, operator: str, inputs: Sequence[str], *, output: str = "", **attributes: Any
    ) -> str:
        output = output or f"node.{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output


def _value(name: str, type_: int, sizes: Sequence[int | str]) -> Any:
    return helper.make_tensor_value_info(name, type_, sizes)


def _external(name: str, wanted: Wanted) -> Any:
    type_ = helper.np_dtype_to_tensor_dtype(wanted.dtype)
    tensor = TensorProto(name=name, data_type=type_, dims=wanted.sizes)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="handed over by name")
    return tensor
