"""An unmodified E2B client against our server, which the environment names."""

from e2b import SandboxQuery, SandboxState
from e2b.exceptions import AuthenticationException, FileNotFoundException, SandboxException
from e2b_code_interpreter import Sandbox


def main() -> None:
    sandbox = Sandbox.create("script", timeout=600, metadata={"who": "test"})
    assert sandbox.is_running()

    printed: list[str] = []
    execution = sandbox.run_code(
        "let x = 40; console.log('one'); console.log('two'); console.error('three'); ({ answer: x + 2 })",
        language="javascript",
        on_stdout=lambda message: printed.append(message.line),
    )
    assert printed == ["one\n", "two\n"], printed
    assert execution.logs.stderr == ["three\n"], execution.logs
    assert execution.error is None
    assert execution.text == "{ answer: 42 }", execution.text
    assert execution.results[0].json == {"answer": 42}
    assert execution.execution_count == 1

    failed = sandbox.run_code("null.nothing")
    assert failed.error is not None and failed.error.name == "TypeError", failed.error
    assert sandbox.run_code("x += 1").text == "41"

    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id and info.metadata == {"who": "test"}, info
    assert info.state == SandboxState.RUNNING
    sandbox.set_timeout(700)
    assert sandbox.get_info().end_at > info.end_at

    written = sandbox.files.write("notes/one.txt", "first")
    assert (written.name, written.path) == ("one.txt", "/home/user/notes/one.txt"), written
    assert sandbox.files.write("/data/bytes", bytes(range(256)) * 100).path == "/data/bytes"
    assert sandbox.files.read("notes/one.txt") == "first"
    assert sandbox.files.read("/data/bytes", format="bytes") == bytes(range(256)) * 100
    assert [found.name for found in sandbox.files.list("notes")] == ["one.txt"]
    assert sandbox.files.exists("notes") and not sandbox.files.exists("nothing")
    assert sandbox.files.make_dir("deep/er") and not sandbox.files.make_dir("deep")
    moved = sandbox.files.rename("notes/one.txt", "deep/two.txt")
    assert (moved.size, moved.path) == (5, "/home/user/deep/two.txt"), moved
    try:
        sandbox.files.read("notes/one.txt")
        raise AssertionError("a file that was moved is still there")
    except FileNotFoundException:
        pass
    sandbox.files.remove("/data")
    assert not sandbox.files.exists("/data/bytes")

    made = [Sandbox.create("script", timeout=600, metadata={"who": "a & b", "round": str(n)}) for n in range(3)]
    named = SandboxQuery(metadata={"who": "a & b"})
    for order in ("asc", "desc"):
        pages, listed = Sandbox.list(query=named, limit=2, order=order), []
        while pages.has_next:
            listed.append([found.sandbox_id for found in pages.next_items()])
        ids = [one.sandbox_id for one in (made if order == "asc" else made[::-1])]
        assert listed == [ids[:2], ids[2:]], (order, listed, ids)
    assert len(Sandbox.list(query=SandboxQuery(metadata={"who": "a & b", "round": "1"})).next_items()) == 1
    after = SandboxQuery(metadata={"who": "a & b"}, started_after=made[1].get_info().started_at)
    assert len(Sandbox.list(query=after).next_items()) == 2
    assert all(one.kill() for one in made)

    forks = sandbox.fork(count=3, timeout=600)
    for number, fork in enumerate(forks):
        assert isinstance(fork, Sandbox), fork
        assert fork.run_code(f"x += {number}").text == str(41 + number)
        fork.files.write("deep/two.txt", f"fork {number}")
        assert fork.files.read("deep/two.txt") == f"fork {number}"
    assert sandbox.run_code("x").text == "41"

    snapshot = sandbox.create_snapshot(name="kept")
    sandbox.run_code("x = 'changed'")
    again = Sandbox.create(snapshot.snapshot_id)
    assert again.run_code("x").text == "41"
    listed = Sandbox.list_snapshots()
    assert [found.snapshot_id for found in listed.next_items()] == [snapshot.snapshot_id]
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)

    assert again.pause()
    assert not again.pause()
    assert not again.is_running()
    paused = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    assert [found.sandbox_id for found in paused] == [again.sandbox_id]
    resumed = Sandbox.connect(again.sandbox_id, timeout=600)
    assert resumed.run_code("x + 1").text == "42"
    assert resumed.files.read("deep/two.txt") == "first"

    for live in [sandbox, resumed, *forks]:
        assert live.kill()
        assert not live.kill()
        assert not live.is_running()
    assert Sandbox.list().next_items() == []

    try:
        Sandbox.create("script", api_key="wrong")
        raise AssertionError("a wrong key was taken")
    except AuthenticationException:
        pass
    try:
        sandbox.run_code("1")
        raise AssertionError("a sandbox that was killed ran code")
    except SandboxException:
        pass
    print("all done")


main()
