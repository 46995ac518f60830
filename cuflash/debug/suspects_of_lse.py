"""What a wrong lse beside a right answer may come from: entries as in `suspects`, that compute an lse."""

from __future__ import annotations

import math

import numpy as np

from cuflash.debug.suspects import Suspect, masked

# fmt: off
SUSPECTS_OF_LSE = (
    Suspect("lse in base 2", "multiply by ln 2: lse is a natural logarithm",
            lambda p: p.softmax().lse / math.log(2)),
    Suspect("lse without the maximum", "add the row's maximum to the logarithm of the sum",
            lambda p: p.softmax().lse - p.softmax().top),
    Suspect("lse is the maximum alone", "add the logarithm of the sum",
            lambda p: p.softmax().top),
    Suspect("lse is the sum of exponentials", "take its logarithm and add the maximum",
            lambda p: p.softmax().total),
    Suspect("lse with the maximum in base 2", "the maximum of scores times log2(e) is to be multiplied by ln 2",
            lambda p: p.softmax().lse + p.softmax().top * (1 / math.log(2) - 1)),
    Suspect("lse with the sum's logarithm in base 2", "use log, or multiply log2 by ln 2",
            lambda p: p.softmax().top + (p.softmax().lse - p.softmax().top) / math.log(2)),
    Suspect("lse's sign", "it is +log(sum(exp(scores)))",
            lambda p: -p.softmax().lse),
    Suspect("lse without the sink", "the sink is in the maximum and in the sum",
            lambda p: p.softmax(sink=-np.inf).lse, lambda a: a.sink),
    Suspect("lse of all keys", "hidden keys are not in the sum",
            lambda p: p.softmax(visible=p.seen() | True).lse, masked),
    Suspect("lse without the scale", "scores are scaled first",
            lambda p: p.softmax(p.scores(scale=1.0)).lse),
    Suspect("lse without bias and ALiBi", "both are part of the scores",
            lambda p: p.softmax(p.scores(bias=0.0, slope=0.0)).lse, lambda a: a.alibi or a.bias),
    Suspect("lse without the softcap", "scores are capped first",
            lambda p: p.softmax(p.scores(cap=0.0)).lse, lambda a: a.softcap),
)
# fmt: on
