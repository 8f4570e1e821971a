import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fake_rows import fake_row, fake_rows
from hypothesis import given
from hypothesis import strategies as st

from kvlearn.errors import KvlearnError
from kvlearn.rows import METRICS, RowStore, check_row, differences, loss, metric_info, read_rows, row_key, write_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "rows.jsonl"


def error_row(**changes: object) -> dict[str, object]:
    row = fake_row(error="out of memory", **changes)
    for field in ("value", "full_value", "slots", "bytes", "state_bytes", "tokens_per_s", "tokens"):
        del row[field]
    return row


def test_rows_come_back_as_they_were_written(path: Path) -> None:
    rows = fake_rows(docs=3, seeds=(0, 1))
    with RowStore(path) as store:
        store.append(*rows[:10])
        for row in rows[10:]:
            store.append(row)
        assert store.rows == rows
        assert len(store) == len(rows)
    assert read_rows(path) == rows
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_a_resumed_run_skips_what_is_done_and_retries_errors(path: Path) -> None:
    good, bad = fake_row(doc="a"), error_row(doc="b")
    with RowStore(path) as store:
        store.append(good, bad)
    with RowStore(path) as store:
        assert store.done(good)
        assert not store.done(bad)
        assert not store.done(good, bad)
        assert not store.done(fake_row(doc="c"))
        assert not store.done(good | {"window": 1024}), "another window is another measurement"
        assert not store.done(good | {"protect": {"sink": 8}})


def test_a_good_row_replaces_an_error_and_not_the_other_way_round(path: Path) -> None:
    good = fake_row(doc="a")
    with RowStore(path) as store:
        store.append(error_row(doc="a"))
        store.append(good)
        assert store.rows == [good]
        store.append(error_row(doc="a"))
        assert store.rows == [good]
        store.append(good | {"value": 9.0})
    assert read_rows(path) == [good | {"value": 9.0}], "of two good rows the later one counts"


