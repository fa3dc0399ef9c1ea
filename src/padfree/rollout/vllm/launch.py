"""Servers that a run starts itself: their command line, and a thread that starts again what has ended or hangs.

    rollout.launch.command   python -m vllm.entrypoints.openai.api_server --enforce-eager
    rollout.launch.devices   "0", "1"                            one server for each entry
      -> server 0            ... --model M --port 40117 --weight-transfer-config ...    CUDA_VISIBLE_DEVICES=0
      -> server 1            ...

What a run needs of a server is added to the command, unless the command says it already. The output of server 0 goes to
`servers/0.log` in the run folder. Each server has a keeper (`keeper`), which ends it when the run is gone.

A server that ends, or does not answer a probe within PROBE seconds, is started again, after 1, 2, 4, ... up to
LONGEST_PAUSE seconds. It comes back without the run's weights, and gets them with the next exchange.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from padfree.config import Config
from padfree.errors import UserError
from padfree.rollout.vllm.http import Server, ServerLostError

KEEPER = Path(__file__).with_name("keeper.py")
EVERY, PROBE, LONGEST_PAUSE, GRACE = 1.0, 30.0, 60.0, 15.0
"""Seconds."""
FRUITLESS = 3
"""So many starts of a server may end before it has answered once."""

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME")


def server_command(config: Config, *, name: str, port: int, adapted: Sequence[str] = ()) -> list[str]:
    """The words of the command, and what the run needs behind them. `adapted`: the modules that have adapters.

    vLLM would make room for an adapter of the head, too, and such a head cannot score the canary's prompts on the CPU.
    """
    words = list(config.rollout.launch.command)
    model = Path(config.model.path)
    path = str(model.parent) if model.is_file() else config.model.path
    random = config.model.init == "random" or model.is_file()
    wanted: list[tuple[str, ...]] = [
        ("--model", path),
        ("--served-model-name", name),
        ("--host", "127.0.0.1"),
        ("--port", str(port)),
        ("--dtype", config.model.dtype),
        ("--weight-transfer-config", '{"backend": "padfree"}'),
        ("--logprobs-mode", "processed_logprobs"),
        ("--generation-config", "vllm"),
    ]
    if config.model.tokenizer is not None:
        wanted.append(("--tokenizer", config.model.tokenizer))
    if random:
        wanted.append(("--load-format", "dummy"))  # all weights come from the trainer
    if config.model.trust_remote_code:
        wanted.append(("--trust-remote-code",))
    if config.lora.rank:
        wanted += [("--enable-lora",), ("--max-lora-rank", str(lora_rank(config.lora.rank)))]
    if adapted:
        wanted.append(("--lora-target-modules", *adapted))
    said = {word.partition("=")[0] for word in words if word.startswith("--")}
    return [*words, *(word for flag in wanted if flag[0] not in said for word in flag)]


def lora_rank(rank: int) -> int:
    """The smallest of the ranks that vLLM makes room for."""
    return next((room for room in (1, 8, 16, 32, 64, 128, 256, 320, 512) if room >= rank), rank)


def server_environment(config: Config, devices: str) -> dict[str, str]:
    """This process's, without what torchrun says to it, and with the devices of the server."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_TORCHRUN and not name.startswith(("LOCAL_", "TORCHELASTIC_"))
    }
    return {
        **kept,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "CUDA_VISIBLE_DEVICES": "" if devices == "cpu" else devices,
        **config.rollout.launch.environment,
    }


