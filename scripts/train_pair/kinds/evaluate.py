"""How well drafts foresee the embedded target on each kind of text.

    python -m scripts.train_pair.kinds.evaluate --texts texts.json.xz --drafts before=OLD after=run/mean

On windows of the benchmarks' texts, which no training holds, and on what the target itself writes behind
them: the mean of sum(min(p, q)) at T = 1 and 0.8, and how often the most probable tokens are the same. The
target reads at least 1,024 tokens before each position, the draft its streaming cache (``distill``). All
drafts are judged at the same positions of the same texts. Products of the target are bf16, those of drafts
fp32.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

from scripts.benchmarks.common.results import header, write
from scripts.benchmarks.sources.loaders import MissingTextError
from scripts.benchmarks.sources.registry import KINDS, SOURCES, Texts
from scripts.train_pair.distill import SEGMENT, SINKS, StreamingForward
from scripts.train_pair.kinds.samples import continuations
from scripts.train_pair.model import new_model
from triforce_tree.bench.texts import token_ids
from triforce_tree.loading.checkpoints import PAIR, load_tokenizer

# Tokens of context before the first position that is judged.
CONTEXT = 1024
TEMPERATURES = (1.0, 0.8)
# The names of the figures by temperature; greedy text has the last one alone.
FIGURES = {1.0: "overlap at T=1", 0.8: "overlap at T=0.8", 0.0: "greedy match"}


class Judge:
    """Drafts beside the target, at the last positions of windows.

    Args:
        drafts: folders by name.
        device: of all models.
    """

    def __init__(self, drafts: Mapping[str, Path], device: torch.device) -> None:
        self.device = device
        loaded = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.bfloat16)
        self.target = loaded.to(device).eval()
        self._drafts: dict[str, tuple[LlamaForCausalLM, StreamingForward]] = {}
        for name, folder in drafts.items():
            loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
            draft = new_model(loaded.config, device)
            draft.load_state_dict(loaded.state_dict())
            self._drafts[name] = draft, StreamingForward(draft, device)

    @torch.no_grad()
    def __call__(self, rows: Tensor, last: int) -> dict[str, dict[str, float]]:
        """Figures by draft of the distributions behind the last positions of rows ``[B, L]``.

        Args:
            last: how many positions; at most the segment of ``distill`` without its cold beginning.
        """
        hidden = self.target.model(rows, use_cache=False).last_hidden_state[:, -last:]
        p_logits = F.linear(hidden, self.target.lm_head.weight).float().flatten(0, 1)
        seen = torch.cat((rows[:, :SINKS], rows[:, -SEGMENT:]), dim=1)
        found = {}
        for name, (draft, streaming) in self._drafts.items():
            q_logits = F.linear(streaming(seen)[:, -last:], draft.lm_head.weight).flatten(0, 1)
            same = p_logits.argmax(-1) == q_logits.argmax(-1)
            found[name] = {FIGURES[0.0]: float(same.float().mean())}
            for t in TEMPERATURES:
                p, q = (x.div(t).softmax(-1) for x in (p_logits, q_logits))
                found[name][FIGURES[t]] = float(torch.minimum(p, q).sum(-1).mean())
        return found


def windows(ids: Sequence[int], length: int, count: int) -> Tensor:
    """int64 ``[count, length]`` at even distances; raises ValueError where the text is shorter than that."""
    if len(ids) < length:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than a window of {length}; give a longer one"
        )
    step = (len(ids) - length) // max(1, count - 1)
    return torch.tensor([ids[i * step : i * step + length] for i in range(count)])


def measure(judge: Judge, ids: Sequence[int], count: int, rows: int, new: int) -> list[dict[str, Any]]:
    """Figures on one text and on what the target writes behind it.

    Args:
        count: windows of the text, whose last ``CONTEXT`` - 128 positions are judged.
        rows: prompts of ``CONTEXT`` tokens to write behind, at each temperature.
        new: tokens written behind each.
    """
    judged = CONTEXT - 128
    texts = [judge(row[None].to(judge.device), judged) for row in windows(ids, 2 * CONTEXT, count)]
    found = [{"on": "the text", **_means(texts)}]
    if rows:
        own: dict[str, dict[str, float]] = {}
        prompts = windows(ids, CONTEXT, rows).to(judge.device)
        for t, figure in FIGURES.items():
            written = continuations(judge.target, prompts, new, t)[:, :-1]
            for name, figures in judge(written, new).items():
                own.setdefault(name, {})[figure] = figures[figure]
        found.append({"on": "what the target writes", **own})
    return found


def _means(parts: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    names = parts[0]
    return {
        name: {f: statistics.fmean(part[name][f] for part in parts) for f in FIGURES.values()}
        for name in names
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_pair.kinds.evaluate",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--drafts", nargs="+", required=True, metavar="NAME=FOLDER", help="drafts to compare")
    add("--texts", type=Path, help="file that `benchmarks texts` wrote; by default what is installed")
    add("--kinds", nargs="+", help="kinds of text; by default all")
    add("--windows", type=int, default=6, help="of each text")
    add("--rows", type=int, default=8, help="prompts of each text to write behind; 0 for none")
    add("--new", type=int, default=96, help="tokens written behind each")
    add("--seed", type=int, default=0, help="of what is written")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--out", type=Path, default=Path("draft_kinds.json"), help="results file")
    args = parser.parse_args(words)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    drafts = {name: Path(folder) for name, _, folder in (entry.partition("=") for entry in args.drafts)}
    judge, texts = Judge(drafts, torch.device(args.device)), Texts(args.texts)
    tokenizer, rows = load_tokenizer(PAIR / "target"), list[dict[str, Any]]()
    for source in SOURCES:
        if source.copies is not None or source.kind not in (args.kinds or KINDS):
            continue
        try:
            ids = token_ids(tokenizer, texts.read(source))
        except MissingTextError as error:
            print(f"left out: {error}")
            continue
        for row in measure(judge, ids, args.windows, args.rows, args.new):
            rows.append({"kind": source.kind, "text": source.name, **row})
            print(rows[-1], flush=True)
    settings = {"windows": args.windows, "rows": args.rows, "new": args.new, "context": CONTEXT}
    write(args.out, header(args.seed) | {"settings": settings, "drafts": [*drafts], "rows": rows})


if __name__ == "__main__":
    main()
