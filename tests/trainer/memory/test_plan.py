"""Memory plans: their text, and texts that are no plan."""

import pytest

from ringspan.trainer.config.schema import Model
from ringspan.trainer.memory.plan import NONE, MemoryPlan, parse

MODEL = Model(layers=5, kv_heads=4, heads=8)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("none", NONE),
        ("x/1", MemoryPlan(1)),
        ("x/4@2 outs=5@3 heads=2 rows=8192", MemoryPlan(4, 5, 2, 3, 2, 8192)),
        ("x/2 rows=7 outs=1", MemoryPlan(2, 1, rows=7)),
        ("x/2@1 outs=1@1 late", MemoryPlan(2, 1, 1, 1, late=True)),
    ],
)
def test_text_of_a_plan(text: str, plan: MemoryPlan) -> None:
    assert parse(text, MODEL) == plan
    assert parse(str(plan), MODEL) == plan


def test_layers_of_a_plan() -> None:
    plan = parse("x/2@2 outs=3@2", MODEL)
    assert plan.segments(5) == [range(0, 2), range(2, 4), range(4, 5)]
    assert [plan.keeps_out(layer, 5) for layer in range(5)] == [False, False, True, True, True]
    assert [plan.out_on_host(layer, 5) for layer in range(5)] == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("rows", "n", "chunk"), [(0, 10, 10), (16, 10, 10), (4, 8, 4), (8192, 1_000_000, 8000), (7, 53, 7), (8192, 2**20, 8192)]
)
def test_chunks_are_of_equal_size_where_one_divides_the_rows(rows: int, n: int, chunk: int) -> None:
    assert MemoryPlan(1, rows=rows).chunk_rows(n) == chunk


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no plan; write auto, least, none or"),
        ("everything", "is no plan"),
        ("outs=3", "is no plan"),
        ("x/2 x/2", "'x/2' is no part of a plan"),
        ("x/2 outs=3 outs=4", "'outs=4' is no part of a plan"),
        ("x/2 heads=1@2", "'heads=1@2' is no part of a plan"),
        ("x/2 outs=2 late", "late is for tensors in host memory"),
        ("x/2@1 late late", "'late' is no part of a plan"),
        ("x/0", "x/0 is for 1 to 5 layers"),
        ("x/6", "x/6 is for 1 to 5 layers"),
        ("x/1 outs=6", "outs=6 is more than the model's 5 layers"),
        ("x/2@4", "x/2@4: only 3 inputs are kept"),
        ("x/1 outs=2@3", "outs=2@3: only 2 are kept"),
        ("x/1 heads=3", "heads=3 must divide the model's 4 KV heads"),
    ],
)
def test_text_that_is_no_plan_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^engine\.memory=") as error:
        parse(text, MODEL)
    assert message in str(error.value)
