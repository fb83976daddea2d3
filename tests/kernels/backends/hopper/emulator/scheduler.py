"""Deterministic scheduler of concurrent tasks: one runs at a time, in an order that a seed determines, so failures reproduce.

A task runs until it has to wait or is preempted at random, which draws a new priority for it. The ready task with the highest
priority runs next. Over many seeds each task falls far behind the others at some point (probabilistic concurrency testing,
Burckhardt et al. 2010). A hardware action, such as a copy in flight, is a task too (an event) and may be just as late.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PREEMPTION_RATE = 1 / 12  # probability that a task which can continue draws a new priority instead


class NoProgress(AssertionError):
    """No task can continue."""


class _Aborted(BaseException):
    """Ends a task after another one has failed."""


@dataclass(eq=False)
class Task:
    name: str
    context: Any  # what `Scheduler.context` returns while the task runs
    priority: float
    ready: Callable[[], bool]
    reason: str = ""
    action: Callable[[], None] | None = None  # of an event, which has no thread
    resume: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Scheduler:
    """Runs tasks, each in a thread, and events. max_switches bounds the number of scheduling decisions."""

    def __init__(self, seed: int, max_switches: int = 2_000_000) -> None:
        self.random = random.Random(seed)
        self.tasks: list[Task] = []
        self.threads: list[threading.Thread] = []
        self.current: Task | None = None
        self.failure: BaseException | None = None
        self.finished = threading.Event()
        self.switches_left = max_switches

    @property
    def context(self) -> Any:
        """The context of the running task."""
        assert self.current is not None
        return self.current.context

    def add(self, name: str, function: Callable[[], None], context: Any = None) -> None:
        """Add a task; it starts when it is scheduled."""
        task = self._register(Task(name, context, self.random.random(), _always_ready))
        self.threads.append(threading.Thread(target=self._run_task, args=(task, function), daemon=True))
        self.threads[-1].start()

    def add_event(self, name: str, action: Callable[[], None]) -> None:
        """Add an action that may happen at any later time."""
        self._register(Task(name, None, self.random.random(), _always_ready, action=action))

    def run(self) -> None:
        """Run until all tasks and events are done, including those added meanwhile."""
        self._guard(self._schedule)
        self.finished.wait()
        for thread in self.threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def wait(self, ready: Callable[[], bool], reason: str) -> None:
        """Block the running task until `ready` holds; `reason` describes it in error messages."""
        task = self.current
        assert task is not None
        if self.random.random() < PREEMPTION_RATE:
            task.priority = self.random.random()
        elif ready():
            return
        task.ready, task.reason = ready, reason
        if self._schedule() is not task:
            self._await_resume(task)

    def pause(self) -> None:
        """Allow other tasks to run first."""
        self.wait(_always_ready, "nothing")

    def _register(self, task: Task) -> Task:
        self.tasks.append(task)
        return task

    def _run_task(self, task: Task, function: Callable[[], None]) -> None:
        def run_to_end() -> None:
            self._await_resume(task)
            function()
            self.tasks.remove(task)
            self._schedule()

        self._guard(run_to_end)

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except _Aborted:
            pass
        except BaseException as failure:
            self._fail(failure)

    def _await_resume(self, task: Task) -> None:
        task.resume.acquire()
        if self.failure is not None:
            raise _Aborted

    def _schedule(self) -> Task | None:
        """Run events until a task is next; resume that task and return it."""
        previous = self.current
        while self.tasks:
            ready = [task for task in self.tasks if task.ready()]
            self.switches_left -= 1
            if not ready or self.switches_left < 0:
                problem = "all tasks wait" if not ready else "too many switches"
                waiting = "; ".join(f"{task.name} for {task.reason}" for task in self.tasks)
                self._fail(NoProgress(f"{problem}: {waiting}"))
                raise _Aborted
            task = max(ready, key=lambda task: task.priority)
            if task.action is not None:
                self.tasks.remove(task)
                task.action()
                continue
            self.current = task
            if task is not previous:
                task.resume.release()
            return task
        self.finished.set()
        return None

    def _fail(self, failure: BaseException) -> None:
        self.failure = self.failure or failure
        for task in self.tasks:
            task.resume.release()
        self.finished.set()


def _always_ready() -> bool:
    return True
