"""Threads that a recorded forward starts: attention that they run is reported, since no call of it can be placed."""

import threading
from typing import Any

from torch.overrides import TorchFunctionMode

from regard.observe.interception.attention_call import MissedCall
from regard.observe.interception.functions.function_wrappers import classify_function
from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.thread_state import OPEN_ENTRIES, STATE, THREAD, Watcher, find_name


class ThreadReportMode(TorchFunctionMode):
    """A torch function mode for a started thread, which reports its attention kernels to the watchers that are still open."""

    def __init__(self, watchers: list[tuple[Watcher, str]]) -> None:
        self.watchers = watchers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrapper, name, kernel, _ = classify_function(func)
        if (wrapper is not None or kernel) and not STATE.is_in_unwatched:  # a module that runs there was reported already
            for watcher, module in self.watchers:
                if any(entry.watcher is watcher for entry in OPEN_ENTRIES.copy()):
                    watcher.report_missed(MissedCall(name, module, THREAD))
        return func(*args, **(kwargs or {}))


def build_patches() -> list[AttributePatch]:
    """Return the attribute patch for `threading.Thread.start`."""
    start = vars(threading.Thread)["start"]

    def start_thread(self: threading.Thread) -> None:
        if STATE.is_active and STATE.frames:
            names = [(watcher, find_name(watcher)) for watcher in STATE.watchers]
            known = [(watcher, name) for watcher, name in names if name is not None]
            run = self.run

            def run_reporting() -> None:
                with ThreadReportMode(known):
                    run()

            if known:
                self.run = run_reporting  # type: ignore[method-assign]
        start(self)

    return [(threading.Thread, "start", start_thread)]
