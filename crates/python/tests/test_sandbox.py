"""Sandboxes: what a call gives, what it leaves, and how far back one can go."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import afresh
import pytest


def test_a_result_has_value_text_and_output(sb: afresh.Sandbox) -> None:
    r = sb.run_code("console.log('out', [1, {a: 'b'}]); console.error('err'); ({a: 1})")
    assert r.value == {"a": 1}
    assert r.text == "{ a: 1 }"
    assert r.stdout == 'out [ 1, { a: "b" } ]\n'
    assert r.stderr == "err\n"
    assert r.error is None
    assert not r.truncated
    assert r.us > 0
    assert r.dirty_pages is not None
    assert r.dirty_pages > 0
    assert "<pre>" in r._repr_html_()


def test_an_exception_is_in_the_result_with_its_traceback(sb: afresh.Sandbox) -> None:
    r = sb.run_code("function inner() { null.x }\ninner()", name="program.js")
    assert isinstance(r.error, afresh.ProgramError)
    assert r.error.name == "TypeError"
    assert "null" in r.error.message
    assert r.error.traceback is not None
    assert "inner" in r.error.traceback
    assert "program.js:1" in r.error.traceback
    with pytest.raises(afresh.ProgramError):
        r.unwrap()
    assert sb.eval("1 + 1") == 2


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("1 +", "SyntaxError"),
        ("throw 7", "Error"),
        ("nothing", "ReferenceError"),
        ("await new Promise(() => 0)", "DeadlockError"),
    ],
)
def test_errors_of_every_kind_have_names(sb: afresh.Sandbox, code: str, name: str) -> None:
    error = sb.run_code(code).error
    assert isinstance(error, afresh.ProgramError)
    assert error.name == name


def test_promises_are_waited_for(sb: afresh.Sandbox) -> None:
    assert sb.eval("const x = await Promise.resolve(20); x + 1") == 21
    assert sb.eval("(async () => x * 2)()") == 40
    error = sb.run_code("await Promise.reject(new RangeError('no'))").error
    assert isinstance(error, afresh.ProgramError)
    assert error.name == "RangeError"


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("const a = 1; let b = 2; class C { f() { return a + b } }\nnew C().f()", 3),
        ("let b, a = 5; class C extends Array { g() { return `${{a}.a}` } }\n[b, new C().g()]", [None, "5"]),
        ("const {a, r: [b]} = {a: 6, r: [7]}; const s = /[/'] const '/.test(''); [a, b, s]", [6, 7, False]),
        ("let a\nlet b\n[a, b].length", 2),
        ("const a = await Promise.resolve(8); { const b = 9 } a", 8),
        ("function a() { const b = 1; return b }\na()", 1),
    ],
)
def test_scripts_may_declare_names_again(sb: afresh.Sandbox, code: str, value: object) -> None:
    sb.run_code("const a = 1; let b = 2; class C {}; const r = 3").unwrap()
    for _ in range(2):
        assert sb.run_code(code).unwrap() == value


def test_a_name_without_an_initial_value_is_undefined(sb: afresh.Sandbox) -> None:
    assert sb.eval("let x = 1; x") == 1
    assert sb.run_code("let x; x").unwrap() is None
    assert sb.run_code("let x = {").error is not None


def test_rejected_promises_without_a_handler_are_reported(sb: afresh.Sandbox) -> None:
    r = sb.run_code("Promise.reject(new TypeError('lost')); (async () => { throw 7 })(); 1")
    assert r.value == 1
    assert "Uncaught (in promise) TypeError: lost" in r.stderr
    assert "Uncaught (in promise) 7\n" in r.stderr
    for handled in ("Promise.reject(new Error('x')).catch(() => 2)", "Promise.reject(new Error('y'))", "3"):
        assert not sb.run_code(handled).stderr
    many = "await Promise.allSettled(Array.from({length: 150}, async () => { throw 1 })); 2"
    assert not sb.run_code(many).stderr


def test_source_with_a_nul_is_refused_by_its_cause(sb: afresh.Sandbox) -> None:
    error = sb.run_code("'a\0b'").error
    assert isinstance(error, afresh.ProgramError)
    assert error.name == "SyntaxError"
    assert "U+0000" in error.message
    assert sb.eval("'a\\0b'.length") == 3


def test_calls_continue_from_one_another_and_a_rollback_undoes_them(sb: afresh.Sandbox) -> None:
    sb.run_code("let count = 1; const list = []")
    first = sb.checkpoint("first")
    sb.run_code("count = 2; for (let i = 0; i < 100000; i++) list.push({i})")
    sb.checkpoint("second")
    assert sb.rollback(first) == first
    assert sb.eval("[count, list.length]") == [1, 0]
    sb.rollback("second")
    assert sb.eval("[count, list.length]") == [2, 100000]
    assert sb.at == sb.tree()["second"].checkpoint
    sb.drop(first)
    with pytest.raises(afresh.SessionError, match="first"):
        sb.rollback("first")
    assert sb.eval("count") == 2


def test_every_call_of_a_warm_guest_starts_pristine(js: afresh.Warm) -> None:
    js.run_code("globalThis.secret = 'planted'; Array.prototype.map = null")
    assert js.eval("[typeof secret, [1].map(x => x)]") == ["undefined", [1]]


def test_forks_share_the_past_and_no_random_number(js: afresh.Warm) -> None:
    with js.sandbox() as sb:
        sb.run_code("const past = 'shared'; let own = 0")
        forks = sb.fork(50)
        assert {fork.eval("past") for fork in forks} == {"shared"}
        for at, fork in enumerate(forks):
            fork.run_code(f"own = {at}")
        assert [fork.eval("own") for fork in forks] == list(range(50))
        assert sb.eval("own") == 0
        drawn = {fork.eval("Math.random()") for fork in forks}
        assert len(drawn) == 50
        child = forks[7].fork()[0]
    # Forks continue when their parent is closed.
    assert child.eval("own") == 7


def test_the_tree_the_difference_and_their_pictures(sb: afresh.Sandbox) -> None:
    one = sb.checkpoint("one")
    sb.run_code("globalThis.big = new Uint8Array(1 << 20).fill(1)")
    two = sb.checkpoint("two <b>")
    difference = sb.diff(one, two)
    assert difference.pages >= 256
    assert difference.bytes >= 1 << 20
    assert sum(count for _, _, count in difference.runs) == difference.pages
    assert "<svg" in difference._repr_html_()
    assert not sb.diff(two, two)
    tree = sb.tree()
    assert [state.name for state in tree][1:] == ["one", "two <b>"]
    assert tree["two <b>"].is_here
    assert tree["two <b>"].parent == one
    assert "two &lt;b&gt;" in tree._repr_html_()
    assert "← here" in str(tree)


def test_a_time_limit_ends_a_call_and_a_rollback_heals(js: afresh.Warm) -> None:
    with js.sandbox(timeout=2) as sb:
        clean = sb.checkpoint("clean")
        r = sb.run_code("console.log('begun'); for (;;);")
        assert isinstance(r.error, TimeoutError)
        assert isinstance(r.error, afresh.TimeLimitError)
        assert r.stdout == "begun\n"
        assert sb.failed
        with pytest.raises(afresh.SessionError, match="roll it back"):
            sb.run_code("1")
        sb.rollback(clean)
        assert sb.eval("1") == 1
        assert sb.failed is None


def test_a_trap_is_an_error_with_its_cause(sb: afresh.Sandbox) -> None:
    clean = sb.checkpoint("clean")
    error = sb.run_code("const deeper = () => deeper() + 1; deeper()").error
    assert isinstance(error, afresh.GuestError)
    assert "stack" in str(error)
    assert error.__cause__ is not None
    sb.rollback(clean)
    assert sb.eval("1") == 1


def test_memory_ends_at_its_limit_and_the_program_may_continue(js: afresh.Warm) -> None:
    with js.sandbox(memory_limit="16MiB", timeout=60) as sb:
        error = sb.run_code("globalThis.kept = []; for (;;) kept.push(new Uint8Array(1 << 20).fill(1))").error
        assert error is not None
        assert "memory" in str(error)
        assert sb.eval("kept.length") < 16
    with js.sandbox(memory_limit="64MiB", timeout=60) as sb:
        assert sb.eval("new Uint8Array(20 << 20).length") == 20 << 20


def test_output_ends_at_its_limit(js: afresh.Warm) -> None:
    with js.sandbox(output_limit=1000) as sb:
        r = sb.run_code("for (let i = 0; i < 1000; i++) console.log('x'.repeat(99))")
        assert len(r.stdout) == 1000
        assert r.truncated
        assert r.error is None
        assert not sb.run_code("console.log('y')").truncated


def test_output_streams_while_the_program_runs(sb: afresh.Sandbox) -> None:
    heard: list[tuple[str, str]] = []
    r = sb.run_code("console.log('one'); console.warn('two'); 3", on_output=lambda *said: heard.append(said))
    assert heard == [("stdout", "one\n"), ("stderr", "two\n")]
    assert r.stdout == "one\n"


def test_an_exception_of_a_listener_is_raised_and_the_sandbox_heals(sb: afresh.Sandbox) -> None:
    clean = sb.checkpoint("clean")

    def listen(stream: str, text: str) -> None:
        raise ValueError(stream + text)

    with pytest.raises(ValueError, match="stdoutone"):
        sb.run_code("console.log('one')", on_output=listen)
    sb.rollback(clean)
    assert sb.eval("1") == 1


def test_a_setup_that_throws_says_what() -> None:
    with pytest.raises(afresh.ProgramError, match="no such luck"):
        afresh.warm("js", setup="throw new Error('no such luck')")


def test_a_failed_open_reports_why(tmp_path: Path) -> None:
    with pytest.raises(afresh.OpenError, match="nowhere"):
        afresh.warm(tmp_path / "nowhere.wasm")
    broken = tmp_path / "broken.wasm"
    broken.write_bytes(b"\0asm\1\0\0\0broken")
    with pytest.raises(afresh.OpenError) as raised:
        afresh.warm(broken)
    assert raised.value.__cause__ is not None


def test_a_warm_guest_and_a_sandbox_are_saved_and_opened_again(tmp_path: Path) -> None:
    warm = afresh.warm("js", setup="globalThis.x = 1")
    store = tmp_path / "store"
    warm.save(f"{store}@warm")
    again = afresh.load(f"{store}@warm")
    with again.sandbox() as sb:
        sb.run_code("x += 1; var more = 'kept'")
        sb.save(f"{store}@turn")
    with afresh.load(f"{store}@turn").sandbox() as sb:
        assert sb.eval("[x, more]") == [2, "kept"]
    assert again.eval("x") == 1
    with pytest.raises(ValueError, match="is no Linux program"):
        afresh.load(f"{store}@warm", net=["api.test:443"])


def test_guests_that_are_no_interpreters_are_called_with_bytes(js: afresh.Warm) -> None:
    request = afresh._native.encode([0, [], "6 * 7", "x", []])
    assert afresh._native.decode(js.call("evaluate", request)) == [0, 42, None]
    with js.sandbox() as sb:
        assert afresh._native.decode(sb.call("evaluate", request)) == [0, 42, None]
        with pytest.raises(afresh.GuestError, match="nothing_like_it"):
            sb.call("nothing_like_it")
        assert sb.eval("1") == 1


def test_a_closed_sandbox_says_so(js: afresh.Warm) -> None:
    sb = js.sandbox()
    sb.close()
    sb.close()
    with pytest.raises(afresh.SessionError, match="closed"):
        sb.run_code("1")


def until(holds: threading.Event) -> None:
    assert holds.wait(60)


def test_two_calls_at_once_are_refused_and_a_call_is_stopped_from_elsewhere(js: afresh.Warm) -> None:
    begun = threading.Event()
    with js.sandbox() as sb:
        clean = sb.checkpoint("clean")
        found: list[afresh.Result] = []
        thread = threading.Thread(
            target=lambda: found.append(
                sb.run_code("console.log('begun'); for (;;);", on_output=lambda *_: begun.set())
            )
        )
        thread.start()
        until(begun)
        with pytest.raises(afresh.BusyError, match="another call"):
            sb.run_code("1")
        sb.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(found[0].error, afresh.StoppedError)
        sb.rollback(clean)
        assert sb.eval("1") == 1


def test_threads_run_guests_at_the_same_time(js: afresh.Warm) -> None:
    with js.sandbox() as parent:
        forks = parent.fork(8)
        results: list[int] = []
        work = "let sum = 0; for (let i = 0; i < 100000; i++) sum += i; sum"
        threads = [threading.Thread(target=lambda fork=fork: results.append(fork.eval(work))) for fork in forks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert results == [4999950000] * 8


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def alarm() -> object:
    """Has the main thread interrupted shortly."""
    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_of_the_keyboard_ends_a_guest(js: afresh.Warm, alarm: object) -> None:
    assert callable(alarm)
    with js.sandbox() as sb:
        clean = sb.checkpoint("clean")
        alarm()
        with pytest.raises(KeyboardInterrupt):
            sb.run_code("for (;;);")
        sb.rollback(clean)
        assert sb.eval("1") == 1
    alarm()
    with pytest.raises(KeyboardInterrupt):
        js.run_code("for (;;);")
    assert js.eval("1") == 1
    alarm()
    with pytest.raises(KeyboardInterrupt):
        afresh.warm("js", setup="for (;;);")


def test_a_signal_whose_handler_returns_ends_nothing(js: afresh.Warm) -> None:
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGALRM, hear)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with js.sandbox(timeout=60) as sb:
            deadline = time.monotonic() + 60
            while not heard and time.monotonic() < deadline:
                assert (
                    sb.eval("(() => { let s = 0; for (let i = 0; i < 1000000; i++) s += i; return s })()")
                    == 499999500000
                )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard == [signal.SIGALRM]


def test_a_language_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFRESH_PYTHON", raising=False)
    monkeypatch.setattr("afresh._languages._PYTHON_VERSION", "0.0.0")
    with pytest.raises(afresh.OpenError, match=r"pip install 'afresh\[python\]'"):
        afresh.warm("python")


def test_a_signal_handler_may_close_the_sandbox_that_it_interrupts(alone: Callable[[str], str]) -> None:
    shown = alone("""
        import afresh, signal, time
        def waits(): time.sleep(0.2); time.sleep(0.2)
        js = afresh.warm("js")
        for code in ["for (;;);", "for (;;) waits()"]:
            sb = js.sandbox(tools=[waits])
            signal.signal(signal.SIGALRM, lambda *_: sb.close())
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            error = sb.run_code(code).error
            assert isinstance(error, afresh.StoppedError), error
            try:
                sb.eval("1")
            except afresh.SessionError as error:
                print(error)
    """)
    assert shown == "this sandbox is closed\n" * 2
