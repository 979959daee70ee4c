"""How far 16-bit logits are from the float32 goldens: the numbers that check_goldens.py and rounding_reference.py both take."""
import math

import numpy


def log_softmax(row):
    top = row.max()
    return row - top - numpy.log(numpy.exp(row - top).sum())


class Demo:
    """One model of the demo family: log-probabilities of the 10 best tokens in prompts (`top`) and of the greedy continuation's
    (`next`), differences from the golden; greedy choices that the golden's continuation leads to."""

    def __init__(self):
        self.top, self.next, self.disagreed, self.choices = [], [], [], 0

    def prompt(self, prompt, logits):
        """logits: a row for each position of the prompt at least."""
        for entry in prompt["top"]:
            row = log_softmax(logits[entry["position"]])
            self.top += [abs(row[i] - want) for i, want in zip(entry["ids"], entry["logprobs"])]

    def continued(self, prompt, logits, count=None):
        """logits: rows for prompt and continuation, which are right for its first `count` tokens."""
        greedy, first = prompt["greedy"], len(prompt["ids"]) - 1
        for i, (token, want) in enumerate(list(zip(greedy["ids"], greedy["logprobs"]))[:count]):
            self.next.append(abs(log_softmax(logits[first + i])[token] - want))

    def chosen(self, prompt, logits):
        """The margins of the choices that were others."""
        greedy, first = prompt["greedy"], len(prompt["ids"]) - 1
        wrong = [(i, margin) for i, (token, margin) in enumerate(zip(greedy["ids"], greedy["margins"])) if int(logits[first + i].argmax()) != token]
        self.disagreed += [margin for _, margin in wrong]
        self.choices += len(greedy["ids"])
        return wrong

    def summary(self):
        return {"worst": largest(self.top), "p99": float(numpy.quantile(self.top, 0.99)), "rms": rms(self.top), "next": rms(self.next), "disagreed": len(self.disagreed)}


def joined(parts):
    whole = Demo()
    for part in parts:
        whole.top, whole.next, whole.disagreed, whole.choices = whole.top + part.top, whole.next + part.next, whole.disagreed + part.disagreed, whole.choices + part.choices
    return whole


def largest(values):
    return float(numpy.max(list(values)))  # not a number if one is not


def rms(values):
    return math.sqrt(sum(v * v for v in values) / len(values))


def arch_prompts(golden):
    return golden["prompts" if "prompts" in golden else "base"]  # those for tensor parallelism have a variant too


def relative_l2(row, want):
    want = numpy.array(want)
    return float(numpy.linalg.norm(row - want) / numpy.linalg.norm(want))
