"""data/tokenizer.py: bytes are ids, with tiktoken and without, and a byte the model never saw is named."""
import pytest
import torch

from data.tokenizer import EOT, byte_encoding, decode, encode_checked

TEXTS = ["", "Q M=913 U=754 n=U+M\n", "a" * 3000 + "\n" * 50, "<|endoftext|>", "\x00\x7f\r\n\t",
         "caf\u00e9 \u4f60\U0001f642"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tiktoken_and_plain_bytes_agree(text):
    ids = encode_checked(text)
    assert ids == list(text.encode()) == byte_encoding().encode_ordinary(text)
    assert decode(ids) == text == byte_encoding().decode(ids)


def test_every_byte_and_eot_have_their_ids():
    encoding = byte_encoding()
    assert encoding.name == "bytes" and encoding.n_vocab == 257 and encoding.eot_token == EOT == 256
    assert [encoding.decode_single_token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert encoding.encode("a<|endoftext|>", allowed_special="all") == [97, 256]


def test_unknown_byte_is_named_with_its_offset_and_the_alphabet():
    assert encode_checked("ab\nba", "ab\n") == [97, 98, 10, 98, 97]
    with pytest.raises(ValueError, match=r"byte 0x21 \('!'\) at offset 3 is not one of the 3 bytes .*'\\nab'"):
        encode_checked("ab\n!a?", "ab\n")
    with pytest.raises(ValueError, match=r"byte 0xc3 \('\\xc3'\) at offset 1 "):
        encode_checked("a\u00e9", "ab")
    assert encode_checked("\u00e9", "\xc3\xa9") == [0xC3, 0xA9]  # the alphabet holds bytes, not characters
    with pytest.raises(ValueError, match="byte 0x61"):
        encode_checked("a", "")  # nothing is allowed: not the same as None
    with pytest.raises(ValueError, match="at offset 1 has no UTF-8 bytes"):
        encode_checked("a\ud800")


def test_decode_is_for_display():
    assert decode(torch.tensor([104, 105, EOT])) == "hi" and decode([EOT]) == ""
    assert decode([0xC3, 97]) == "\ufffda"
    for odd in (257, -1):
        with pytest.raises(ValueError, match=f"id {odd} is no byte"):
            decode([97, odd])
