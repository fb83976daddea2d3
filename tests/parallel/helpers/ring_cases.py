"""Cases of the ring that are compared with the reference in fp64."""

from dataclasses import replace

from ringspan import Layout
from tests.parallel.helpers.work import RingCase

EXACT = 1e-12


def document_ids(*lengths: int) -> list[int]:
    """Ids of consecutive documents; a negative length is padding."""
    return [i if n > 0 else -1 for i, n in enumerate(lengths) for _ in range(abs(n))]


def ring_cases(kind: str, ring: int, ulysses: int) -> list[RingCase]:
    """One case per mask at least; heads, lengths, transports and options vary."""
    heads = 12 if ulysses == 3 else 8
    mha, gqa, mqa = (heads, heads), (heads, heads // 2), (heads, 1)
    n = Layout(kind, 37, ring * ulysses, ulysses).local_length
    borders = document_ids(*(min(n, 37 - start) for start in range(0, 37, n)))  # one document per shard, if contiguous
    all_options = dict(softcap=3.0, dropout=0.3, seed=2**40 + 5)
    cases = [
        RingCase("full", length=37, heads=gqa, batch=2),
        RingCase("causal", length=37, heads=mha, mask=dict(causal=True)),
        RingCase("causal", length=64, heads=mqa, mask=dict(causal=True), transport="all_gather"),
        RingCase("causal", length=1, heads=gqa, mask=dict(causal=True), sinks=True),
        RingCase("causal-parts", length=41, heads=mha, mask=dict(causal=True), part_bytes=0, widths=(16, 24)),
        RingCase("full-all", length=43, heads=gqa, transport="all_gather", sinks=True, options=all_options, batch=2),
        RingCase("window", heads=gqa, mask=dict(causal=True, window=6)),
        RingCase("window-wide", length=50, heads=mqa, mask=dict(causal=True, window=29), sinks=True),
        RingCase("window-both", heads=mha, mask=dict(window=(3, 7)), transport="all_gather"),
        RingCase("window-both", length=53, heads=mqa, mask=dict(window=9)),
        RingCase(
            "documents-across", heads=gqa, mask=dict(causal=True, documents=document_ids(5, 1, 17, 14)), options=all_options
        ),
        RingCase("documents-at-borders", heads=mqa, mask=dict(causal=True, documents=borders), batch=2, sinks=True),
        RingCase("documents-full", heads=mha, mask=dict(documents=document_ids(11, 26)), transport="all_gather"),
        RingCase(
            "documents-batch",
            heads=gqa,
            batch=2,
            mask=dict(documents=[document_ids(20, 17), document_ids(-9, 28)], causal=True),
        ),
        RingCase(
            "empty-rank", heads=gqa, mask=dict(causal=True, documents=document_ids(-min(n, 36), max(37 - n, 1))), sinks=True
        ),
        RingCase(
            "empty-tail", heads=mqa, mask=dict(documents=document_ids(max(37 - n, 1), -min(n, 36))), transport="all_gather"
        ),
        RingCase("all-padding", heads=gqa, mask=dict(causal=True, documents=document_ids(-37)), sinks=True),
        RingCase("prefix", heads=mqa, mask=dict(causal=True, prefix=15), options=all_options),
        RingCase("prefix-batch", heads=gqa, batch=2, mask=dict(causal=True, prefix=[3, 30])),
        RingCase("chunked", length=61, heads=gqa, mask=dict(causal=True), backend="chunked", options=all_options, batch=2),
    ]
    if ring in (2, 3) and kind != "striped":  # most local rows have no remote keys and are computed apart
        length = 132 * ring - 3
        packed = document_ids(50, 75, 1, 20, -40, length - 186)  # borders apart from those of the shards, and at rows within
        cases += [
            RingCase(
                "window-documents", length=length, heads=gqa, mask=dict(causal=True, window=6, documents=packed), sinks=True
            ),
            RingCase("window-narrow", length=length, heads=gqa, mask=dict(causal=True, window=6), sinks=True),
            RingCase(
                "window-narrow-both", length=length, heads=mqa, mask=dict(window=(3, 4)), options=all_options, widths=(16, 24)
            ),
        ]
    return [replace(case, kind=kind, ring=ring, ulysses=ulysses) for case in cases]
