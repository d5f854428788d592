"""The teacher's top logits on disk, so that a retrofit runs without the teacher in memory and without its forward.

- `TaughtRows`: rows of text with the logits that the teacher gave them; `write` makes those that are not there yet.
One safetensors file a row, under the number that the row has in its text: a run that was cut off goes on with the rows
that are missing, other seeds, batches and epochs find theirs, and many processes write side by side. Rows with facts in
them (facts.py) are new in every seed and epoch, and go by their number in the run. teacher.json says of which weights,
tokens, length and facts they are. Numbers are kept as they came, so nothing is rounded that a teacher in
memory would not have rounded: 6 bytes a logit in bf16, 1.5 KB a token for 256 of them.

Letters: B batch, T tokens.
"""
import os
import time
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data.parallel import first, rank, summed, world_size
from model import read_json, write_json


def checksum(path):
    """CRC-32 of a file, 8 hex digits."""
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(2**26):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


class TaughtRows(torch.utils.data.Dataset):
    """Row i: idx, targets (T,) int64, as in rows (a TextRows, or FactRows of it), then the teacher's logits (T, top_k)
    and their tokens (T, top_k) int32. ValueError where a file is missing or damaged.

    way: what the logits depend on, name -> JSON value; it must be what teacher.json says, if there is one. ValueError
    names what differs."""

    def __init__(self, folder, rows, way):
        self.folder, self.rows, path = Path(folder), rows, Path(folder) / "teacher.json"

        def begin():
            made = read_json(path) if path.is_file() else None
            if made is None and next(self.folder.glob("*.safetensors"), None):
                raise ValueError(f"--teacher {folder} has rows but no teacher.json, which says whose they are: give "
                                 "another folder or delete it")
            if made is None:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    write_json(path, way)
                except OSError as error:
                    raise ValueError(f"cannot write to --teacher {folder}: {error.strerror}") from None
            elif differ := [name for name in way if made.get(name) != way[name]]:
                raise ValueError(f"--teacher {folder} holds logits of another {' and another '.join(differ)} "
                                 f"({made.get(differ[0])!r}, not {way[differ[0]]!r}): give another folder or delete it")
        first(begin, "teacher")

    def __len__(self):
        return len(self.rows)

    def path(self, row):
        return self.folder / f"{self.rows.place(row):08d}.safetensors"

    def __getitem__(self, row):
        try:
            known = load_file(self.path(row))
            return *self.rows[row], known["logits"], known["tokens"]
        except (OSError, KeyError, SafetensorError) as error:
            raise ValueError(f"{self.path(row)} is missing or damaged ({error}): delete it, and the same command "
                             "writes it again") from None

    def write(self, n, logits_of, batch_size, device):
        """Have the logits of rows 0 .. n - 1, `batch_size` rows at a time. logits_of(idx (B, T)) -> logits and tokens,
        (B, T, top_k) each. All processes must call it; each makes its share. ValueError when they cannot be written:
        what is there is kept."""
        missing = [row for row in range(min(n, self.rows.n)) if not self.path(row).is_file()]  # later ones: these again
        summed([0])  # all have looked before anyone writes
        # sharded weights meet in every forward: as many for each process, the last ones twice if need be
        share = -(-len(missing) // world_size())
        mine = [missing[min(rank() + i * world_size(), len(missing) - 1)] for i in range(share)]
        start = time.time()
        for i in range(0, share, batch_size):
            part = mine[i:i + batch_size]
            found = logits_of(torch.stack([self.rows[row][0] for row in part]).to(device))
            for row, logits, tokens in zip(part, *(x.cpu() for x in found)):
                self.write_row(row, logits, tokens)
            done = min(share, i + batch_size)
            left = (time.time() - start) / done * (share - done)
            print(f"teacher: logits of {done} of {share} rows, {left:.0f} s left", flush=True)
        summed([0])

    def write_row(self, row, logits, tokens):
        path = self.path(row)
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            save_file({"logits": logits.contiguous(), "tokens": tokens.contiguous()}, partial)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise ValueError(f"cannot write to --teacher {self.folder} ({getattr(error, 'strerror', None) or error}): "
                             "the rows that are there are kept; make room and run the same command again") from None
