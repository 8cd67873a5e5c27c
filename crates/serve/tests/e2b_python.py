"""An unmodified E2B client with sandboxes in Python, its default language."""

import time

from e2b_code_interpreter import Sandbox


def main() -> None:
    sandbox = Sandbox.create(timeout=600)
    heard: list[tuple[str, float]] = []
    execution = sandbox.run_code(
        "import sys, time\nfor n in range(3):\n    print(n)\n    time.sleep(2)\nprint('end', file=sys.stderr)\n6 * 7",
        on_stdout=lambda message: heard.append((message.line, time.monotonic())),
    )
    assert execution.error is None, execution.error
    assert execution.text == "42", execution
    assert "".join(line for line, _ in heard) == "0\n1\n2\n", heard
    # As it is printed, not all at the end.
    assert heard[-1][1] - heard[0][1] > 0.5, heard
    assert "".join(execution.logs.stderr) == "end\n", execution.logs

    frame = "import pandas as pd\ndf = pd.DataFrame({'k': list('aabb'), 'v': range(4)})\ndf.groupby('k').v.sum().to_dict()"
    execution = sandbox.run_code(frame)
    assert execution.results[0].json == {"a": 1, "b": 5}, execution
    assert sandbox.run_code("pass").results == []

    failed = sandbox.run_code("def f():\n    return 1 / 0\nf()")
    assert failed.error is not None and failed.error.name == "ZeroDivisionError", failed.error
    assert "in f" in failed.error.traceback, failed.error.traceback

    sandbox.files.write("/home/user/in.csv", "a,b\n1,2\n3,4\n")
    assert sandbox.run_code("int(pd.read_csv('/home/user/in.csv').a.sum())").text == "4"
    sandbox.run_code("open('/home/user/out.txt', 'w').write('from inside')")
    assert sandbox.files.read("/home/user/out.txt") == "from inside"

    draw = "import random, uuid, numpy; (random.random(), str(uuid.uuid4()), float(numpy.random.random()))"
    draws = {fork.run_code(draw).text for fork in sandbox.fork(count=5)}
    assert len(draws) == 5, draws

    sandbox.run_code("state = {'kept': True}")
    assert sandbox.pause()
    again = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert again.run_code("state['kept'], len(df)").text == "(True, 4)"
    began = time.monotonic()
    cut = again.run_code("state['kept'] = False\nwhile True: pass")
    assert cut.error is not None and cut.error.name == "TimeoutError", cut
    assert time.monotonic() - began < 40
    assert again.run_code("state['kept']").text == "True"
    assert again.kill()
    print("all done")


main()
