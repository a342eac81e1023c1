"""Writes a certificate as one HTML page with its plots inside, which loads nothing from
elsewhere."""

from __future__ import annotations

import io
import json
import time
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvlinker.quality.bench.harness.report import empty_figure
from kvlinker.service.audit.certificate import Certificate

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ c.policy }} with {{ c.model }}: {{ verdict }}</title>
<style>
:root { color-scheme: light dark; font-family: system-ui, sans-serif; line-height: 1.5 }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { border-bottom: 1px solid #8885; padding: .3rem .6rem; text-align: left }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.verdict { font-size: 1.3rem; font-weight: 600; color: {{ "#17803d" if c.passed else "#b42318" }} }
figure { margin: 1rem 0; background: #fff; padding: .5rem; overflow-x: auto }
code { overflow-wrap: anywhere }
</style>
</head>
<body>
<h1>{{ c.policy }} with {{ c.model }}</h1>
<p class="verdict">{{ verdict }}</p>
<p>{{ c.agreement.agreeing }} of {{ c.agreement.samples }} answers agree with the full computation:
{{ share(c.agreement.agreement) }} (exact 95% interval {{ share(c.agreement.ci_low) }} to
{{ share(c.agreement.ci_high) }}; the target is {{ share(c.target) }}). An answer agrees if the full
computation finds its first token the most likely, too; a scored text if it does for all of its
tokens.</p>
<figure>{{ agreement }}</figure>
<table>
<tr><th>task</th><th>answers</th><th>agreement</th><th>95% interval</th></tr>
{% for name, t in c.tasks.items() %}
<tr><td>{{ name }}</td><td class="n">{{ t.samples }}</td><td class="n">{{ share(t.agreement) }}</td>
<td class="n">{{ share(t.ci_low) }} to {{ share(t.ci_high) }}</td></tr>
{% endfor %}
</table>
<h2>Scores against references</h2>
<figure>{{ scores }}</figure>
<table>
<tr><th>data set</th><th>task</th><th>policy</th><th>n</th><th>metric</th><th>score</th>
<th>95% interval</th><th>recomputed</th><th>KL in nats</th></tr>
{% for row in c.quality %}
<tr><td>{{ row.dataset }}</td><td>{{ row.task }}</td><td>{{ row.policy }}</td>
<td class="n">{{ row.n }}</td><td>{{ row.metric }}</td><td class="n">{{ "%.3f" % row.score }}</td>
<td class="n">{{ "%.3f" % row.ci_low }} to {{ "%.3f" % row.ci_high }}</td>
<td class="n">{{ share(row.recomputed_fraction) }}</td><td class="n">{{ "%.2g" % row.kl }}</td></tr>
{% endfor %}
</table>
<h2>Self-test</h2>
<table>
<tr><th>check</th><th>what is compared with the model's own forward pass</th>
<th>relative error</th><th>verdict</th></tr>
{% for check in c.checks %}
<tr><td>{{ check.name }}</td><td>{{ check.meaning }}</td>
<td class="n">{{ "%.1e" % check.error }}</td>
<td>{{ "passed" if check.passed else "failed" }}</td></tr>
{% endfor %}
</table>
<h2>Made by</h2>
<p><code>{{ c.command }}</code>, {{ issued }} UTC</p>
<p>Fingerprint of the model: <code>{{ c.fingerprint }}</code></p>
<p>It holds for {% for name, value in c.conditions.items() -%}
{{ name }} {{ shown(value) }}{{ ", " if not loop.last }}{% endfor %}.</p>
<p>{% for name, value in c.machine.items() -%}
{{ name }} {{ value }}{{ ", " if not loop.last }}{% endfor %};
{% for name, value in c.versions.items() -%}
{{ name }} {{ value }}{{ ", " if not loop.last }}{% endfor %}</p>
</body>
</html>
"""


def certificate_page(certificate: Certificate) -> str:
    """Return the page. Raises InvalidRequestError without matplotlib."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_PAGE).render(
        c=certificate,
        verdict="Certified" if certificate.passed else "Not certified",
        share=lambda value: f"{100 * value:.1f}%",
        shown=json.dumps,
        issued=time.strftime("%Y-%m-%d %H:%M", time.gmtime(certificate.issued_at)),
        agreement=_agreement_plot(certificate),
        scores=_score_plot(certificate),
    )


def _agreement_plot(certificate: Certificate) -> Markup:
    """Draw the agreement by task with its intervals, and the target."""
    names = list(certificate.tasks)
    tasks = [certificate.tasks[name] for name in names]
    figure = empty_figure(7.5, 0.8 + 0.35 * len(names))
    axes = figure.subplots()
    shares = [each.agreement for each in tasks]
    reach = [
        [each.agreement - each.ci_low for each in tasks],
        [each.ci_high - each.agreement for each in tasks],
    ]
    axes.errorbar(shares, range(len(names)), xerr=reach, fmt="o", capsize=3)
    axes.axvline(
        certificate.target, linestyle="--", color="tab:red", label=f"target {certificate.target:g}"
    )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(
        xlabel="share of answers that agree",
        xlim=(min(0.5, *(each.ci_low for each in tasks)) - 0.02, 1.01),
    )
    axes.legend(loc="lower left")
    return _svg(figure)


def _score_plot(certificate: Certificate) -> Markup:
    """Draw the scores of the policy next to those of the full computation, by task."""
    policies = list(dict.fromkeys(row["policy"] for row in certificate.quality))
    tasks = list(dict.fromkeys(f"{row['dataset']}: {row['task']}" for row in certificate.quality))
    figure = empty_figure(7.5, 0.8 + 0.5 * len(tasks))
    axes = figure.subplots()
    for index, policy in enumerate(policies):
        rows = {
            f"{row['dataset']}: {row['task']}": row
            for row in certificate.quality
            if row["policy"] == policy
        }
        at = [tasks.index(task) + 0.25 * (index - (len(policies) - 1) / 2) for task in rows]
        scores = [row["score"] for row in rows.values()]
        reach = [
            [row["score"] - row["ci_low"] for row in rows.values()],
            [row["ci_high"] - row["score"] for row in rows.values()],
        ]
        axes.errorbar(scores, at, xerr=reach, fmt="o", capsize=3, label=policy)
    axes.set_yticks(range(len(tasks)), tasks)
    axes.invert_yaxis()
    axes.set(xlabel="score, by the metric of each task")
    axes.legend(loc="lower left")
    return _svg(figure)


def _svg(figure: Any) -> Markup:
    """Return a matplotlib figure as an element of HTML; equal figures give equal text."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return Markup(text[text.index("<svg") :])
