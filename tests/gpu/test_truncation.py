"""Top-k, top-p and min-p of real vocabularies are exact, in replays of a CUDA graph too."""

from itertools import product

import pytest
import torch
from torch import Tensor

from triforce_tree.kernels.probs.truncation import truncate_scores

pytestmark = pytest.mark.gpu
OPTIONS = [(50, 1.0, 0.0), (0, 0.95, 0.0), (20, 0.8, 0.0), (2000, 0.999, 0.01), (0, 1.0, 0.05), (0, 1.0, 0.0)]
KINDS = ("text", "sure", "bf16", "flat", "cold", "few")


def rows_of(kind: str, rows: int, vocab: int) -> Tensor:
    """Returns fp32 ``[6, rows, V]``."""
    scores = 3 * torch.randn(len(OPTIONS), rows, vocab, device="cuda")
    if kind in ("text", "bf16", "cold"):
        scores[..., :50] += 12
    match kind:
        case "sure":
            scores[..., vocab // 3] = 60.0
        case "bf16":
            scores = scores.bfloat16().float()
        case "flat":
            scores /= 3
        case "cold":
            scores *= 50
        case "few":
            scores[..., 40:] = -torch.inf
    return scores


def numbers_kept(scores: Tensor, options: tuple[int, float, float], rounding: float) -> Tensor:
    """Returns how many tokens stay of each row ``[rows, V]`` in fp64, with bounds changed by ``rounding``."""
    k, p, ratio = options
    rising = scores.sort(-1).values
    if k:
        rising = rising.masked_fill(rising < rising[:, -k, None], -torch.inf)
    weights = (rising - rising[:, -1:]).double().exp()
    sums = weights.cumsum(-1)
    goal = (torch.tensor(1 - p).item() if p < 1 else -1.0) * sums[:, -1:]
    removed = (sums <= goal * (1 + rounding)) | (rising == -torch.inf)
    removed[:, -1] = False
    return (~removed & (weights >= ratio * (1 + rounding))).sum(-1)


@pytest.mark.parametrize(
    "rows, vocab", [*product((1, 5), (32_000, 128_256, 151_936, 262_144)), (32, 128_256)]
)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_tokens_that_stay(kind: str, rows: int, vocab: int) -> None:
    torch.manual_seed(rows)
    buffer = rows_of(kind, rows, vocab)
    k, p, ratio = zip(*OPTIONS, strict=True)
    options = [
        torch.tensor(values, dtype=dtype, device="cuda")
        for values, dtype in ((k, torch.int64), (p, torch.float64), (ratio, torch.float64))
    ]
    # The kernels are compiled before a graph is captured.
    truncate_scores(buffer, *options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = truncate_scores(buffer, *options)
    for scores in (rows_of(kind, rows, vocab), buffer.clone()):
        buffer.copy_(scores)
        kept.fill_(torch.nan)
        graph.replay()
        stays = kept > -torch.inf
        assert torch.equal(kept, scores.masked_fill(~stays, -torch.inf))
        assert torch.equal(kept[:, :1], truncate_scores(scores[:, :1], *options))
        # The largest stay; of equal scores some may be removed.
        removed = scores.masked_fill(stays, -torch.inf).amax(-1)
        assert (kept.masked_fill(~stays, torch.inf).amin(-1) >= removed).all()
        for own, number, given in zip(scores, stays.sum(-1), OPTIONS, strict=True):
            fewest, most = (numbers_kept(own, given, rounding) for rounding in (1e-5, -1e-5))
            assert ((fewest <= number) & (number <= most)).all(), (given, fewest, number, most)