def test_merging_files_keeps_one_row_for_each_identity(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_rows(first, [error_row(doc="a"), fake_row(doc="b")])
    write_rows(second, [fake_row(doc="a"), fake_row(doc="c"), error_row(doc="b")])
    merged = read_rows(first, second)
    assert [row["doc"] for row in merged] == ["a", "b", "c"]
    assert not any("error" in row for row in merged)


@pytest.mark.parametrize("cut", [1, 2, 30, 200])
def test_a_torn_last_line_is_dropped_and_cut_away(path: Path, cut: int) -> None:
    rows = fake_rows(docs=1)[:3]
    write_rows(path, rows)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    torn = cut > 1  # without its line end alone, the last line is still a whole row
    assert read_rows(path) == (rows[:2] if torn else rows)
    with RowStore(path) as store:
        assert store.rows == (rows[:2] if torn else rows)
        assert bool(store.dropped) == torn
        store.append(rows[2])
    assert path.read_bytes() == (whole if torn else whole + whole.splitlines(keepends=True)[2])


@given(cut=st.integers(min_value=0))
def test_a_file_cut_anywhere_opens_and_finishes_to_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    rows = [fake_row(doc=f"naïve {number} \u2028") for number in range(4)]
    write_rows(path, rows)
    data = path.read_bytes()
    path.write_bytes(data[: cut % (len(data) + 1)])
    with RowStore(path) as store:
        for row in rows:
            if not store.done(row):
                store.append(row)
    assert path.read_bytes() == data


def test_kill_9_while_writing_loses_at_most_the_row_in_flight(path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        sys.path[:0] = sys.argv[2:]
        from fake_rows import fake_row
        from kvlearn.rows import RowStore
        store = RowStore(sys.argv[1])
        number = 0
        while True:
            store.append(fake_row(doc=f"doc-{number}"))
            number += 1
            print(number, flush=True)
    """)
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", program, str(path), str(here), str(here.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reported = [process.stdout.readline() for _ in range(20)]
        os.kill(process.pid, signal.SIGKILL)
        reported += process.stdout.read().splitlines()
    with RowStore(path) as store:
        assert len(store) >= len(reported) >= 20
        assert [row["doc"] for row in store.rows] == [f"doc-{number}" for number in range(len(store))]


def test_two_runs_cannot_write_one_file(path: Path) -> None:
    with RowStore(path), pytest.raises(KvlearnError, match="another run"):
        RowStore(path)
    RowStore(path).close()


def test_numbers_that_are_not_finite_become_null(path: Path) -> None:
    with RowStore(path) as store:
        store.append(fake_row(value=float("nan"), tokens_per_s=float("inf")))
        assert store.rows[0]["value"] is None
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["tokens_per_s"] is None


def test_a_malformed_line_is_named_with_its_file_and_number(path: Path) -> None:
    write_rows(path, [fake_row(doc="a"), fake_row(doc="b")])
    lines = path.read_text().splitlines(keepends=True)
    for broken, fault in [
        ('{"model": \n', "not valid JSON"),
        ("[1]\n", "JSON object, not list"),
        (json.dumps(fake_row(seed="x")) + "\n", "'seed' must be a whole number, not 'x'"),
    ]:
        path.write_text(lines[0] + broken + lines[1])
        with pytest.raises(KvlearnError, match=rf"rows\.jsonl, line 2: .*{fault}"):
            read_rows(path)
        with pytest.raises(KvlearnError, match="line 2"):
            RowStore(path)
    path.write_bytes(lines[0].encode() + b"\xff\xfe\n" + lines[1].encode())
    with pytest.raises(KvlearnError, match="line 2"):
        read_rows(path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model": ""}, "'model' must be a non-empty string"),
        ({"doc": 3}, "'doc' must be a non-empty string, not 3"),
        ({"kind": "clever"}, "'kind' must be one of full, heuristic"),
        ({"metric": "acuracy"}, "unknown metric 'acuracy': did you mean 'accuracy'"),
        ({"metric": "zzz"}, "known metrics are nll"),
        ({"budget": 0}, "'budget' must be a positive whole number or null, not 0"),
        ({"budget": True}, "'budget'"),
        ({"seed": 1.5}, "'seed' must be a whole number, not 1.5"),
        ({"value": "2.5"}, "'value' must be a number or null, not '2.5'"),
        ({"full_bytes": "many"}, "'full_bytes'"),
        ({"error": 3}, "'error' must be a non-empty string"),
    ],
)
def test_a_malformed_row_is_refused_before_anything_is_written(
    path: Path, changes: dict[str, object], fault: str
) -> None:
    with RowStore(path) as store:
        with pytest.raises(KvlearnError, match=fault):
            store.append(fake_row(), fake_row() | changes)
        assert len(store) == 0
    assert path.read_bytes() == b""


def test_a_row_without_its_numbers_needs_an_error() -> None:
    row = fake_row()
    del row["bytes"]
    with pytest.raises(KvlearnError, match="'bytes' is missing"):
        check_row(row)
    assert check_row(error_row())


def test_something_json_cannot_hold_is_refused(path: Path) -> None:
    with RowStore(path) as store, pytest.raises(KvlearnError, match="JSON cannot"):
        store.append(fake_row(protect={1, 2}))


def test_a_missing_file_and_an_unwritable_place_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(KvlearnError, match=r"no rows at .*: the file does not exist"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(KvlearnError, match="cannot write rows to"):
        RowStore(tmp_path / "file" / "rows.jsonl")
    with pytest.raises(KvlearnError, match="cannot write"):
        write_rows(tmp_path / "file" / "rows.jsonl", [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full to play a full disk")
def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RowStore(tmp_path / "rows.jsonl") as store:
        store.append(fake_row(doc="a"))
        before, file = store.path.read_bytes(), store._file
        with Path("/dev/full").open("ab", buffering=0) as full:
            monkeypatch.setattr(store, "_file", full)
            with pytest.raises(KvlearnError, match="No space left on device"):
                store.append(fake_row(doc="b"))
        monkeypatch.setattr(store, "_file", file)
        assert len(store) == 1
        assert store.path.read_bytes() == before


def test_writing_a_whole_file_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [fake_row(doc="a")])
    write_rows(path, [fake_row(doc="b")])
    assert os.listdir(tmp_path) == ["rows.jsonl"]
    assert [row["doc"] for row in read_rows(path)] == ["b"]
    with pytest.raises(KvlearnError):
        write_rows(path, [fake_row(), fake_row(protect=object())])
    assert [row["doc"] for row in read_rows(path)] == ["b"], "a failed write leaves the old file"


def test_loss_is_positive_where_the_full_cache_is_better() -> None:
    assert loss(fake_row(metric="nll", value=2.5, full_value=2.25)) == 0.25
    assert loss(fake_row(metric="accuracy", value=0.25, full_value=1.0)) == 0.75
    assert loss(fake_row(metric="nll/rare-tokens", value=2.5, full_value=2.25)) == 0.25
    for value in (None, float("nan"), float("inf")):
        assert loss(fake_row(value=value)) != loss(fake_row(value=value)), "NaN is not equal to itself"


def test_every_metric_states_its_unit_and_direction() -> None:
    assert metric_info("nll").unit == "nats/token"
    assert not metric_info("kl").higher_is_better
    assert metric_info("accuracy").higher_is_better
    assert all(metric.title and metric.unit for metric in METRICS.values())


def test_settings_in_any_order_are_one_identity() -> None:
    first = row_key(fake_row(protect={"sink": 4, "recent": 64}))
    assert first == row_key(fake_row(protect={"recent": 64, "sink": 4}))
    assert first != row_key(fake_row(protect={"recent": 32, "sink": 4}))


def test_rows_differ_in_anything_but_time() -> None:
    rows = fake_rows(docs=2)
    slower = [row | {"tokens_per_s": 1.0, "scorer_share": 0.9} for row in reversed(rows)]
    assert differences(rows, slower) == []
    other = [*slower[1:-1], slower[-1] | {"value": 9.0}]
    found = differences(rows, other)
    assert len(found) == 2
    assert "; " not in found[0]
    assert "value" in found[0]
    assert "and 9.0" in found[0]
    assert found[1].startswith(f"only in the first: model {rows[-1]['model']}, task {rows[-1]['task']}")
    assert differences(other, rows)[-1].startswith("only in the second: ")
