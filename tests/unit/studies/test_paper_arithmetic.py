"""Arithmetic on the papers' printed tables, which settles some claims of docs/claims.md without a run.

Figures are the papers' own, in percent; each test has the id of the claim's row.
"""

from __future__ import annotations

import numpy as np
import pytest

# 2601.15609, Table 2: (GSM8K, Math500, LightEval, AIME24, Minerva, O-Bench, Avg.) of AVG@8, then of PASS@8.
TABLE_2 = {
    ("4B", "GRPO"): (
        *(93.72, 85.58, 70.61, 34.58, 43.06, 48.85, 62.73),
        *(96.74, 91.94, 75.43, 47.37, 54.54, 56.44, 70.41),
    ),
    ("4B", "RLOO"): (
        *(93.69, 86.44, 70.24, 32.50, 43.98, 47.91, 62.46),
        *(96.98, 92.22, 75.39, 43.65, 55.01, 56.31, 69.93),
    ),
    ("4B", "Reinforce++"): (
        *(94.04, 85.43, 70.21, 36.25, 45.63, 48.57, 63.36),
        *(96.45, 91.58, 74.92, 50.54, 55.32, 56.38, 70.87),
    ),
    ("4B", "DrGRPO"): (
        *(94.10, 83.56, 69.54, 35.42, 45.43, 47.83, 62.65),
        *(96.43, 89.90, 73.87, 47.02, 54.60, 55.08, 69.48),
    ),
    ("4B", "IAC"): (
        *(94.63, 86.43, 72.15, 37.08, 47.01, 48.87, 64.36),
        *(97.38, 92.33, 77.30, 52.28, 57.74, 56.59, 72.27),
    ),
    ("8B", "GRPO"): (
        *(95.59, 85.81, 71.12, 35.42, 47.20, 49.79, 64.16),
        *(96.51, 91.39, 75.19, 52.36, 55.65, 56.88, 71.33),
    ),
    ("8B", "RLOO"): (
        *(95.56, 86.89, 72.30, 36.25, 46.78, 49.74, 64.59),
        *(97.25, 92.64, 76.17, 50.92, 55.55, 57.68, 71.70),
    ),
    ("8B", "Reinforce++"): (
        *(95.56, 87.07, 72.14, 40.68, 47.84, 50.30, 65.60),
        *(96.96, 92.31, 75.96, 55.24, 56.12, 57.78, 72.40),
    ),
    ("8B", "DrGRPO"): (
        *(95.35, 86.11, 71.56, 34.58, 47.38, 49.87, 64.14),
        *(97.11, 91.57, 75.36, 52.25, 55.41, 57.26, 71.49),
    ),
    ("8B", "IAC"): (
        *(95.72, 87.67, 73.85, 35.42, 50.60, 50.49, 65.63),
        *(97.56, 94.54, 78.69, 52.67, 60.60, 58.48, 73.76),
    ),
    ("14B", "GRPO"): (
        *(95.96, 89.42, 73.83, 53.45, 50.32, 55.28, 69.71),
        *(97.53, 93.75, 76.54, 70.44, 59.40, 60.87, 76.42),
    ),
    ("14B", "RLOO"): (
        *(96.04, 90.29, 73.64, 54.17, 50.46, 55.10, 69.95),
        *(97.43, 93.62, 76.36, 73.18, 59.78, 61.14, 76.92),
    ),
    ("14B", "Reinforce++"): (
        *(95.82, 90.88, 73.96, 54.17, 50.87, 56.00, 70.28),
        *(97.79, 94.12, 76.74, 71.71, 60.27, 61.42, 77.01),
    ),
    ("14B", "DrGRPO"): (
        *(95.96, 90.37, 73.85, 54.85, 50.69, 55.35, 70.18),
        *(97.53, 94.27, 76.57, 71.83, 61.03, 60.96, 77.03),
    ),
    ("14B", "IAC"): (
        *(96.36, 90.70, 74.52, 56.67, 52.34, 56.32, 71.15),
        *(98.11, 94.37, 77.28, 78.07, 62.64, 62.37, 78.81),
    ),
}
AVG, PASS = slice(0, 7), slice(7, 14)
METRICS = (("AVG@8", AVG), ("PASS@8", PASS))
GSM8K, MATH, AIME, OBENCH, MEAN = 0, 1, 3, 5, 6


