r"""Mathematics: a corpus of traps whose verdicts come from mathematics, and bombs that must not explode.

Where math-verify 0.9.0 by itself says otherwise, the row says so. `CONVENTIONS` are verdicts that are not mathematics
but what the data sets mean; `DEPARTURES` are right answers that are not recognised.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from unittest.mock import Mock

import pytest
from cases import each_case
from waiting import HANG_S, SOON_S

from megasharp.common.records import Outcome
from megasharp.tasks import math_algebra
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.math import MathAnswer, canonical, verify
from megasharp.tasks.math_bounds import beyond
from megasharp.tasks.prompts import TEMPLATES, worded
from megasharp.tasks.table import make_verifiers

CORRECT, WRONG, FORMAT = Outcome.CORRECT, Outcome.WRONG, Outcome.FORMAT


def judge(gold: str, given: str) -> Outcome:
    return verify(rf"Some thought. \boxed{{{given}}}", MathAnswer(gold)).outcome


@each_case(
    ("gold", "given", "expected"),
    [
        ("1/2", "0.5", CORRECT),
        (r"\frac12", r"\dfrac{1}{2}", CORRECT),
        (r"\frac{3}{4}", r"\tfrac{75}{100}", CORRECT),
        (r"-\frac12", r"\frac{-1}{2}", CORRECT),
        (r"3\frac12", r"\frac{7}{2}", CORRECT),
        (r"\boxed{7}", "7", CORRECT),
        ("$7$", r"\(7\)", CORRECT),
        (r"\varnothing", r"\emptyset", CORRECT),
        (r"\emptyset", r"\varnothing", CORRECT),
        (r"\varnothing", r"\{\}", CORRECT),
        (r"\emptyset", r"\{0\}", WRONG),
        ("7", "8", WRONG),
        ("-1", "1", WRONG),
        # Case. The library reads capitals as small letters, and `K-k` as zero.
        ("K-k", "k-K", WRONG),
        ("K-k", "0", WRONG),
        ("K-k", "-k+K", CORRECT),
        ("K+k", "2k", WRONG),
        ("2k", "K+k", WRONG),
        ("K+k", "k+K", CORRECT),
        ("aA", "a^2", WRONG),
        ("aA", "Aa", CORRECT),
        (r"\Delta-\delta", r"\delta-\Delta", WRONG),
        (r"\frac{R_1-r_1}{2}", r"\frac{r_1-R_1}{2}", WRONG),
        (r"\frac{R^2-r^2}{R-r}", "R+r", CORRECT),
        ("x", "X", CORRECT),
        ("2K", "2k", CORRECT),
        ("2i", r"\sqrt{-4}", CORRECT),
        (r"\sqrt{-4}", "2i", CORRECT),
        (r"\sqrt{-4}", "-2i", WRONG),
        # Thousands. The library reads `1\,000` as 1 times 0, and `1 234` as 235.
        ("1000", "1,000", CORRECT),
        ("1000000", "1{,}000{,}000", CORRECT),
        ("1000", r"1\,000", CORRECT),
        ("1234", "1 234", CORRECT),
        ("0", r"1\,000", WRONG),
        ("1234", "12,34", WRONG),
        # Numbers in a row are a text. The library reads `1 2` as 1 and 2 added, and drops what a list repeats.
        ("12", "1 2", WRONG),
        ("3", "1 2", WRONG),
        ("1 2", "1  2", CORRECT),
        ("1 2", "12", WRONG),
        ("10", "10,10", WRONG),
        ("10,10", "10", WRONG),
        ("10,10", "10, 10", CORRECT),
        ("(10,10)", "10,10", CORRECT),
        ("10,10", "10,10,10", WRONG),
        (r"\{10\}", r"\{10,10\}", CORRECT),
        ("2 1/2", "2.5", CORRECT),
        ("-2 1/2", r"-\frac{5}{2}", CORRECT),
        # Decimals. The library calls 1e-7 and 2e-7 equal, because it rounds to six places.
        ("1/3", "0.333333", CORRECT),
        ("1/3", "0.33", WRONG),
        ("2/3", "0.666666", WRONG),
        (r"\pi", "3.14159265", CORRECT),
        (r"2\pi", "6.28", WRONG),
        ("0.0000001", "0.0000002", WRONG),
        ("3", "3.0", CORRECT),
        ("3", "3.0000000001", WRONG),
        (r"\frac13", r"0.\overline{3}", CORRECT),
        (r"0.\overline{3}", r"\frac13", CORRECT),
        ("-7/6", r"-1.1\overline{6}", CORRECT),
        ("0.3", r"0.\overline{3}", WRONG),
        ("7", r"\approx 7.0", CORRECT),
        ("7", r"\approx 7.1", WRONG),
        ("18", "18.", CORRECT),
        # The library reads 1e3 as 3 times Euler's number.
        ("1000", "1e3", CORRECT),
        ("1000000", "10^6", CORRECT),
        ("10^{-7}", "0", WRONG),
        # Percent.
        (r"50\%", "0.5", CORRECT),
        (r"\frac{1}{2}", "50%", CORRECT),
        (r"50\%", "5%", WRONG),
        # Units. The library drops every unit: for it 5 cm is 5 m.
        ("60", r"60\,\text{km/h}", CORRECT),
        ("60", "60 km/h", CORRECT),
        (r"5\text{ cm}", r"5\text{ centimeters}", CORRECT),
        (r"5\text{ cm}", r"5\text{ m}", WRONG),
        (r"5\text{ cm}^2", r"5\text{ cm}", WRONG),
        (r"5\text{ cm}", r"6\text{ cm}", WRONG),
        (r"\$18", "18", CORRECT),
        (r"90^\circ", r"90^{\circ}", CORRECT),
        (r"\frac{\pi}{2}", r"90^\circ", CORRECT),
        # Bases. For the library 11_2 is 11_3.
        ("11_2", "11_{2}", CORRECT),
        ("11_2", "11_3", WRONG),
        ("3", "11_2", CORRECT),
        ("11_2", "3", CORRECT),
        # Sets, pairs, intervals. For the library {1,2} is the pair (1,2).
        (r"\{1,2\}", r"\{2,1\}", CORRECT),
        (r"\{1,2\}", r"\{1,2,3\}", WRONG),
        (r"\{1,2\}", "(1,2)", WRONG),
        ("1,2", "2,1", CORRECT),
        (r"1\text{ and }2", "1,2", CORRECT),
        ("(3,-1)", "(3, -1)", CORRECT),
        ("(3,-1)", "(-1,3)", WRONG),
        ("(3,-1)", "(2,-5)", WRONG),
        ("(1,2,3)", "(3,2,1)", WRONG),
        ("[1,2)", "[1, 2)", CORRECT),
        ("[1,2)", "[1,2]", WRONG),
        (r"[1,2]\cup[3,4]", r"[3,4]\cup[1,2]", CORRECT),
        ("(1,2)", "1<x<2", CORRECT),
        (r"(-\infty,2)", "x<2", CORRECT),
        (r"(-\infty,2)", r"x\leq 2", WRONG),
        (r"\pm 2", "2,-2", CORRECT),
        (r"1\pm\sqrt{2}", r"\{1+\sqrt2,1-\sqrt2\}", CORRECT),
        (r"\pm 2", "2", WRONG),
        # Equations. The library takes the right side of any equation for the answer, and `x^x=5` for 5.
        ("3", "x=3", CORRECT),
        ("x=3", "3", CORRECT),
        ("x=3", "3=x", CORRECT),
        ("x=3", "4=x", WRONG),
        ("x=3", "y=3", WRONG),
        ("5", "2+3=5", CORRECT),
        ("5", "x^x=5", WRONG),
        ("5", "1=5", WRONG),
        (r"x=1\text{ or }x=2", "1,2", CORRECT),
        ("y=2x+1", "2x+1", CORRECT),
        ("y=2x+1", "y=2x-1", WRONG),
        ("f(x)=x^2", "x^2", CORRECT),
        # Expressions.
        ("2x+3", "3+2x", CORRECT),
        ("(x+1)^2", "x^2+2x+1", CORRECT),
        ("p-q", "q-p", WRONG),
        ("p - q", "-q+p", CORRECT),
        ("p - q", "-(q-p)", CORRECT),
        ("p - q", "S=p-q", CORRECT),
        ("p - q", "q - p", WRONG),
        ("p - q", "pq", WRONG),
        ("x - y - z", "x-(y+z)", CORRECT),
        ("pq - r", "-r+pq", CORRECT),
        ("well-known", "known-well", WRONG),
        (r"\sqrt{50}", r"5\sqrt{2}", CORRECT),
        (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}", CORRECT),
        (r"\frac{x+1}{x-1}", r"\frac{-x-1}{1-x}", CORRECT),
        (r"\sin^2x+\cos^2x", "1", CORRECT),
        ("|x|", "x", WRONG),
        ("5!", "120", CORRECT),
        (r"\binom{5}{2}", "10", CORRECT),
        ("70", r"{8 \choose 4}=70", CORRECT),
        ("70", r"8 \choose 4", CORRECT),
        ("71", r"{8 \choose 4}", WRONG),
        ("70", r"\binom84=70", CORRECT),
        (r"\binom{2n}{n}", r"\frac{(2n)!}{(n!)^2}", CORRECT),
        (r"\binom{2n}{n}", r"\frac{(2n)!}{n!\,n!}", CORRECT),
        (r"\binom{2n}{n}", r"\frac{(2n)!}{n!}", WRONG),
        ("(n-1)!", r"\frac{n!}{n}", CORRECT),
        ("n!", "(n-1)!", WRONG),
        # The library reads 2 and 70, 3 and 2.
        ("6", r"\binom{3}{1}\binom{2}{1}", CORRECT),
        ("5", r"\binom{3}{1}\binom{2}{1}", WRONG),
        ("3", r"\binom{4}{2}\frac12", CORRECT),
        ("140", r"2\binom{8}{4}", CORRECT),
        ("72", r"2\binom{8}{4}", WRONG),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", CORRECT),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", WRONG),
        (r"\infty", r"\frac10", WRONG),
        # Words. The library reads a bare word as a product of its letters: east is seat.
        (r"\text{Monday}", "Monday", CORRECT),
        (r"\text{Monday}", r"\text{Tuesday}", WRONG),
        (r"\text{June 5}", "June 5", CORRECT),
        (r"\text{June 5}", "June 6", WRONG),
        ("east", "seat", WRONG),
        (r"\text{even}", r"\text{Even}.", CORRECT),
        (r"\text{odd}", "odd", CORRECT),
        (r"\text{(B)}", "B", CORRECT),
        ("B", "(B)", CORRECT),
        ("B", "C", WRONG),
        # Huge, and still exact: neither needs more than a bounded power.
        ("2^{1000}", "4^{500}", CORRECT),
        ("2^{1000}", "4^{501}", WRONG),
        ("(x+1)^{10}", "(1+x)^{10}", CORRECT),
        ("x^{100}", "x^{50}x^{50}", CORRECT),
        ("(a+b+c)^3", "(c+b+a)^3", CORRECT),
        # Equations: the right side of what a problem may ask for, but of no false or unsolved one.
        ("70", "m+n=70", CORRECT),
        ("71", "m+n=70", WRONG),
        ("70", "70=m+n", CORRECT),
        ("70", "|AB|=70", CORRECT),
        ("70", "f(1)+f(2)=70", CORRECT),
        (r"\frac{1}{3}", r"\frac{AB}{CD}=\frac13", CORRECT),
        (r"\frac{1}{3}", r"\cos\theta=\frac13", CORRECT),
        ("70", r"N\equiv 70 \pmod{1000}", CORRECT),
        ("7", "x_1+x_2=7", CORRECT),
        ("9", "f(f(2))=9", CORRECT),
        (r"90^\circ", r"\angle = 90^\circ", CORRECT),
        (r"\ln 2", r"\log_e 2", CORRECT),
        ("210", r"\sum_{k=1}^{20}k=210", CORRECT),
        (r"\frac12", r"\sum_{n=1}^\infty \frac1{3^n}=\frac12", CORRECT),
        (r"\frac13", r"\sum_{n=1}^\infty \frac1{3^n}=\frac12", WRONG),
        ("50", r"\text{average speed}=50", CORRECT),
        (r"\frac{9}{2}", r"x=\frac{18}{4}=\frac{9}{2}=4.5", CORRECT),
        (r"\frac{24}{25}", r"\sin 2\theta=\frac{24}{25}", CORRECT),
        (r"\frac{24}{25}", r"\tan 2A=\frac{24}{25}", CORRECT),
        (r"\frac{24}{25}", r"x+\sin 2x=\frac{24}{25}", WRONG),
        ("7", r"x^2+\frac1{x^2}=7", CORRECT),
        ("3", r"x-\frac{1}{x}=3", CORRECT),
        ("5", r"x+\frac{6}{x}=5", WRONG),
        ("25", "r^2=25", WRONG),
        ("6", "x(x+1)=6", WRONG),
        ("6", "f(x+1)=6", CORRECT),
        ("70", "m=27,n=43,m+n=70", CORRECT),
        ("70", r"m=27,\ n=43,\text{ so }m+n=70", CORRECT),
        ("70", "m=27,n=44,m+n=70", WRONG),
        ("70", "m=27, n=70", WRONG),
        ("70", r"m=27,\ n=43 \implies m+n=70", CORRECT),
        ("70", r"\frac{27}{43} \rightarrow 27+43=70", CORRECT),
        ("71", r"\frac{27}{43} \rightarrow 27+43=71", WRONG),
        ("4", r"x=1 \implies y=2, x=3 \implies y=4", WRONG),
        (r"\frac12", r"\lim_{x\rightarrow 0} f(x)=\frac12", CORRECT),
        ("5", "x=5=6", WRONG),
        ("5", "6=5", WRONG),
        ("5", "2^2=5", WRONG),
        ("5", "x+x^2=5", WRONG),
        ("5", r"\sin x+x=5", WRONG),
        ("5", r"x\ge 5", WRONG),
        ("3", "N=7k+3", WRONG),
        ("5", r"2x=10\ \Rightarrow\ x=5", CORRECT),
        ("3.16", r"\sqrt{10}\approx 3.16", CORRECT),
        (r"\sqrt{10}", r"\sqrt{10}\approx 3.16", CORRECT),
        ("(2,3)", "(p,q)=(2,3)", CORRECT),
        ("(2,3)", r"y=3\text{ and }x=2", CORRECT),
        ("(2,3)", "x=3, y=2", WRONG),
        ("y=2x+3", "2x-y+3=0", CORRECT),
        ("y=2x+3", "2x-y+4=0", WRONG),
        ("f(x)=3x+1", "y=3x+1", CORRECT),
        (r"x\equiv 2\pmod 7", r"x\equiv 9\pmod{7}", CORRECT),
        (r"x\equiv 2\pmod 7", r"x\equiv 2\pmod 8", WRONG),
        # Words behind a number that change its value, and those that do not.
        ("5", r"5\text{ million}", WRONG),
        ("5000000", r"5\text{ million people}", CORRECT),
        ("5", r"5\mathrm{i}", WRONG),
        ("3+2i", r"3+2\mathrm{i}", CORRECT),
        ("5", r"5\text{ (or 6)}", WRONG),
        ("5", r"5\text{ dozen}", WRONG),
        ("25", r"5\text{ squared}", CORRECT),
        ("5", r"5\text{万}", WRONG),
        ("5", r"5\text{ apples}", CORRECT),
        ("5", "5 apples", CORRECT),
        ("5", "5t", WRONG),
        ("3m", "3", WRONG),
        (r"\$18", r"18\text{ cents}", WRONG),
        (r"\$18", r"18\%", WRONG),
        ("5", r"5\text{?}", WRONG),
        (r"\$18", r"18\text{ dollars}", CORRECT),
        (r"60^\circ", "60'", WRONG),
        (r"60^\circ", r"60\text{ radians}", WRONG),
        ("6", "six", CORRECT),
        (r"\frac{5}{2}", r"\text{two and a half}", CORRECT),
        # Percent: one reading of a share.
        ("0.25", r"25\%", CORRECT),
        ("0.25", r"0.25\%", WRONG),
        (r"25\%", "0.25", CORRECT),
        (r"25\%", "25", CORRECT),
        # Names of points.
        ("AB", "BA", WRONG),
        ("AB", r"\overline{BA}", CORRECT),
        (r"\angle ACB", r"\angle ABC", WRONG),
        (r"\angle ABC", r"\angle CBA", CORRECT),
        # Lists keep what they repeat.
        ("1,2", "1,1,2", WRONG),
        ("1,2,2", "1,2", WRONG),
        ("1,2,2", "2,1,2", CORRECT),
        ("1,2,2", "1,1,2", WRONG),
        (r"\frac12", r"\frac12\text{ or }0.5", CORRECT),
        (r"\frac{3\pm\sqrt{15}}{3}", r"1\pm\frac{\sqrt{15}}{3}", CORRECT),
        (r"(-\infty,-2]\cup[3,\infty)", r"x\le -2\text{ or }x\ge 3", CORRECT),
        # Floats of fractions and roots at full precision.
        (r"\frac{58}{3}", "19.333333333333332", CORRECT),
        (r"-\frac73", "-2.3333333333333335", CORRECT),
        (r"2\sqrt{2}", "2.8284271247461903", CORRECT),
        ("0.3", "0.30000000000000004", CORRECT),
        (r"\frac{58}{3}", "19.333333333333432", WRONG),
        # Unicode, and spellings of other countries.
        ("-5", "\N{EN DASH}5", CORRECT),
        ("70", "\uff17\uff10", CORRECT),
        ("35", "٣٥", CORRECT),
        (r"5\sqrt{3}", "5√3", CORRECT),
        (r"\frac32", "1½", CORRECT),
        (r"36\text{ cm}^2", "36 cm²", CORRECT),
        ("3.5", "3{,}5", CORRECT),
        ("1234000", "12,34,000", CORRECT),
        ("1000000", "1 x 10^6", CORRECT),
        (r"\frac13", r"0.\dot{3}", CORRECT),
        ("113_6", r"113_{\text{six}}", CORRECT),
        ("5", r"\therefore 5", CORRECT),
        ("5", "**5**", CORRECT),
        ("5", r"5\checkmark", CORRECT),
        ("5", "5;", CORRECT),
        ("5", "5 and 5", WRONG),
        ("120", "5!=120", CORRECT),
        ("121", "5!=121", WRONG),
        (r"\frac{\sqrt3}{2}", r"\sin 60^\circ=\frac{\sqrt3}{2}", CORRECT),
        ("5", r"\text{The answer is }5", CORRECT),
        ("5", "x is 5", CORRECT),
        # Where or why a value is taken, and what leads to it.
        ("36", r"36 \text{ (when } x=6)", CORRECT),
        ("36", r"36, \text{ when } x=6", CORRECT),
        ("36", r"36 \quad \text{when } x=6", CORRECT),
        ("16", r"16 \text{ at } x = 2", CORRECT),
        ("5", r"5 \text{ (since } x > 0)", CORRECT),
        ("70", r"70 \text{ (i.e. } m+n)", CORRECT),
        ("6", r"36 \text{ when } x=6", WRONG),
        ("36", r"36 \text{ when } x=6 \text{ or } 40 \text{ when } x=7", WRONG),
        ("36", r"36 \text{ or } 40 \text{ when } x=7", WRONG),
        ("36", r"36x \text{ when } x=1", WRONG),
        ("36", r"36 \text{ at most } n", WRONG),
        ("36", r"\text{The smallest } n \text{ is } 36", CORRECT),
        ("36", r"\text{Twice } n \text{ is } 36", WRONG),
        ("36", r"\text{Number of ways}: 36", CORRECT),
        ("36", r"\text{twice the number}: 36", WRONG),
        # Text around a number.
        ("36", r"\text{36 years old}", CORRECT),
        ("73", r"\text{073}", CORRECT),
        ("7", r"\text{7 or 8}", WRONG),
        ("5", r"\text{5 million}", WRONG),
        (r"\text{12 noon}", r"\text{12 midnight}", WRONG),
        ("36", r"36\,\frac{\text{km}}{\text{h}}", CORRECT),
        (r"36\text{ mph}", r"36\,\frac{\text{km}}{\text{h}}", WRONG),
        ("36", r"36\text{ unit}^2", CORRECT),
        ("36", r"\text{Rs. }36", CORRECT),
        ("36", r"\pounds 36", CORRECT),
        ("36", "£36", CORRECT),
        ("36", "36€", CORRECT),
        (r"\$36", "€36", WRONG),
        (r"\$36", r"36\text{ euros}", WRONG),
        ("36", r"36\text{k}", WRONG),
        ("36000", r"36\text{k}", CORRECT),
        (r"\text{2 hours and 30 minutes}", r"2\text{ hours } 30\text{ minutes}", CORRECT),
        (r"\text{2 hours and 30 minutes}", r"30\text{ hours } 2\text{ minutes}", WRONG),
        (r"\frac14", r"\frac14\ (25\%)", CORRECT),
        (r"\frac14", r"\frac14\ (0.25\%)", WRONG),
        ("(1,2)", r"\begin{cases}x=1\\y=2\end{cases}", CORRECT),
        ("(1,2)", r"\begin{cases}x=2\\y=1\end{cases}", WRONG),
        ("17", r"\begin{aligned} 17 \end{aligned}", CORRECT),
        ("70", r"\begin{aligned} m+n &= 27+43 \\ &= 70 \end{aligned}", CORRECT),
        ("70", r"\begin{aligned} m+n &= 27+43 \\ &= 71 \end{aligned}", WRONG),
        (r"\begin{cases}x&x>0\\-x&x<0\end{cases}", r"\begin{cases}-x&x>0\\x&x<0\end{cases}", WRONG),
        ("70", "x:=70", CORRECT),
        ("3", r"3 \pmod 7", CORRECT),
        ("3", r"4 \pmod 7", WRONG),
        ("17", r"17 \bmod 5", WRONG),
        (r"3 \pmod 7", r"3 \pmod 8", WRONG),
        (r"\text{odd}", r"\text{odd function}", CORRECT),
        (r"\text{even}", r"\text{odd function}", WRONG),
        (r"\text{ellipse}", r"\text{an ellipse}", CORRECT),
        (r"\text{east}", r"\text{due east}", CORRECT),
        # An option's label before its value: the known answer is one of the two.
        (r"\text{(C)}", r"\textbf{(C)}\ 12", CORRECT),
        ("C", r"\textbf{(C)}\ 12", CORRECT),
        (r"\text{(C)}", r"\textbf{(D)}\ 12", WRONG),
        ("C", r"\textbf{(C)}\ 12, \textbf{(D)}\ 13", WRONG),
        ("12", r"\text{E) } 12", CORRECT),
        ("12", "E: 12", CORRECT),
        ("13", "E: 12", WRONG),
        ("B", r"\text{Option B}", CORRECT),
        ("B", r"\text{Option C}", WRONG),
        # Vectors, intervals and complex numbers in other notations.
        (r"\begin{pmatrix}3\\4\end{pmatrix}", r"\langle 3,4\rangle", CORRECT),
        ("(3,5)", r"3\mathbf{i}+5\mathbf{j}", CORRECT),
        ("(3,5)", r"5\mathbf{i}+3\mathbf{j}", WRONG),
        (r"(1,+\infty)", r"]1;+\infty[", CORRECT),
        ("-3<x<5", "5>x>-3", CORRECT),
        (r"(-\infty,-4]", r"\{x\mid x\le -4\}", CORRECT),
        (r"2e^{i\pi/3}", r"1+i\sqrt3", CORRECT),
        (r"\pm i\sqrt{3}", r"\pm\sqrt{-3}", CORRECT),
        (r"\frac{e^{2x}}{2}+C", r"\tfrac12 e^{2x}+K", CORRECT),
        (r"9^{9^9}", r"9^{9^{9}}", CORRECT),
    ],
)
def test_the_corpus(gold: str, given: str, expected: Outcome) -> None:
    assert judge(gold, given) is expected


CONVENTIONS = [("50", r"50\%"), ("12.5", r"12.5\%"), ("5", r"5\text{ cm}"), (r"90^\circ", "90"), ("2516_8", "2516")]
DEPARTURES = [
    (r"5\text{ cm}", r"50\text{ mm}"),
    (r"\text{no solution}", r"\emptyset"),
    ("2^{30000}", "4^{15000}"),
    ("x=2", "2x=4"),
]


@each_case(("gold", "given"), CONVENTIONS)
def test_conventions_of_the_data_sets(gold: str, given: str) -> None:
    assert judge(gold, given) is CORRECT


@each_case(("gold", "given"), DEPARTURES)
def test_right_answers_that_are_not_recognised(gold: str, given: str) -> None:
    assert judge(gold, given) is WRONG


@each_case(
    ("text", "expected"),
    [
        # Boxes joined by "or" are several answers; the last of others counts.
        (r"\boxed{1} or \boxed{3}", WRONG),
        (r"$\boxed{1}$, $\boxed{2}$ or $\boxed{3}$", WRONG),
        (r"$\boxed{3}$ or $\boxed{\frac{6}{2}}$", CORRECT),
        (r"\boxed{1}. Then \boxed{3}", CORRECT),
        (r"\boxed{3}, or rather \boxed{1}", WRONG),
        (r"\boxed{\boxed{3}}", CORRECT),
        (r"\boxed{x = \boxed{3}}", CORRECT),
        ("The final answer is: $3$. I hope it is correct.", CORRECT),
        ("#### 3", CORRECT),
        (r"the answer is $\frac{6}{2}$", CORRECT),
        ("the answer is 4", WRONG),
        # What is stated last counts, if it can be read.
        (r"\boxed{4} The answer is 3", CORRECT),
        (r"\boxed{3}. So the correct answer is 4, not 3.", WRONG),
        (r"\boxed{4}. So the correct answer is 3, not 4.", CORRECT),
        (r"\boxed{3}. The answer is in the box.", CORRECT),
        # An answer taken back is none, unless it is confirmed.
        (r"\boxed{3}. Wait, that is wrong. I give up.", WRONG),
        ("The answer is 3. Hmm, this cannot be right.", WRONG),
        (r"\boxed{3}. Wait, let me verify: yes.", CORRECT),
        (r"\boxed{4}. That is wrong. So \boxed{3}", CORRECT),
        (r"\boxed{}", Outcome.FORMAT),
        (r"\boxed{3} \boxed{ }", CORRECT),
        (r"\boxed 3", CORRECT),
        (r"The answer is: \[3\]", CORRECT),
        ("The answer is:\n\\[\n3\n\\]\n", CORRECT),
        ("So x + 1 = 4.\n$\\therefore 3$", CORRECT),
        ("So x + 1 = 4.\n$\\therefore x = 3$.", CORRECT),
        ("$\\therefore 3$ is odd, and so on", Outcome.FORMAT),
        ("\N{THEREFORE} 3", CORRECT),
        (r"The answer is $\sqrt{9}$.", CORRECT),
        ("The answer is $x=3$.", CORRECT),
        ("The answer is $3$ or $4$.", Outcome.FORMAT),
        ("答案是 3。", CORRECT),
        ("答案是 3万。", Outcome.FORMAT),
        ("### Answer\n$$3$$", CORRECT),
        # Tags count where there is no box.
        ("<answer>3</answer>", CORRECT),
        (r"<think>4?</think> <answer> \(\frac{6}{2}\) </answer>", CORRECT),
        ("<answer>The answer is 3.</answer>", CORRECT),
        ("The answer is 4. <answer>3</answer>", CORRECT),
        ("<answer>3</answer> The answer is 4.", WRONG),
        ("<answer>3</answer> <answer>4</answer>", WRONG),
        ("<answer>3 or 4</answer>", WRONG),
        ("<answer>3</answer> Wait, that is wrong. I give up.", WRONG),
        (r"\boxed{4} <answer>3</answer>", WRONG),
        ("<answer></answer>", Outcome.FORMAT),
        # Another problem, made up after the answer.
        ("\\boxed{3}\n\nProblem 2: 2+2?\n\\boxed{4}", CORRECT),
        ("\\boxed{4}\n\nHuman: 1+2?\n\\boxed{3}", WRONG),
        (r"\boxed{3", Outcome.FORMAT),
        ("I got 3", Outcome.FORMAT),
        ("the answer is x", Outcome.FORMAT),
        ("", Outcome.FORMAT),
        ("3" * 10_000_000, Outcome.FORMAT),
        (r"\boxed{" * 1_000_000, Outcome.FORMAT),
        ("wait " * 2_000_000 + r"\boxed{3}", CORRECT),
        (r"\boxed{" + "3" * 10_000_000 + "}", Outcome.FORMAT),
    ],
    ids=range(54),
)
def test_where_the_answer_is(text: str, expected: Outcome) -> None:
    verdict = verify(text, MathAnswer("3"))
    assert (verdict.outcome, verdict.reward) == (expected, float(expected is CORRECT))


@each_case(
    ("text", "expected"),
    [
        (r"$x=\boxed{2}$ and then $x=\boxed{5}$", CORRECT),
        (r"\boxed{x=5}, and in the other case \boxed{x=2}", CORRECT),
        (r"\boxed{2}, \boxed{5}. Together \boxed{2, 5}.", CORRECT),
        (r"\boxed{2}", WRONG),
        (r"\boxed{2}, \boxed{5} and \boxed{7}", WRONG),
        (r"\boxed{2}. Then \boxed{5}. Then \boxed{7}", WRONG),
        ("- $x=\\boxed{2}$\n- $x=\\boxed{5}$", CORRECT),
        ("Case 1: $\\boxed{5}$.\n\nCase 2: $x<3$, so $\\boxed{2}$.", CORRECT),
        (r"The first root is $\boxed{2}$. The second root is $\boxed{5}$.", CORRECT),
        (r"From $k=\boxed{3}$: so $\boxed{2}$, $\boxed{5}$", CORRECT),
        # The last box counts where something is concluded between boxes.
        (r"Case 1 gives $\boxed{2}$. Case 2 gives \boxed{5}. But $2$ fails, so the only root is $\boxed{5}$.", WRONG),
        (r"First I thought \boxed{2}. But that is wrong. The answer is \boxed{5}.", WRONG),
        ("## Step 1\n\\boxed{2}\n## Step 2\nSo the number of roots is \\boxed{5}.", WRONG),
        (r"Try $x=\boxed{2}$: this fails. Hence the only root is $\boxed{5}$.", WRONG),
        (r"\boxed{2}. Then \boxed{5}.", WRONG),
        (r"One root is \boxed{2}, so the number of divisors is \boxed{5}.", WRONG),
    ],
)
def test_several_boxes_are_a_known_list(text: str, expected: Outcome) -> None:
    assert verify(text, MathAnswer("2,5")).outcome is expected
    # The same boxes are a known pair, in their order.
    assert verify(r"$x=\boxed{2}$, $y=\boxed{5}$", MathAnswer("(2,5)")).outcome is CORRECT
    assert verify(r"$x=\boxed{5}$, $y=\boxed{2}$", MathAnswer("(2,5)")).outcome is WRONG
    assert verify(r"The slope is \boxed{2}. So the final answer is \boxed{5}.", MathAnswer("(2,5)")).outcome is WRONG
    assert verify(r"Case 1: \boxed{2}. Case 2: \boxed{5}.", MathAnswer("(2,5)")).outcome is WRONG


@each_case(
    "stated",
    [
        "7", "7.", "$7$.", "**7**", "(7)", r"\\(7\\).", "7 apples.", "7 m", "7cm", r"$7\text{ cm}$", r"7^\circ",
        "7, as asked",
        "7. I hope it is 8.", "7 because 3 + 4 = 7", "6. Wait, the answer is 7.", "$7$ dollars", "7 percent",
    ],
)  # fmt: skip
def test_a_number_that_is_stated(stated: str) -> None:
    assert verify(f"The answer is {stated.replace(chr(92) * 2, chr(92))}", MathAnswer("7")).outcome is CORRECT


@each_case(
    "stated",
    [
        r"7\pi", "7x", "7 x", "7^2", r"7\sqrt{2}", "7*8", "7 * 8", "7!", "7 or 8", "7 cm or 8 cm", "7, 8", "7, or 8",
        "7+8 = 15",
        "7-1", "7:8", "7 million", "7 times 8", "7 squared", r"\frac{7}{1}\pi", "7(8)", "7e5", "7.5.3", r"$7$\pi",
        "7 sqrt(2)",
        "7 f(x)",
    ],
)  # fmt: skip
def test_a_number_that_something_is_made_of_is_not_stated(stated: str) -> None:
    assert verify(f"The answer is {stated}", MathAnswer("7")).outcome is Outcome.FORMAT


# Where the prompt asks for a line, and where it does not: then only a number or a whole formula may be stated.
@each_case(
    ("text", "gold", "asked", "else_"),
    [
        ("Answer: 34", "34", CORRECT, CORRECT),
        ("Steps.\n\nAnswer: \\sqrt{50}", r"5\sqrt{2}", CORRECT, FORMAT),
        ("Steps.\n\nAnswer: $\\sqrt{50}$", r"5\sqrt{2}", CORRECT, CORRECT),
        ("Answer: x+1\nNo.\nANSWER : $(1, 2)$.", "(1,2)", CORRECT, FORMAT),
        ("**Answer:**\n\n2x+3", "3+2x", CORRECT, FORMAT),
        ("Answer: 2x", "3+2x", WRONG, FORMAT),
        ("Answer:", "34", FORMAT, FORMAT),
        ("The answer is x+1", "x+1", FORMAT, FORMAT),
        # A box counts first where the line has no number, and so does a number that is stated.
        ("\\boxed{x+1}\nAnswer: x+2", "x+1", CORRECT, CORRECT),
        (r"Answer: \boxed{34}", "34", CORRECT, CORRECT),
        ("Answer: x+2\nThe answer is 7.", "7", CORRECT, CORRECT),
    ],
)
def test_any_answer_may_be_on_a_line_that_the_prompt_asks_for(
    text: str, gold: str, asked: Outcome, else_: Outcome
) -> None:
    problem = TaskItem("p", "math", "?", MathAnswer(gold), "own", question="?")
    (item,), (boxed,) = (worded([problem], TEMPLATES[name]) for name in ("dapo", "boxed_chat"))
    assert (verify(text, item.answer).outcome, verify(text, boxed.answer).outcome) == (asked, else_)
    # Digests of runs that have begun are of this text.
    assert repr(item.answer) == repr(boxed.answer) == f"MathAnswer(gold={gold!r})"


@each_case(
    "bomb",
    [
        "9^{9^{9^9}}",
        "10^{10^{10}}",
        "9^9^9^9",
        "9**9**9**9",
        "e^{e^{e^{e^{e}}}}",
        "10^{-10^{10}}",
        "2^{100000000}",
        r"\left(\frac{99}{98}\right)^{10^8}",
        "99999999!",
        "(10^9)!",
        "9!!!!",
        "((9n)!)!",
        "((n)!+(9n)!)!",
        r"\frac{((9n+9)!)^{12}}{((8n+8)!)^{12}}",
        r"\frac{(9n+9)!(8n+8)!}{(7n+7)!(6n+6)!}",
        r"\frac{(9n+9)!(9m+9)!(9k+9)!(9l+9)!}{(8n+9)!(8m+9)!(8k+9)!(8l+9)!}",
        "|1000000000|!",
        "|10^{26}|!",
        r"\lfloor 10^{9}\rfloor !",
        r"\binom{5}{0.5}\ln y",
        "2^{9!}",
        r"\binom{1000000000}{500000000}",
        r"\binom{10^9}{5}",
        r"\binom{10^8}{5\cdot10^7}",
        r"\binom{10^{8}}{5\cdot 10^{7}}",
        r"\dbinom{(10^4)^2}{50000000}",
        r"{100000000 \choose 50000000}",
        r"10^8 \choose 50000000",
        r"{{9 \choose 4} \choose {9 \choose 3}}",
        r"{10^{8} \choose 5\cdot10^{7}}",
        r"\Gamma(10^9)",
        r"\Gamma\left(10^{9}\right)",
        r"\Gamma{(1000000000)}",
        r"\gamma(100000000)",
        r"\Gamma(99999999.5)",
        r"\operatorname{gamma}(10^9)",
        r"\operatorname{eye}(100000)",
        r"\Gamma(10^9)=5",
        r"5=\binom{10^{8}}{5\cdot 10^{7}}",
        r"\sum_{k=1}^{1000000000} k^k",
        r"\prod_{k=1}^{100000000} k",
        r"\int_0^1 x^x e^{\sin x} dx",
        r"\lim_{x\to 0}\frac{\sin(x^x)}{x}",
        "(x+y+z+w)^{200}",
        r"\cos(10^{10^5})",
        "(a+b+c+d+e+f)^{12}",
        "((a+b+c)^{6}+d)^{6}",
        r"\frac{x^{20000}-1}{x-1}",
        r"\frac{x^{1000}-1}{x^{99}-1}",
        r"\frac{(x+1)^{12}(y+1)^{12}}{(z+1)^{12}(w+1)^{11}}",
        "(2^{20000})^{20000}",
        "((9^{999})^{999})^{999}",
        r"\sqrt[3]{9^{9999}+1}",
        "(9^{9999}+1)^{1/3}",
        "(" * 150 + "1" + ")" * 150,
        "{" * 150 + "1" + "}" * 150,
        "[" * 200,
        r"\frac{1}{" * 40 + "2" + "}" * 40,
        r"\sqrt{" * 50 + "2" + "}" * 50,
        "+".join(rf"\frac{{1}}{{x+{k}}}" for k in range(1, 25)),
        "9" * 5000,
        "x=2, " * 100,
        r"x^9+7x^5+3x^3-\sin x+e^x=5",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{100000000}",
        r"\tan(\tan(\tan(\tan(\tan(\tan 1)))))",
        r"\sin(\cos(\tan(\sin(\cos 1))))",
    ],
)
def test_bombs_are_judged_in_bounded_time(bomb: str) -> None:
    for gold in ("5", "x=2"):
        started = time.process_time()
        assert judge(gold, bomb) is WRONG
        assert time.process_time() - started < SOON_S


def test_the_library_is_given_no_binomial_of_a_decimal() -> None:
    started = time.process_time()
    assert judge(r"|\binom{5}{100}+\log_{y} 2|", r"\binom{5}{0.5}\%") is WRONG
    assert time.process_time() - started < SOON_S


def test_statements_that_keep_an_answer_or_correct_it() -> None:
    for text in ("I fixed a typo; the answer is unchanged.", "If my answer is wrong, tell me."):
        assert verify(f"The answer is 5.\n\n{text}", MathAnswer("5")).outcome is CORRECT
    assert verify("The answer is 5.\n\nActually, I think the answer is 7.", MathAnswer("5")).outcome is WRONG


@each_case(
    "text",
    [
        "The answer is " + "1" * 90_000,
        "The answer is " + "1," * 45_000,
        "答案是5个" * 20_000 + "or 6",
        r"\boxed{5" + r"\ " * 5_000 + "}",
        r"\boxed{" + "1" * 90_000 + "}",
        r"\boxed{5" + " " * 90_000 + "x}",
        r"\therefore 5" + " " * 90_000 + "x",
    ],
)
def test_long_statements_are_read_in_bounded_time(text: str) -> None:
    started = time.process_time()
    verify(text, MathAnswer("5"))
    assert time.process_time() - started < SOON_S


def test_a_bomb_that_the_data_set_asks_for_is_compared_as_text() -> None:
    assert judge("9^{9^{9^9}}", "9^{9^{9^9}}") is CORRECT
    assert "a tower of exponents" in verify(r"\boxed{9^{9^{9^9}}}", MathAnswer("5")).detail


def test_functions_side_by_side_are_not_within_each_other() -> None:
    for text in (r"\sin(1)\cos(2)\tan(3)", r"\sin^2 x\cos^3 x\tan x", r"\frac{\sin 1}{\cos 1}+\ln 2"):
        assert beyond(text) is None, text
    for text in (r"\sin\cos\tan 1", r"\log_2\log_2\log_2 256", r"\tan^{2}(1+\tan(\operatorname{tan}(1)))"):
        assert beyond(text) == "functions of functions, more than 2"


# Equations on both sides are solved, by whatever sympy has for them: no bound on the text says how long that takes.
LEFT_TO_THE_POOL = [("x^2+y^2=1", r"x^9+7x^5+3x^3-\sin x+e^x=5")]


@each_case(("gold", "bomb"), LEFT_TO_THE_POOL)
def test_what_no_bound_holds_ends_with_its_process(gold: str, bomb: str) -> None:
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=judge, args=(gold, bomb))
    worker.start()
    worker.join(1.0)
    was_alive = worker.is_alive()
    worker.kill()
    worker.join(HANG_S)
    assert was_alive, "it is bounded now: move it to the bombs"
    assert worker.exitcode == -signal.SIGKILL


def test_it_judges_in_threads_and_touches_no_signal() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    found: list[Outcome] = []
    threads = [threading.Thread(target=lambda: found.append(judge("1/2", "0.5"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CORRECT] * 4
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    assert judge("1/2", "0.75") is WRONG
    assert 900.0 < signal.setitimer(signal.ITIMER_REAL, 0.0)[0] <= 1000.0
    assert signal.getsignal(signal.SIGALRM) is handler


@each_case(
    ("gold", "given"),
    [
        # Each raises in sympy or in math-verify.
        (r"\frac{0}{0}", "1"),
        ("1", r"\frac{0}{0}"),
        ("(2,4)", "(p,q)=(2,3)"),
        ("(1,2)", r"(p,q)=[1,2]"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"A^2=\begin{pmatrix}1&2\end{pmatrix}"),
        (r"x=\{1\}", r"y+1=(0,1]"),
    ],
)
def test_what_sympy_cannot_do_is_compared_as_text(gold: str, given: str) -> None:
    assert judge(gold, given) is WRONG
    assert judge(given, given) is CORRECT


def test_what_sympy_raises_is_told_and_a_fault_of_the_machine_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nan" in verify(r"\boxed{x}", MathAnswer(r"\frac{0}{0}")).detail
    for error in (MemoryError(), KeyboardInterrupt()):
        monkeypatch.setattr(math_algebra, "equal", Mock(side_effect=error))
        with pytest.raises(type(error)):
            verify(r"\boxed{x}", MathAnswer("x+1"))


@each_case(
    ("one", "other"),
    [
        ("1/2", r"\frac{2}{4}"),
        ("0.50", r"\dfrac12"),
        ("2,1", r"\{1,2\}"),
        ("x=3", "3"),
        (r"\sqrt{50}", r"5\sqrt2"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\text{Monday}", "monday"),
        (r"7\text{ cm}", "7"),
    ],
)
def test_equal_answers_have_one_canonical_text(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)


def test_letters_of_both_cases_stay_apart_in_the_canonical_text() -> None:
    assert canonical("K-k") == canonical("-k+K") == "-k + K"


def test_correct_answers_are_one_and_no_wrong_one_is_that_one() -> None:
    answer = MathAnswer(r"\frac13")
    names = {verify(rf"\boxed{{{text}}}", answer).canonical_answer for text in ("1/3", "0.333333", "x=1/3")}
    assert names == {"1/3"}
    for gold, given in ((r"5\text{ cm}", r"5\text{ m}"), ("5", "x^x=5"), (r"\{1,2\}", "(1,2)"), ("11_2", "11_3")):
        wrong = verify(rf"\boxed{{{given}}}", MathAnswer(gold))
        assert wrong.outcome is WRONG
        assert wrong.canonical_answer not in (None, canonical(gold))


def test_the_table_names_the_task() -> None:
    assert make_verifiers()["math"](r"\boxed{7}", MathAnswer("7")).outcome is CORRECT
