"""An unmodified E2B client that runs R in a sandbox that is a Linux program."""

from e2b_code_interpreter import Sandbox


def main() -> None:
    sandbox = Sandbox.create("script", timeout=600, envs={"GIVEN": "to the sandbox"})
    printed = sandbox.run_code('print("Hello, World!")', language="r")
    assert printed.error is None and "".join(printed.logs.stdout) == '[1] "Hello, World!"\n', printed
    assert not printed.results
    value = sandbox.run_code("kept <- c(20, 21)\nlength(kept)\nkept * 2", language="r")
    assert value.text == "[1] 40 42" and "".join(value.logs.stdout) == "[1] 2\n", value
    assert sandbox.run_code("sum(kept)", language="R").text == "[1] 41"
    assert sandbox.run_code("getwd()", language="r").text == '[1] "/home/user"'
    given = 'paste(Sys.getenv("GIVEN"), "ä")'
    assert sandbox.run_code(given, language="r", envs={"GIVEN": "ö ="}).text == '[1] "ö = ä"'
    assert sandbox.run_code(given, language="r").text == '[1] "to the sandbox ä"'
    failed = sandbox.run_code("f <- function(n) stop('no ', n)\nf(7)", language="r").error
    assert failed is not None and (failed.name, failed.value) == ("simpleError", "no 7"), failed
    assert failed.traceback.endswith("\nError in f(7): no 7"), failed
    assert "unexpected" in sandbox.run_code("1 +* 2", language="r").error.value
    other = sandbox.create_code_context(language="r", cwd="/tmp")
    assert sandbox.run_code("c(getwd(), ls())", context=other).text == '[1] "/tmp"'
    ended = sandbox.run_code("quit(status = 3)", language="r").error
    assert ended is not None and "status 3" in ended.value, ended
    assert sandbox.run_code("exists('kept')", language="r").text == "[1] FALSE"
    # Functions of users leave the loop alone, and their methods print.
    masks = "parse <- flush <- readLines <- writeLines <- strsplit <- paste <- function(...) stop('mine')"
    assert sandbox.run_code(masks, language="r").error is None
    assert sandbox.run_code("print <- function(x) stop('mine'); 6 * 7", language="r").text == "[1] 42"
    method = "print.pair <- function(x, ...) cat('a pair\\n'); structure(1:2, class = 'pair')"
    assert sandbox.run_code(method, language="r").text == "a pair"
    frame = "print.data.frame <- function(x, ...) cat('a frame\\n'); data.frame(a = 1)"
    assert sandbox.run_code(frame, language="r").text == "a frame"
    # A child that lives longer has the descriptors of its parent.
    left = sandbox.run_code("system('sleep 1000', wait = FALSE); quit(status = 4)", language="r").error
    assert left is not None and "status 4" in left.value, left
    sandbox.kill()
    plain = Sandbox.create("plain", timeout=600)
    lacks = plain.run_code("1", language="r").error
    assert lacks is not None and 'R needs /etc/R, which `dirs = ["/etc/R"]` grants' in lacks.value, lacks
    plain.kill()
    print("all done")


main()
