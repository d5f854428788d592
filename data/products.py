"""Products of bf16 tokens with fp32 weights on the tensor cores, as exact as in fp32: what a scorer reads and learns.

- An fp32 number is the sum of three bf16 ones, 8 of its 24 bits each, with no rest (from 2^-110 up; below, bits of the
  last one leave the exponent's range). bf16 times bf16 is exact in fp32, so three products with the terms lose what
  sums in fp32 lose and nothing else. No TF32, whatever is allowed.
- Tensor cores cut off where fp32 units round (arXiv 2512.07004): up to one last bit every 16 numbers, always towards
  zero. So the smallest terms come first, and a sum over tokens is taken in parts that are then added in fp32: emulated,
  that is the error of an fp32 chain; smallest last or 16,384 tokens at once are seven and ten times that.
Letters: B batch, H_kv KV heads, T tokens, I inputs, O outputs, n parts.
"""
import torch
import torch.nn.functional as F

FEW_ROWS = 8  # rows: a decode step of no more reads weights faster by reductions than by products
LENGTH = 2048  # tokens, the most in a part; shorter rows take less than the kernels that make the terms


def narrow_pays(*tokens):
    """Whether tokens, (B, H_kv, T, .) each, are bf16, on a GPU, in rows long enough."""
    return all(z.is_cuda and z.dtype == torch.bfloat16 and z.shape[2] >= LENGTH for z in tokens)


def bf16_terms(z):
    """(..., N) fp32 -> (..., 3 N) bf16: three terms that add up to z, the smallest first, side by side. Bits are masked
    and not rounded off: torch.compile drops a cast to bf16 and back, and would leave nothing for the smaller two."""
    cut = lambda z: (z.view(torch.int32) & -65536).view(torch.float32)  # noqa: E731
    high = cut(z)
    middle = cut(z - high)
    return torch.cat([term.bfloat16() for term in (z - high - middle, middle, high)], dim=-1)


def wide_bmm(a, b):
    """(N, M, K) @ (N, K, O), bf16 -> (N, M, O), added up in fp32. A CPU lacks such a product: the same in fp32."""
    with torch.autocast(a.device.type, enabled=False):
        return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class NarrowProduct(torch.autograd.Function):
    """x (B, H_kv, T, I) bf16, a constant, @ w (H_kv, I, O) fp32 -> (B, H_kv, T, O) fp32.

    One bmm each way. Forward: the terms of w below each other, x three times side by side: 0.6 GB of traffic at T =
    16,384, H_kv = 8, I = 256, O = 322, where terms next to each other leave three fp32 products to add, 1.2 GB.
    Backward: the terms of dy next to each other, so x is read once, and the products are small. O is padded to 8s and
    w is read transposed, for fast kernels want rows that start at multiples of 16 bytes."""
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        terms = bf16_terms(F.pad(w, (0, -w.shape[-1] % 8)).mT).expand(len(x), -1, -1, -1)  # (B, H_kv, O, 3 I)
        y = wide_bmm(x.repeat(1, 1, 1, 3).flatten(0, 1), terms.flatten(0, 1).mT)  # (B * H_kv, T, O)
        return y.unflatten(0, x.shape[:2]).narrow(-1, 0, w.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        (x,), (B, H, T, O) = ctx.saved_tensors, dy.shape
        n = -(-T // LENGTH)
        terms = bf16_terms(F.pad(dy, (0, -O % 8, 0, -T % n)))  # (B, H_kv, T, 3 O)
        x, terms = (z.unflatten(2, (n, -1)).flatten(0, 2) for z in (F.pad(x, (0, 0, 0, -T % n)), terms))
        dw = wide_bmm(x.mT, terms).unflatten(0, (B, H, n)).unflatten(-1, (3, -1))  # (B, H_kv, n, I, 3, O)
        return None, dw.sum((2, 4)).sum(0).narrow(-1, 0, O)  # row by row: the same for any way to cut a batch


def narrow_product(x, w):
    """x (B, H_kv, T, I) bf16 @ w (H_kv, I, O), any dtype -> (B, H_kv, T, O) fp32. x gets no gradient."""
    return NarrowProduct.apply(x, w.float())


def rows_product(x, w):
    """x (B, H_kv, I) @ w (H_kv, I, O) -> (B, H_kv, O), over rows, or w would be copied for each of them."""
    return (x.transpose(0, 1) @ w).transpose(0, 1)


def step_terms(w, n):
    """w (H_kv, I, O) fp32 -> the terms of its first n columns and, behind them, those of the others; each rounded up to
    8s. They do not follow changes of w."""
    parts = w.float().tensor_split([n], dim=-1)
    return torch.cat([bf16_terms(F.pad(part, (0, -part.shape[-1] % 8))) for part in parts], dim=-1)


def step_product(x, w, terms, first):
    """A decode step's: x (B, H_kv, I) @ w (H_kv, I, O) -> (B, H_kv, O). bf16: from terms, where w is the first n
    columns or all the others. Compiled, of few rows: a reduction, faster than a GEMM."""
    if x.dtype == torch.bfloat16:
        n = 3 * (w.shape[-1] + -w.shape[-1] % 8)
        y = wide_bmm(x.transpose(0, 1), terms[..., :n] if first else terms[..., -n:])  # (H_kv, B, n)
        return y.unflatten(-1, (3, -1)).sum(-2).transpose(0, 1)[..., :w.shape[-1]]
    if torch.compiler.is_compiling() and len(x) <= FEW_ROWS:
        return (x[:, :, None] * w.mT.to(x.dtype)).sum(-1)  # of (B, H_kv, O, I), which is not made
    return rows_product(x, w.to(x.dtype))