def leads(model: str, metric: slice, over: str | None = None) -> np.ndarray:
    """IAC less the best baseline, or less `over`, column by column."""
    rows = {method: np.array(cells[metric]) for (size, method), cells in TABLE_2.items() if size == model}
    own = rows.pop("IAC")
    return own - (np.max(list(rows.values()), axis=0) if over is None else rows[over])


def test_iac_intro_2_3pct() -> None:
    """Averages lead the best baseline by 0 to 1 % (AVG@8) and 1.4 to 1.8 % (PASS@8), GRPO by 1.4 to 2.43 %."""
    best = {metric: [leads(size, each)[MEAN] for size in ("4B", "8B", "14B")] for metric, each in METRICS}
    assert best["AVG@8"] == pytest.approx([1.00, 0.03, 0.87]) and best["PASS@8"] == pytest.approx([1.40, 1.36, 1.78])
    grpo = [leads(size, each, "GRPO")[MEAN] for size in ("4B", "8B", "14B") for _, each in METRICS]
    assert 1.4 < min(grpo) < max(grpo) < 2.44


def test_iac_table2_hard() -> None:
    """On 8B the lead on AIME24 is negative in both metrics and that on GSM8K is not; O-Bench gains as GSM8K does."""
    for _, metric in METRICS:
        assert leads("8B", metric)[AIME] < -2.5 < 0.0 < leads("8B", metric)[GSM8K]
    assert [leads(size, AVG)[OBENCH] for size in ("4B", "8B", "14B")] == pytest.approx([0.02, 0.19, 0.32])
    assert [leads(size, AVG)[GSM8K] for size in ("4B", "8B", "14B")] == pytest.approx([0.53, 0.13, 0.32])


def test_iac_table2_metric() -> None:
    """A share of 30 problems is a multiple of 1 / 30 and one of 500 of 1 / 500, to two decimals of a percent."""
    for column, problems in ((AIME, 30), (MATH, 500)):
        shares = [100.0 * solved / problems for solved in range(problems + 1)]
        cells = [cells[PASS][column] for cells in TABLE_2.values()]
        off = [min(abs(cell - share) for share in shares) > 0.0051 for cell in cells]
        assert column == MATH or all(off)
        assert sum(off) >= len(cells) - 1


def test_ds_4_5_all_k() -> None:
    """2511.19942, section 4.5: DS less GRPO is negative at K = 16, 64 and 128, positive elsewhere."""
    ks = (1, 4, 16, 64, 128, 512, 1024, 2048, 3072, 4096, 6144, 8192)
    grpo = (9.49, 9.57, 7.45, 8.75, 10.25, 9.11, 5.14, 0.71, -1.44, -2.58, -3.68, -3.80)
    ds = (12.73, 11.14, 7.41, 8.27, 9.81, 9.65, 6.81, 3.98, 2.67, 1.91, 1.40, 1.60)
    assert [k for k, ours, theirs in zip(ks, ds, grpo, strict=True) if ours < theirs] == [16, 64, 128]


# 2510.14807, averages of pass@1 and pass@256 in Table 4, and AIME24, AIME25 at pass@256 in Tables 1, 5 and 7.
TABLE_4 = {
    "GRPO": (41.7, 76.1),
    "CaSP": (43.4, 80.5),
    "alpha 0.02": (43.2, 79.7),
    "alpha 0.03": (42.8, 79.4),
    "alpha 0.05": (42.9, 80.4),
    "alpha 0.1": (42.4, 80.4),
    "tau 0": (34.1, 77.1),
    "tau 0.4": (38.6, 76.9),
    "tau 0.6": (41.6, 79.3),
    "N 1": (42.6, 79.1),
    "N 2": (42.8, 79.2),
    "N 4": (43.4, 80.1),
    "N 5": (42.9, 79.4),
    "no negative": (42.8, 78.9),
    "no positive": (42.8, 79.9),
}


def test_casp_table4_all() -> None:
    """Three of fourteen settings have less pass@1 than GRPO, none has less pass@256."""
    grpo = TABLE_4["GRPO"]
    below = [name for name, each in TABLE_4.items() if each[0] < grpo[0]]
    assert below == ["tau 0", "tau 0.4", "tau 0.6"] and len(TABLE_4) - 1 == 14
    assert min(each[1] for name, each in TABLE_4.items() if name != "GRPO") > grpo[1]


