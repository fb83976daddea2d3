"""Loss on held-out packages: of all tokens, and of those in the second half of a window with full and with short context.

    full    tokens at document positions ≥ length / 2, with everything before them
    short   the same tokens in windows of 2 · context tokens, so that each sees context … 2 · context tokens before it

full < short shows that a model gains from the distant text itself. Both count the same labels.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.trainer.config.schema import Data, Source
from ringspan.trainer.data.dataset import NO_LABEL, Batch, Corpus, Dataset
from ringspan.trainer.data.tokenizer import Tokenizer

Row = dict[str, Any]


def text_data(tokenizer: Tokenizer, length: int, cache: str) -> Dataset:
    """Return the held-out packages in windows of `length` tokens, packed by best fit."""
    options = Data(length=length, sources={"packages": Source(kind="packages")}, packing="best_fit", cache=cache)
    return Dataset(options, tokenizer, 0, "held_out")


def text_loss(
    forward: Callable[..., tuple[Tensor, ...]], data: Dataset, num_windows: int, context: int, device: torch.device
) -> Row:
    """Measure the losses of a model on one device.

    Args:
        forward: the model's forward.
        data: held-out text, such as that of `text_data`.
        num_windows: windows to read; fewer if the text has fewer.
        context: tokens of the short context, at most a quarter of the length.
        device: device of the forward.

    Returns:
        length, windows, loss per label; and of the far labels their number, `full` and `short` losses, None without any.
    Raises:
        ValueError: the context is too long.
    """
    length = data.length
    if context < 1 or length % (2 * context):
        raise ValueError(f"context={context}, length={length}: take a context whose double divides the length")
    source = data.sources[0]
    assert isinstance(source, Corpus)
    windows = range(min(num_windows, source.num_windows))
    sums = np.zeros(2)  # loss and labels
    far = np.zeros(3)  # labels, full and short losses
    for number in windows:
        batch = data.windows([(0, number)])
        each = losses(forward, batch, device)
        valid = (batch.labels != NO_LABEL).numpy()
        sums += each[valid].sum(), valid.sum()
        chosen = valid & (batch.positions >= length // 2).numpy()
        if chosen.any():
            cut, counted = short_windows(batch, context)
            short = losses(forward, cut, device)
            far += chosen.sum(), each[chosen].sum(), short[counted].sum()
            assert counted.sum() == chosen.sum()
    num, full, near = (float(x) for x in far)
    row: Row = dict(length=length, windows=len(windows), loss=float(sums[0] / max(sums[1], 1)), context=context, far=int(num))
    return row | dict(full=full / num if num else None, short=near / num if num else None)


def losses(forward: Callable[..., tuple[Tensor, ...]], batch: Batch, device: torch.device) -> np.ndarray:
    """Return the loss of each token, (B, S)."""
    with torch.no_grad():
        return forward(*batch.to(device).inputs, each=True)[2].double().cpu().numpy()


def short_windows(batch: Batch, context: int) -> tuple[Batch, np.ndarray]:
    """Cut the second half of a window into windows of 2 · context tokens, of which the second half is counted.

    Args:
        batch: one window of S tokens.
        context: its quadruple is at most S.
    Returns:
        The windows (S / (2 · context), 2 · context), and which labels are counted: those at positions ≥ S / 2 of documents.
    """
    length = batch.tokens.shape[1]
    starts = torch.arange(length // 2, length, context)[:, None] - context
    rows = starts + torch.arange(2 * context)
    documents = batch.documents[0][rows]
    labels = batch.labels[0][rows].clone()
    labels[:, :context] = NO_LABEL
    labels[batch.positions[0][rows] < length // 2] = NO_LABEL
    # A document's positions restart where the window cuts it.
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    columns = torch.arange(2 * context).expand(len(rows), -1)
    positions = columns - torch.where(begins, columns, 0).cummax(1).values
    seeds = batch.seeds.expand(len(rows))
    cut = batch._replace(tokens=batch.tokens[0][rows], labels=labels, positions=positions, documents=documents, seeds=seeds)
    return cut, (labels != NO_LABEL).numpy()


def report(rows: list[Row]) -> str:
    """Return the table."""
    lines = ["loss on held-out packages; far: at positions beyond half of the length"]
    lines.append(f"  {'length':>8}{'loss':>8}{'far labels':>12}{'full':>8}{'short':>8}  context of short")
    for row in rows:
        far = [f"{row[name]:8.3f}" if row[name] is not None else f"{'-':>8}" for name in ("full", "short")]
        context = f"{row['context']} to {2 * row['context']} tokens"
        lines.append(f"  {row['length']:>8}{row['loss']:8.3f}{row['far']:>12}{far[0]}{far[1]}  {context}")
    return "\n".join(lines)
