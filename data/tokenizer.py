"""Bytes as tokens: what the embedded task and its small models use.

- id 0..255 is the byte of that value, id 256 is <|endoftext|>, so `text.encode()` already is the ids and nothing
  on the training path needs tiktoken;
- `byte_encoding` is the same thing as a tiktoken.Encoding, for code that wants one;
- a model trained on few bytes has untrained embeddings for the rest: `encode_checked` refuses them by name.
"""
EOT = 256


def byte_encoding():
    """A tiktoken.Encoding named "bytes": 256 single bytes, no merges, and <|endoftext|> = 256."""
    import tiktoken
    return tiktoken.Encoding("bytes", pat_str=r"(?s:.+)", mergeable_ranks={bytes([b]): b for b in range(256)},
                             special_tokens={"<|endoftext|>": EOT}, explicit_n_vocab=257)


def encode_checked(text: str, alphabet: str | None = None) -> list[int]:
    """UTF-8 bytes of text as ids. `alphabet` is ModelConfig.alphabet: the allowed bytes decoded as latin-1, None for
    all of them. The text of a special token is plain bytes here. ValueError names the first byte not allowed."""
    try:
        ids = list(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"character {text[error.start]!r} at offset {error.start} has no UTF-8 bytes") from None
    if alphabet is not None:
        allowed = set(alphabet.encode("latin-1"))
        for offset, byte in enumerate(ids):
            if byte not in allowed:
                raise ValueError(f"byte 0x{byte:02x} ({printable(bytes([byte]))}) at offset {offset} is not one of the "
                                 f"{len(allowed)} bytes this model was trained on: {printable(bytes(sorted(allowed)))}")
    return ids


def decode(ids) -> str:
    """Ids (ints or a 1-D tensor) to text for display: EOT shows as nothing, broken UTF-8 as the replacement mark."""
    ids = [int(i) for i in ids]
    odd = [i for i in ids if not 0 <= i <= EOT]
    if odd:
        raise ValueError(f"id {odd[0]} is no byte: ids run from 0 to 255, and {EOT} ends a text")
    return bytes(i for i in ids if i != EOT).decode("utf-8", errors="replace")


def printable(some: bytes) -> str:
    return repr(some)[1:]