def test_casp_fig6_alpha() -> None:
    """pass@256 does not rise with alpha: it is largest at the smallest."""
    values = [TABLE_4[name][1] for name in ("CaSP", "alpha 0.02", "alpha 0.03", "alpha 0.05", "alpha 0.1")]
    assert max(values) == values[0] and values != sorted(values)


def test_casp_tables_noise() -> None:
    """One setting's AIME24 pass@256 differs by 7.5 points between three tables, its lead over GRPO by 6.8.

    Over temperatures (Table 5, .2 to 1.0) the lead changes its sign.
    """
    casp, grpo = np.array([[78.0, 84.0, 76.5], [64.6, 58.5, 55.6]]), np.array([[72.3, 75.1, 74.4], [52.1, 52.3, 53.1]])
    assert np.ptp(casp[0]) == pytest.approx(7.5)
    assert casp - grpo == pytest.approx(np.array([[5.7, 8.9, 2.1], [12.5, 6.2, 2.5]]))
    casp = np.array([[72.43, 72.3, 84.0, 78.9, 75.6], [57.5, 64.1, 58.5, 52.3, 64.5]])
    grpo = np.array([[62.7, 75.6, 75.1, 81.7, 75.5], [53.7, 54.6, 52.3, 52.3, 51.8]])
    assert casp - grpo == pytest.approx(np.array([[9.73, -3.3, 8.9, -2.8, 0.1], [3.8, 9.5, 6.2, 0.0, 12.7]]))


# 2510.04028, pass@k of Tables 1 and 3 for k = 1, 2, 4, ..., 256.
KS = tuple(2**power for power in range(9))
ARC = {
    "GRPO": (62.3, 77.4, 86.6, 91.6, 94.2, 96.3, 98.2, 99.5, 100.0),
    "GRPO-N": (61.7, 78.1, 88.5, 94.3, 97.7, 99.5, 99.9, 100.0, 100.0),
    "GSPO": (59.9, 74.1, 83.2, 89.1, 93.2, 95.7, 96.7, 96.9, 96.9),
    "GSPO-N": (63.9, 77.9, 86.5, 91.1, 93.7, 95.5, 96.5, 96.9, 96.9),
}
MMLU_PRO = {
    "GRPO": (40.1, 52.0, 62.4, 70.8, 76.9, 80.6, 83.7, 87.3, 90.6),
    "GRPO-N": (38.5, 49.9, 60.7, 70.1, 78.1, 84.3, 89.0, 93.7, 100.0),
}
MATH_500 = {
    "base": (40.7, 51.5, 58.9, 64.1, 68.5, 72.9, 77.9, 83.2, 88.0),
    "GRPO": (53.3, 57.9, 61.2, 63.5, 65.3, 67.0, 68.9, 70.8, 72.6),
    "GRPO-N": (53.0, 57.9, 61.3, 63.7, 65.3, 66.8, 68.5, 70.2, 72.2),
    "GSPO-N": (54.1, 58.8, 62.0, 64.1, 65.9, 67.6, 69.5, 71.5, 73.4),
}


def below(table: dict[str, tuple[float, ...]], method: str, parent: str) -> list[int]:
    """The values of k at which a method has less than another one."""
    return [k for k, ours, theirs in zip(KS, table[method], table[parent], strict=True) if ours < theirs]


def test_ts_table1_ood() -> None:
    """The -N variants are below their parents at some k on both sets."""
    assert below(ARC, "GRPO-N", "GRPO") == [1] and below(ARC, "GSPO-N", "GSPO") == [32, 64]
    assert below(MMLU_PRO, "GRPO-N", "GRPO") == [1, 2, 4, 8]


def test_ts_table3() -> None:
    """The base passes both -N variants on MATH-500 from k = 16 on, and GRPO-N is below GRPO from k = 32 on."""
    assert below(MATH_500, "GRPO-N", "base") == [8, *KS[4:]] and below(MATH_500, "GSPO-N", "base") == list(KS[4:])
    assert below(MATH_500, "GRPO-N", "GRPO") == [1, *KS[5:]]
