"""The live page: a recording, or a model and typed text, served to a browser on this machine."""

import errno
import secrets
import signal
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from types import TracebackType
from typing import Any

import uvicorn

from regard.errors import ConfigError, RegardError
from regard.malloc import trim_heap
from regard.observe import Recording
from regard.observe.attribution import Attribution
from regard.observe.classification.head_scores import HeadOptions, UserScore
from regard.show.page.head_pictures import load_passes
from regard.show.page.image_entry import make_entry
from regard.show.page.image_pulls import UNNAMED
from regard.show.page.model_adapter import adapt_model
from regard.show.page.routes import PageRoutes, make_application
from regard.show.page.security import HEAD_BYTES, is_loopback
from regard.show.page.session import Session, list_examples
from regard.show.page.startup_loading import StartupLoading
from regard.show.page.timeouts import TimeoutProtocol

PATIENCE_SECONDS = 1.0  # for the models, before the page is served without them
FAILURE_SECONDS = 2.0  # for the error of loading to be shown on the page, which asks twice a second, before the server stops


class UvicornServer(uvicorn.Server):
    """uvicorn's server, which calls `ready` once it listens, and does not re-raise Ctrl-C and SIGTERM after shutdown."""

    ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, and cancel the active requests."""
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle both signals in a context, in the main thread only, where they arrive."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


class Server:
    """A page that is being served: it has an address, and stops by a signal, by `stop`, or at the end of a with statement."""

    def __init__(self, session: Session, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = bind_socket(host, port)
        own = is_loopback(host) and is_loopback(self._socket.getsockname()[0])  # localhost is what /etc/hosts says it is
        self.token = None if own else secrets.token_urlsafe(16)
        self.page = PageRoutes(session)
        config = uvicorn.Config(
            make_application(self.page, self.token),
            http=TimeoutProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # uvicorn's own log; the sender of a refused request gets the reason
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=2,
        )
        self._server = UvicornServer(config)
        self._loading: StartupLoading | None = None
        self._thread: threading.Thread | None = None
        shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}/" + (f"?token={self.token}" if self.token else "")

    def load_models(self, loading: StartupLoading, use: Callable[[Sequence[Any]], None]) -> None:
        """Load models and pass them to `use`, in a thread if it takes long. Raises the error of loading, later `run` does."""
        self._loading, self.page.session.loading = loading, loading.describe
        loading.start(use, self.end_loading)
        loading.wait(PATIENCE_SECONDS)

    def end_loading(self) -> None:
        """Show the page, now that the models are loaded; stop the server if that failed, once the page could show it."""
        try:
            self.check_loading()
            self.page.session.loading = None
        except BaseException:  # raised by load_models or run
            if self._server.started:
                time.sleep(FAILURE_SECONDS)
            self._server.should_exit = True

    def check_loading(self) -> None:
        """Raise the error of loading, if there was one."""
        if self._loading is not None:
            self._loading.wait(0)

    def announce(self, open_browser: bool = False) -> None:
        """Print the address, and open it in a browser if `open_browser`."""
        print(f"{self.address}\nPress Ctrl-C to stop.", flush=True)
        threading.Thread(target=self.prepare_opening, name="regard-opening", daemon=False).start()
        if open_browser:  # a browser in the terminal blocks its thread until it is closed
            threading.Thread(target=self.open_address, name="regard-browser", daemon=True).start()

    def prepare_opening(self) -> None:
        """Compute what the page opens on until the server stops; what is wrong is said when a visitor asks."""
        with suppress(InterruptedError, RegardError):
            while self._loading is not None and self._loading.is_running():
                self.check_running()
                time.sleep(0.1)
            self.page.session.prepare_opening(self.check_running)
            trim_heap()

    def check_running(self) -> None:
        """Raise InterruptedError once the server stops."""
        if self._server.should_exit:
            raise InterruptedError

    def open_address(self) -> None:
        """Open the address in a browser."""
        if not webbrowser.open(self.address):
            print("No browser could be opened; open the address above.", flush=True)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C, or until the process receives SIGTERM; `ready` is called once the server listens.

        Raises the error of loading the models, if they are loaded meanwhile.
        """
        self._server.ready = ready
        # a daemon, the default if the current thread is one, would abort the process when stopped inside torch
        threading.Thread(target=preload_modules, name="regard-warm", daemon=False).start()
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.page.executor.close()
        self.check_loading()

    def start(self) -> "Server":
        """Serve in a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="regard-server", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.01)
        return self

    def stop(self) -> None:
        """Stop the thread, and cancel the active requests."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def preload_modules() -> None:
    """Load what takes a second the first time, while the browser starts."""
    list_examples()
    load_passes()


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket to an address. Raises ConfigError where that fails."""
    with ExitStack() as undo:
        try:
            wanted = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP, "flags": socket.AI_PASSIVE}
            (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, **wanted)
            found = undo.enter_context(socket.socket(family, kind, protocol))  # asyncio then sets TCP_NODELAY
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except (OSError, OverflowError) as error:
            shown = f"{host or 'any address'}, port {port},"
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise ConfigError(
                    f"{shown} is in use by another program: choose another port, or leave it out to use a free one."
                ) from None
            raise ConfigError(f"{shown} cannot be used: {getattr(error, 'strerror', None) or error}.") from None
        undo.pop_all()
        return found


def make_server(
    subject: Any = None,
    *,
    text: str | None = None,
    adapter: Any = None,
    host: str = "127.0.0.1",
    port: int = 0,
    scores: Sequence[UserScore] = (),
    others: Sequence[Any] = (),
    loading: StartupLoading | None = None,
    image: Any = None,
    attribution: Attribution | None = None,
    number: str = UNNAMED,
) -> Server:
    """Make the server of a recording, of a model, or of both; the model reads `text` first where it is given.

    others are more models, among which the page has a choice; `loading` loads all of them, while the page says how far it is.
    scores are functions of an AttentionMap that the table of the heads shows beside its own, as regard.heads takes them.
    image, attribution and number are of the recording, as regard.page takes them.
    Runs by run(), until a signal ends it, or in a thread of its own, in a with statement. Raises ConfigError without recording
    and model, and for a score that is not a function with a docstring.
    """
    recording = subject if isinstance(subject, Recording) else None
    model = adapter if recording is not None or subject is None else subject
    if recording is None and model is None and loading is None:
        raise ConfigError("a page needs a recording or a model: give one of them.")
    if recording is None and (image is not None or attribution is not None):
        raise ConfigError("image and attribution are shown beside a recording: pass one, made with regard.record(model).")
    HeadOptions(scores=scores).check()
    shown = None if recording is None else make_entry(recording, scores, image, attribution, number)
    session = Session(shown, version=version("regard"), scores=scores)

    def use_models(models: Sequence[Any]) -> None:
        session.add_models([adapt_model(one) for one in models])
        if text is not None:
            session.run_text(text, lambda: None)

    if loading is None:
        use_models([one for one in (model, *others) if one is not None])
    server = Server(session, host, port)
    if loading is not None:
        try:
            server.load_models(loading, use_models)
        except BaseException:
            server.stop()
            raise
    return server
