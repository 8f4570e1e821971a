import numpy as np
from fake_rows import fake_row, fake_rows

from kvlearn.cells import Cell, cells, policy_labels, setting_text


def full_row(**changes: object) -> dict[str, object]:
    return fake_row(policy="full", kind="full", budget=None, value=2.2, **changes)


def test_a_cell_holds_one_task_metric_window_and_budget() -> None:
    rows = [fake_row(budget=budget, window=window) for budget in (512, 128) for window in (2048, 1024)]
    assert [data.cell for data in cells(rows)] == [
        Cell("tiny-llama", "lm", "nll", window, budget) for window in (1024, 2048) for budget in (128, 512)
    ]


def test_the_full_cache_joins_every_budget() -> None:
    rows = [full_row(), fake_row(budget=128), fake_row(budget=512), fake_row(budget=512, window=1024)]
    assert [sorted(data.good) for data in cells(rows)] == [["h2o"], ["full", "h2o"], ["full", "h2o"]]
    assert [sorted(data.good) for data in cells([full_row(doc="a"), full_row(doc="b")])] == [["full"]]
    assert [len(data.docs) for data in cells([full_row(doc="a"), full_row(doc="b")])] == [2]
    with_budget = [full_row() | {"budget": 128}, fake_row(budget=128), fake_row(budget=512)]
    assert [sorted(data.good) for data in cells(with_budget)] == [["full", "h2o"], ["h2o"]]


def test_only_documents_that_every_policy_finished_are_compared() -> None:
    rows = [fake_row(doc=doc, policy=policy) for policy in ("a", "b") for doc in ("1", "2", "3")]
    rows += [fake_row(doc="4", policy="a"), fake_row(doc="4", policy="b", error="out of memory")]
    rows += [fake_row(doc="5", policy="a"), fake_row(doc="5", policy="b", value=None)]
    (data,) = cells(rows)
    assert [doc for _, doc in data.docs] == ["1", "2", "3"]
    assert len(data.all_docs) == 5
    assert {policy: len(failed) for policy, failed in data.failed.items()} == {"a": 0, "b": 2}


def test_a_policy_that_finished_little_does_not_take_the_others_documents_away() -> None:
    rows = [fake_row(doc=str(doc), policy=policy) for policy in ("a", "b") for doc in range(10)]
    rows.append(fake_row(doc="3", policy="slow"))
    (data,) = cells(rows)
    assert data.compared == ["a", "b"]
    assert len(data.docs) == 10


def test_documents_of_one_name_in_two_domains_are_two_documents() -> None:
    (data,) = cells([fake_row(domain="a", doc="readme", value=3.2), fake_row(domain="b", doc="readme", value=2.2)])
    assert data.docs == [("a", "readme"), ("b", "readme")]
    np.testing.assert_allclose(data.column("h2o"), [1.0, 0.0])


def test_seeds_are_averaged_within_a_document() -> None:
    rows = [fake_row(doc="a", seed=seed, value=2.2 + loss) for seed, loss in enumerate((0.1, 0.2, 0.6))]
    rows += [fake_row(doc="b", value=2.2)]
    (data,) = cells(rows)
    np.testing.assert_allclose(data.column("h2o"), [0.3, 0.0])
    np.testing.assert_allclose(data.column("h2o", "value"), [2.5, 2.2])
    assert np.isnan(data.column("h2o", "scorer_share")).all()


def test_variants_of_a_policy_are_named_by_what_differs() -> None:
    rows = [
        fake_row(policy="h2o", block=32, protect={"sink": 4, "recent": 64}),
        fake_row(policy="h2o", block=32, protect={"recent": 64, "sink": 8}),
        fake_row(policy="ema", block=16, allocation="adakv"),
    ]
    assert sorted(policy_labels(rows).values()) == [
        "ema",
        "h2o (protect=recent 64 + sink 4)",
        "h2o (protect=recent 64 + sink 8)",
    ]
    (data,) = cells(rows)
    assert len(data.compared) == 3


def test_a_row_that_does_not_tell_a_setting_is_no_variant_of_its_own() -> None:
    rows = [fake_row(doc="a", block=32), fake_row(doc="b", error="out of memory")]
    assert set(policy_labels(rows).values()) == {"h2o"}
    assert set(policy_labels([*rows, fake_row(block=None)]).values()) == {
        "h2o (block=32)",
        "h2o (block=none)",
        "h2o (block=?)",
    }


def test_a_setting_in_words() -> None:
    settings: list[object] = [None, {}, 32, "prompt", {"sink": 4}]
    assert [setting_text(value) for value in settings] == ["none", "none", "32", "prompt", "sink 4"]


def test_realistic_rows_fall_into_full_cells() -> None:
    found = cells(fake_rows(seeds=(0, 1, 2)))
    assert len(found) == 6
    assert all(len(data.docs) == 12 and len(data.compared) == 11 for data in found)