class Launched:
    """One server that this process has started, and starts again."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, server: Server) -> None:
        self.server, self.log, self.starts = server, log, 0
        self._command, self._environment = list(command), dict(environment)
        self._keeper: subprocess.Popen[bytes] | None = None
        self._answered = False
        self._fruitless = 0
        self._not_before = 0.0

    def look(self) -> str | None:
        """Start it if it is not there, end it if it hangs; a line if there is no hope."""
        now = time.monotonic()
        if self._keeper is not None and self._keeper.poll() is not None:
            ended = self._keeper.returncode
            self.sign_off()  # the pipe is ours to close
            self._keeper = None
            self._fruitless = 0 if self._answered else self._fruitless + 1
            if self._fruitless >= FRUITLESS:
                return (
                    f"rollout.launch: {self.server.url} ended with status {ended} before it answered, {FRUITLESS} "
                    f"times ({self._last_line()}); correct rollout.launch.command, its output is in {self.log}"
                )
            self._not_before = now + min(2.0 ** min(self.starts - 1, 6), LONGEST_PAUSE)
        if self._keeper is None:
            if now >= self._not_before:
                self._start()
        elif self._answered or self.ready():
            try:
                self.server.version(timeout=PROBE)
            except ServerLostError:
                if self._keeper.poll() is None:
                    self.end()  # it hangs; its start is the next look's
            except UserError:
                pass  # it answers, and whoever asks it for something says what is wrong
        return None

    def ready(self) -> bool:
        """Whether it answers, now that it runs."""
        with suppress(ServerLostError, UserError):
            self.server.call("GET", "/health", timeout=PROBE)
            self._answered = True
        return self._answered

    def sign_off(self) -> None:
        """Tell the keeper to end the server, and do not wait for it."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()

    def end(self) -> None:
        self.sign_off()
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        try:
            keeper.wait(GRACE)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()

    def _start(self) -> None:
        self.starts += 1
        self._answered = False
        with self.log.open("ab") as output:
            output.write(f"start {self.starts}: {' '.join(self._command)}\n".encode())
            output.flush()
            self._keeper = subprocess.Popen(
                [sys.executable, str(KEEPER), *self._command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def _last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        wrong = [line for line in lines if "Error" in line or "error:" in line]
        return " ".join((wrong or lines or [""])[-1].split())[-200:]


class Launcher(threading.Thread):
    """All servers of a run, watched by this thread until `close`."""

    def __init__(self, config: Config, adapted: Sequence[str] = ()) -> None:
        super().__init__(name="servers", daemon=True)
        folder = Path(config.run.folder) / "servers"
        folder.mkdir(parents=True, exist_ok=True)
        self.name_of_model = f"padfree-{secrets.token_hex(4)}"  # no other server that happens to be there has it
        self.launched: list[Launched] = []
        entries = config.rollout.launch.devices
        for number, (devices, port) in enumerate(zip(entries, _free_ports(len(entries)), strict=True)):
            command = server_command(config, name=self.name_of_model, port=port, adapted=adapted)
            server = Server(f"http://127.0.0.1:{port}", config.rollout.timeout)
            environment = server_environment(config, devices)
            self.launched.append(Launched(command, environment, folder / f"{number}.log", server))
        self.hopeless: str | None = None
        self._closed = threading.Event()
        self._looking = threading.Lock()

    @property
    def servers(self) -> list[Server]:
        return [one.server for one in self.launched]

    @property
    def restarts(self) -> int:
        return sum(one.starts - 1 for one in self.launched)

    def run(self) -> None:
        while not self._closed.is_set():
            for one in self.launched:
                with self._looking:
                    if not self._closed.is_set():
                        self.hopeless = self.hopeless or self._look(one)
            self._closed.wait(EVERY)

    def _look(self, one: Launched) -> str | None:
        """A line if there is no hope: whatever goes wrong here, somebody waits for the server."""
        try:
            return one.look()
        except OSError as error:  # no more processes, a full disk
            return (
                f"rollout.launch: {one.server.url} cannot be started ({error}); make room for it, its output would be "
                f"in {one.log}"
            )
        except Exception as error:
            return f"rollout.launch: {one.server.url} cannot be watched ({error!r}); please report this"

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """A block in which no server is probed: one that loads weights answers late."""
        with self._looking:
            yield

    def await_ready(self, seconds: float) -> None:
        """Until all answer."""
        deadline = time.monotonic() + seconds
        while True:
            if self.hopeless is not None:
                raise UserError.of(self.hopeless)
            missing = [one for one in self.launched if not one._answered]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise UserError(
                    "rollout.launch",
                    f"{missing[0].server.url} did not answer within {seconds:g} s",
                    f"raise rollout.timeout, or see its output in {missing[0].log}",
                )
            time.sleep(0.1)

    def close(self) -> None:
        self._closed.set()
        with self._looking:
            for one in self.launched:
                one.sign_off()
            for one in self.launched:
                one.end()
        if self.is_alive():
            self.join()


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
