import pytest

from course_lib.classroom.tables import format_bytes, format_seconds, show_table, table


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (7, "7 B"), (999, "999 B"), (1000, "1 kB"), (1857 * 4, "7.43 kB"), (12_582_912, "12.6 MB"),
        (99_940, "99.9 kB"),
        (99_960, "100 kB"), (999_600, "1 MB"), (120e9, "120 GB"), (5e15, "5000 TB"), (1.9e9, "1.9 GB"),
    ],
)  # fmt: skip
def test_bytes(number: float, text: str):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (3.5e-5, "35 µs"), (0.00123, "1.23 ms"), (1.0, "1 s"), (125.2, "125 s"), (2e-9, "2 ns"), (0.0, "0 ns"),
        (9.999e-7, "1 µs"), (0.9999e-3, "1 ms"), (0.0125, "12.5 ms"),
    ],
)  # fmt: skip
def test_seconds(number: float, text: str):
    assert format_seconds(number) == text


def test_a_table_is_text_that_lines_up():
    rows = [("ring", 12_582_912, 1.5, True), ("naive", 25_165_824, 1 / 3, False)]
    assert table(rows, ["algorithm", "bytes", "ratio", "equal"], "Sent by rank 0").splitlines() == [
        "Sent by rank 0",
        "algorithm       bytes   ratio  equal",
        "─────────  ──────────  ──────  ─────",
        "ring       12 582 912     1.5  yes",
        "naive      25 165 824  0.3333  no",
    ]


def test_a_column_with_a_gap_is_text():
    assert table([("a", 1), ("b", "none")], ["x", "y"]).splitlines()[2:] == ["a  1", "b  none"]


def test_show_table_prints_it(capsys):
    show_table([], ["only", "names"])
    assert capsys.readouterr().out == "only  names\n────  ─────\n"


def test_a_short_row_is_named():
    with pytest.raises(ValueError, match=r"row 1 has 1 cells, expected 2: \['x', 'y'\]"):
        table([(1, 2), (3,)], ["x", "y"])
