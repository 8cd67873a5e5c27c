"""Templates that an unmodified E2B client builds over the API."""

import pathlib

from e2b import Template
from e2b.exceptions import BuildException, SandboxException
from e2b.template.main import TemplateBuilder
from e2b_code_interpreter import Sandbox


def built(files: pathlib.Path) -> None:
    """Templates are built of another template: their steps, tags and start command; and a failed build says why."""
    (files / "app").mkdir()
    (files / "app/data.txt").write_text("of the context\n")
    (files / "note.txt").write_text("a note\n")

    def template() -> TemplateBuilder:
        return (
            Template(file_context_path=str(files))
            .from_template("linux")
            .set_envs({"STAGE": "built"})
            .copy("note.txt", "/opt/notes/")
            .copy("app", "/opt/app", mode=0o755)
            .set_workdir("/opt/app")
            .run_cmd("date +%s%N > drawn; echo $STAGE >> drawn; pwd >> drawn")
            .run_cmd('test "$(whoami)" = root && touch /opt/by-root', user="root")
            .run_cmd('test "$(whoami)" = user')
        )

    ready = template().set_start_cmd("sleep 1; touch /tmp/up; sleep 1000", "test -e /tmp/up")
    logs: list[str] = []
    Template.build(ready, "own", tags=["v1", "default"], on_build_logs=lambda entry: logs.append(entry.message))
    assert any("RUN date" in line for line in logs), logs
    drawn = []
    for name in ("own", "own:v1"):
        made = Sandbox.create(name, timeout=600)
        lines = made.commands.run("cat drawn").stdout.splitlines()
        drawn.append(lines[0])
        assert lines[1:] == ["built", "/opt/app"], lines
        assert made.files.read("/opt/notes/note.txt") == "a note\n"
        assert made.files.read("/opt/app/data.txt") == "of the context\n"
        assert made.commands.run("echo $STAGE; stat -c %a data.txt; ls /opt").stdout.split() == [
            "built", "755", "app", "by-root", "notes",
        ]  # fmt: skip
        assert any("sleep 1000" in " ".join(one.args) for one in made.commands.list())
        assert made.run_code("import os; os.environ['STAGE']").text == "built"
        made.kill()
    logs.clear()
    Template.build(template(), "other", on_build_logs=lambda entry: logs.append(entry.message))
    assert any("CACHED RUN date" in line for line in logs), logs
    made = Sandbox.create("other", timeout=600)
    assert made.files.read("/opt/app/drawn").splitlines()[0] == drawn[0] == drawn[1], "the step ran again"
    made.kill()
    assert Template.exists("own") and not Template.exists("none")
    Template.assign_tags("own:v1", ["stable"])
    assert {one.tag for one in Template.get_tags("own")} == {"default", "v1", "stable"}
    Template.remove_tags("own", ["v1"])
    shown: list[tuple[str, str]] = []
    for number, wrong in enumerate((
        lambda: Sandbox.create("own:v1"),
        lambda: Template.build(
            Template().from_template("linux").run_cmd("echo built; echo the cause >&2; exit 7"),
            "failing",
            on_build_logs=lambda entry: shown.append((entry.level, entry.message)),
        ),
        lambda: Template.build(Template().from_template("none"), "failing"),
        lambda: Template.build(Template().from_image("python:3.13"), "failing"),
        lambda: Template.build(Template().from_template("linux").set_user("nobody"), "failing"),
        lambda: Template.build(Template().from_template("linux").run_cmd("id", user="nobody"), "failing"),
        lambda: Template.build(Template().from_template("linux"), "script"),
        lambda: Template.build(Template().from_template("linux"), "many", cpu_count=2),
    )):
        try:
            wrong()
            raise AssertionError(f"request {number} was not refused")
        except (SandboxException, BuildException) as refused:
            assert any(why in str(refused) for why in WHY), refused
    assert not Template.exists("failing")
    assert ("info", "built") in shown and ("warn", "the cause") in shown, shown
    of_root = Template().from_template("linux").set_user("root").run_cmd("id -u > /opt/first")
    Template.build(of_root.set_start_cmd("id -u > /tmp/up; sleep 1000", "test -s /tmp/up"), "of-root")
    made = Sandbox.create("of-root", timeout=600)
    made.files.write("named", "in its home")
    shown = made.commands.run("id -u; cat /opt/first /tmp/up /root/named").stdout
    assert shown == "0\n0\n0\nin its home", shown
    assert made.commands.run("id -u", user="user").stdout == "1000\n"
    inner = Template().from_template("of-root").run_cmd("id -u > /opt/second").set_user("user")
    Template.build(inner, "of-user")
    of_user = Sandbox.create("of-user", timeout=600)
    assert of_user.commands.run("cat /opt/second; id -u").stdout == "0\n1000\n"
    for sandbox in (made, of_user):
        sandbox.kill()


WHY = ("own:v1", "exit code 7:\nthe cause", "`none`", "build-images", "nobody", "configuration", "cpuCount")
