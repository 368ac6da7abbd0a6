"""Run `regard audit`.

Exit code 2 if the model, the text or a policy cannot be used.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text
from torch import Tensor

from regard.cli.input_text import read_text
from regard.cli.look import record_ids
from regard.cli.model_loading import CAUSAL_LM, TextModel, load_model
from regard.cli.output_files import check_figure, check_output_file, save_figure
from regard.cli.progress_bar import iterate_with_bar
from regard.errors import ConfigError
from regard.observe.text_table import align_in_blocks
from regard.policies import Policy, parse_policy
from regard.policies.policy import label_policies
from regard.policy_audit import Audit, Downstream, NeedleTask, audit, find_needles, make_needle_tasks, measure_downstream
from regard.policy_audit.needle_tasks import COMMON_WORDS, KINDS
from regard.policy_audit.recorded_inputs import find_prompt
from regard.show.terminal import escape_text, open_console, print_lines, print_wrapped

Counts = dict[str, dict[str, int]]
SHORT_NAMES = {"variable tracking": "variables", COMMON_WORDS: "words"}  # of kinds, so that a table fits 80 columns


def run(options: argparse.Namespace) -> int:
    """Record the model, measure every policy and print."""
    if options.tokens is not None and options.tokens < 2:
        raise ConfigError(f"--tokens must be at least 2, got {options.tokens}.")
    if options.worst < 0:
        raise ConfigError(f"--worst must be at least 0, got {options.worst}.")
    if options.needles < 0:
        raise ConfigError(f"--needles must be at least 0, got {options.needles}.")
    if options.certify < 1:
        raise ConfigError(f"--certify must be at least 1, got {options.certify}.")
    policies = [parse_policy(one) for one in options.policy]
    check_figure(options.figure)
    check_output_file("--page", options.page)
    text = read_text(options.text)
    foreign = load_model(options.model, CAUSAL_LM)
    ids, words, _ = foreign.tokens(text, options.tokens)
    tasks = make_needle_tasks(foreign, text, length=ids.shape[1], count=options.needles) if options.needles else []
    recording = record_ids(foreign, ids, words, "values")
    prompt = find_prompt(recording, options.prompt, ids.shape[1])
    if options.run and ids.shape[1] < prompt + 2:
        raise ConfigError(f"--run needs two tokens after the prompt of {prompt:,}, but the text has {ids.shape[1]:,}.")
    found = audit(
        recording,
        policies,
        prompt=prompt,
        certified_rows=options.certify,
        watch=lambda layers, count: iterate_with_bar("auditing layers", layers, count),
    )
    effects = run_with_policies(foreign, ids, policies, prompt) if options.run else []
    needles = count_needles(foreign, tasks, policies) if tasks else {}
    if options.figure:
        from regard.show.audit_figure import draw_recall_grids

        save_figure(draw_recall_grids(found), options.figure)
    if options.page:
        from regard.show.page.single_file import page

        page(found, options.page)
    if options.json:
        answer = {
            "prompt": prompt,
            "rows": found.to_dicts(),
            "certificate": found.certificate.to_dict(),
            "downstream": [one.to_dict() for one in effects],
            "needles": needles,
        }
        print(json.dumps(answer, allow_nan=False))
        return 0
    print_audit(foreign.name, found, effects, needles, options.worst)
    return 0


def run_with_policies(foreign: TextModel, ids: Tensor, policies: Sequence[Policy], prompt: int) -> list[Downstream]:
    """Run the model with each policy."""
    return measure_downstream(
        foreign.model, ids, policies, prompt=prompt, watch=lambda rows, count: iterate_with_bar("running policies", rows, count)
    )


def count_needles(foreign: TextModel, tasks: Sequence[NeedleTask], policies: Sequence[Policy]) -> Counts:
    """Count by kind the tasks that there are, that the complete model answers, and that it answers with each policy.

    A policy is only tried on those that the complete model answers.
    """
    found = find_needles(
        foreign.model, tasks, policies, lambda rows, count: iterate_with_bar("answering the tasks", rows, count)
    )
    labels = ["complete model", *label_policies(policies)]
    return {"tasks": count_kinds(tasks)} | {
        label: count_kinds(itertools.compress(tasks, answers)) for label, answers in zip(labels, found, strict=True)
    }


def count_kinds(tasks: Iterable[NeedleTask]) -> dict[str, int]:
    """Count the tasks of each kind."""
    counts = Counter(task.kind for task in tasks)
    return {kind: counts[kind] for kind in KINDS}


def print_audit(name: str, found: Audit, effects: Sequence[Downstream], needles: Counts, worst: int) -> None:
    """Print the tables of an audit, of the predictions and of the needles found with each policy, and the worst rows."""
    console = open_console()
    title, *_ = str(found).splitlines()
    print_wrapped(console, Text(f"{escape_text(name)}: {title}.", style="bold"))
    print_lines(console, map(Text, found.format_lines(console.width)))
    print_lines(console, [Text(), *map(Text, found.format_positions(console.width))])
    if effects:
        print_lines(console, [Text(), *map(Text, format_effects(effects, console.width))])
    if needles:
        print_lines(console, [Text(), *map(Text, format_needles(needles, console.width))])
    print_wrapped(console, Text("--help explains the columns", style="dim"))
    console.print()
    print_wrapped(console, Text(found.certificate.sentence))
    for n in range(len(found.policies) if worst else 0):
        console.print()
        for row in found.find_worst(worst, n):
            print_wrapped(console, Text(escape_text(row.sentence)), hang=2)


def format_needles(needles: Counts, width: int) -> list[str]:
    """Return how many tasks of each kind are answered as aligned lines of at most `width` columns."""
    titles = ["answered", *(SHORT_NAMES.get(kind, kind) for kind in KINDS)]
    lines = [[label, *(str(number) for number in counts.values())] for label, counts in needles.items()]
    return align_in_blocks(titles, lines, width)


def format_effects(effects: Sequence[Downstream], width: int) -> list[str]:
    """Return the predictions of the model with each policy as aligned lines of at most `width` columns."""
    titles = ["policy", "loss", "change", "KL", "same", "stream"]
    lines = [
        [
            one.policy,
            f"{one.loss:.4f}",
            f"{one.change:+.4f}",
            f"{one.kl:.4f}",
            f"{one.agreement:.1%}",
            f"{one.residual[-1]:.4f}" if one.residual else "-",
        ]
        for one in effects
    ]
    return align_in_blocks(titles, lines, width)
