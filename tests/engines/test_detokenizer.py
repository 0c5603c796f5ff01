"""Text in pieces: together they are the whole, whatever the tokens cut through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engines.detokenizer import INCOMPLETE, Decode, Detokenizer

TEXT = "🙂日本é"


def pieces_of(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def decode_bytes(vocabulary: Sequence[bytes], token_ids: Sequence[int]) -> str:
    """Decode as byte-level tokenizers do: a token is any bytes, also a part of a character."""
    return b"".join(vocabulary[id_] for id_ in token_ids).decode(errors="replace")


def decode_words(words: Sequence[str], token_ids: Sequence[int]) -> str:
    """Decode as SentencePiece does: the space before the first word is dropped."""
    return "".join(words[id_] for id_ in token_ids).removeprefix(" ")


single_bytes = partial(decode_bytes, [bytes([byte]) for byte in range(256)])


def test_a_real_byte_level_tokenizer_gives_its_text_in_whole_characters():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    token_ids = tokenizer.encode(TEXT).ids

    pieces = pieces_of(tokenizer.decode, token_ids)

    assert len(token_ids) == len(TEXT.encode())
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_a_character_appears_with_its_last_token():
    assert pieces_of(single_bytes, "é!".encode()) == ["", "é", "!", ""]


def test_a_token_may_end_one_character_and_begin_the_next():
    first, second = "日本".encode()[:4], "日本".encode()[4:]
    assert pieces_of(partial(decode_bytes, [first, second]), [0, 1]) == ["", "日本", ""]


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=20))
def test_the_pieces_of_any_bytes_are_the_whole(vocabulary: list[bytes]):
    decode = partial(decode_bytes, vocabulary)
    token_ids = range(len(vocabulary))
    assert "".join(pieces_of(decode, token_ids)) == decode(token_ids)


def test_words_keep_the_space_between_them():
    assert pieces_of(partial(decode_words, [" one", " two"]), [0, 1]) == ["one", " two", ""]


@given(st.lists(st.sampled_from(["one", " two", " ", "", "é"]), max_size=20))
def test_the_pieces_of_any_words_are_the_whole(words: list[str]):
    decode = partial(decode_words, words)
    token_ids = range(len(words))
    assert "".join(pieces_of(decode, token_ids)) == decode(token_ids)


def test_the_work_for_a_token_does_not_grow_with_the_text():
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return single_bytes(token_ids)

    pieces_of(decode, b"x" * 100)
    assert longest == 2  # the token, and the one before it for what it does to the spelling


def test_flush_returns_an_unfinished_character_once():
    detokenizer = Detokenizer(single_bytes)
    pushed = [detokenizer.push(byte) for byte in "a日".encode()[:3]]
    assert pushed == ["a", "", ""]
    assert detokenizer.flush() == INCOMPLETE
    assert detokenizer.flush() == ""


def test_what_a_fork_is_told_does_not_reach_its_origin():
    *begun, last = "日".encode()
    origin = Detokenizer(single_bytes)
    for byte in begun:
        origin.push(byte)
    fork = origin.fork()
    assert fork.push(ord("?")) == INCOMPLETE + "?"
    assert origin.push(last) == "日"
    assert fork.push(ord("!")) == "!"
