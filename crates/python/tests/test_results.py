"""Rich results: the formats of what code displays in a sandbox of the host's own interpreter."""

from __future__ import annotations

import base64

import afresh
import pytest
from afresh._rich import rich_result

pytestmark = pytest.mark.usefixtures("python")

_SHOWN = """
class Shown:
    def __init__(self, **formats):
        self.formats = formats
    def __repr__(self):
        return "Shown()"
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {name.replace("__", "/").replace("_xml", "+xml"): value for name, value in self.formats.items()}
"""


def test_displayed_values_have_all_their_formats(box: afresh.Sandbox) -> None:
    box.run_code(_SHOWN)
    r = box.run_code(
        "display(Shown(image__png=b'\\x89PNG', text__html='<b>1</b>', text__markdown='*2*'))\n"
        "display(Shown(image__svg_xml='<svg/>', text__latex='$x$', application__json={'a': [1]}))\n"
        "display({'b': 2}); print('said')\n"
        "Shown(text__html='<i>main</i>')"
    )
    assert r.error is None
    assert r.stdout == "said\n"
    one, two, three, main = r.results
    assert (one.png, one.html, one.markdown, one.text) == (b"\x89PNG", "<b>1</b>", "*2*", "Shown()")
    assert (two.svg, two.latex, two.json) == ("<svg/>", "$x$", {"a": [1]})
    assert (three.json, three.text) == ({"b": 2}, "{'b': 2}")
    assert (main.html, main.is_main_result, one.is_main_result) == ("<i>main</i>", True, False)
    assert two.formats() == ["text", "latex", "svg", "json"]
    assert not r.truncated


def test_plain_values_are_values_and_no_results(box: afresh.Sandbox) -> None:
    for code in ("1", "'text'", "[1, {'a': 2}]", "x = 3", "object()"):
        assert box.run_code(code).results == ()
    failed = box.run_code("display('before')\n1 / 0")
    assert isinstance(failed.error, afresh.ProgramError)
    assert [shown.text for shown in failed.results] == ["before"]


def test_a_notebook_shows_results_and_runs_nothing_of_them(box: afresh.Sandbox) -> None:
    box.run_code(_SHOWN)
    script = "<script>alert(1)</script>"
    r = box.run_code(f"display(Shown(image__png=b'p'), Shown(image__svg_xml={script!r})); Shown(text__html={script!r})")
    html = r._repr_html_()
    assert "<script>" not in html
    assert '<iframe sandbox srcdoc="&lt;script&gt;' in html
    assert f'<img src="data:image/png;base64,{base64.b64encode(b"p").decode()}">' in html
    assert "data:image/svg+xml;base64," in html
    bundle = r._repr_mimebundle_()
    assert bundle["image/png"] == base64.b64encode(b"p").decode()
    assert bundle["text/html"] == html
    assert all("<script>" not in value for shown in r.results for value in shown._repr_mimebundle_().values())


def test_results_of_any_bytes_take_a_bounded_amount_of_memory(box: afresh.Sandbox) -> None:
    many = box.run_code("for n in range(300): display(n)")
    assert (len(many.results), many.truncated) == (256, True)
    deep = box.run_code("display({'a': [0] * 600_000})")
    assert (deep.results[0].json, deep.truncated) == (None, True)
    raw = box.run_code(
        "import os\n"
        "def send(data):\n"
        "    frame = bytes((8,)) + data\n"
        "    os.write(os.open('/dev/host', os.O_WRONLY), len(frame).to_bytes(4, 'little') + frame)\n"
        "send(b'{}'); send(b'[]'); send(b'\\xff'); send(b'{\"png\": 1}'); send(b'{\"png\": \"?\", \"text\": \"t\"}')"
    )
    assert [(shown.png, shown.text) for shown in raw.results if shown.text] in ([(None, "t")], [(b"", "t")])
    assert raw.truncated
    assert rich_result((False, [("png", "a")], "[" * 100_000)).png is None
    assert rich_result((False, [], '["json", "extra"]')).json is None


_FAKE_FONTS = """
from matplotlib import ft2font
def get_font(path, **options):
    return ft2font.FT2Font(path, _kerning_factor=0, **options)
def get_names(path):
    return ft2font.FT2Font(path)
"""

_FAKE_LIBRARY = """
import io
made = []
class FT2Font:
    limit = 5
    def __init__(self, file, **options):
        made.append(options)
        self.file = io.open(file, "rb") if isinstance(file, str) else file
    def __init_subclass__(cls):
        raise TypeError("no acceptable base type")
"""

_FAKE_PYPLOT = """
import sys, types
class Figure:
    def subplots(self):
        return types.SimpleNamespace(plot=lambda values: steps.append("plot"))
    def _repr_png_(self):
        steps.append("draw")
steps = []
pyplot = types.ModuleType("matplotlib.pyplot")
pyplot.rcParams = {"backend": "module://_afresh_figures"}
pyplot.figure = Figure
pyplot.close = lambda figure: steps.append("close")
sys.modules["matplotlib.pyplot"] = pyplot
"""


def test_fonts_of_figures_are_read_whole(box: afresh.Sandbox) -> None:
    version = "rcParams = {}; __version_info__ = (3, 10, 0)"
    for name, version_here in (("fake", version), ("old", version.replace("10", "9"))):
        box.files.write(f"/home/user/{name}/matplotlib/__init__.py", version_here)
        box.files.write(f"/home/user/{name}/matplotlib/font_manager.py", _FAKE_FONTS)
        box.files.write(f"/home/user/{name}/matplotlib/ft2font.py", _FAKE_LIBRARY)
    box.files.write("/home/user/fake/a.ttf", bytes(200_000))
    box.files.write("/home/user/fake/large.ttf", bytes((8 << 20) + 1))
    box.run_code("import sys, io, os; before = io.open, open").unwrap()
    box.run_code("sys.path.insert(0, '/home/user/fake'); import matplotlib.font_manager as manager").unwrap()
    box.run_code("get, path = manager.get_font, '/home/user/fake/a.ttf'")
    # It needs the file no more, and its text is the path.
    code = "font = get(path, a=1); os.truncate(path, 0); font.file.seek(199_990)"
    box.run_code(code).unwrap()
    code = "[len(font.file.read(100)), str(font.file)]"
    assert box.eval(code) == [10, "/home/user/fake/a.ttf"]
    assert box.eval("manager.ft2font.made") == [{"_kerning_factor": 0, "a": 1}]
    # Files of other code, fonts that are opened for their names, and large ones are files.
    others = "io.open(path, 'rb'), manager.get_names(path).file, get(path.replace('a.', 'large.')).file"
    assert box.eval(f"[type(one).__name__ for one in ({others})]") == ["BufferedReader"] * 3
    missing = box.run_code("get('/home/user/fake/b.ttf')").error
    assert isinstance(missing, afresh.ProgramError)
    assert "No such file" in str(missing)
    assert box.eval("before == (io.open, open) and io.open is open")
    # Before 3.10 the name of a font in memory is not its path.
    old = "for name in [name for name in sys.modules if name.startswith('matplotlib')]: del sys.modules[name]"
    box.run_code(f"{old}\nsys.path.insert(0, '/home/user/old')\nimport matplotlib.font_manager as manager").unwrap()
    assert box.eval("type(manager.get_font(path).file).__name__") == "BufferedReader"


def test_the_class_of_fonts_is_that_of_the_library(box: afresh.Sandbox) -> None:
    box.files.write("/home/user/fake/matplotlib/__init__.py", "rcParams = {}; __version_info__ = (3, 10, 0)")
    box.files.write("/home/user/fake/matplotlib/font_manager.py", _FAKE_FONTS)
    box.files.write("/home/user/fake/matplotlib/ft2font.py", _FAKE_LIBRARY)
    box.files.write("/home/user/fake/a.ttf", b"font")
    box.run_code(
        "import sys; sys.path.insert(0, '/home/user/fake'); import matplotlib.font_manager as manager"
    ).unwrap()
    box.run_code("from matplotlib.ft2font import FT2Font; seen = manager.ft2font.FT2Font").unwrap()
    box.run_code("font = manager.get_font('/home/user/fake/a.ttf')").unwrap()
    assert box.eval("[isinstance(font, seen), isinstance(1, seen), type(font) is FT2Font]") == [True, False, True]
    assert box.eval("[issubclass(FT2Font, seen), issubclass(seen, seen), issubclass(int, seen)]") == [True, True, False]
    assert box.eval("[seen == FT2Font, type(font) == seen, {FT2Font: 1}[seen], seen == int]") == [True, True, 1, False]
    assert box.eval("[seen.limit, seen.__name__, seen.__module__]") == [5, "FT2Font", "matplotlib.ft2font"]


def test_a_setup_that_imports_matplotlib_has_drawn_a_figure() -> None:
    with afresh.linux("python3", setup=_FAKE_PYPLOT).sandbox(timeout=60) as sandbox:
        assert sandbox.eval("steps") == ["plot", "draw", "close"]
    # Another backend is a choice of the setup. The code that draws a figure reports its failure.
    other = f"{_FAKE_PYPLOT}\npyplot.rcParams['backend'] = 'svg'"
    broken = f"{_FAKE_PYPLOT}\nFigure.subplots = None"
    ending = f"{_FAKE_PYPLOT}\npyplot.figure = lambda: sys.exit(3)"
    bare = f"{_FAKE_PYPLOT}\ndel pyplot.rcParams"
    mocked = f"{_FAKE_PYPLOT}\nfrom unittest.mock import MagicMock\nsys.modules['matplotlib.pyplot'] = MagicMock()"
    for setup, steps in ((other, []), (broken, ["close"]), (ending, []), (bare, []), (mocked, [])):
        with afresh.linux("python3", setup=setup).sandbox(timeout=60) as sandbox:
            assert sandbox.eval("steps") == steps


def test_figures_are_images(box: afresh.Sandbox) -> None:
    if isinstance(box.run_code("import matplotlib.pyplot as plt").error, afresh.ProgramError):
        pytest.skip("SKIPPED: matplotlib is not installed")
    drawn = box.run_code("plt.plot([1, 4, 9]); plt.show()\nfigure = plt.figure(); plt.plot([1, 2])\nfigure")
    assert drawn.error is None
    assert [bool(shown.png and shown.png.startswith(b"\x89PNG")) for shown in drawn.results] == [True, True]
    assert [shown.is_main_result for shown in drawn.results] == [False, True]
    assert len(box.run_code("plt.plot([1])\nNone").results) == 1
    assert box.run_code("1").results == ()
    with afresh.linux("python3", setup="import matplotlib.pyplot as plt").sandbox(timeout=60) as warm:
        assert warm.eval("'PIL.PngImagePlugin' in __import__('sys').modules and plt.get_fignums()") == []
        assert warm.eval("plt.figure().number") == 1
        # The functions of Python are those of the interpreter.
        warm.run_code("import io, pickle, functools; plt.title('a'); plt.show()").unwrap()
        warm.run_code("pickle.loads(pickle.dumps(functools.partial(open, mode='rb')))").unwrap()
        assert warm.eval("io.open is open and pickle.loads(pickle.dumps(open)) is open")
        # A font in memory needs its file no more.
        warm.run_code("import os, shutil; found = plt.matplotlib.font_manager.findfont('DejaVu Sans')").unwrap()
        warm.run_code("shutil.copyfile(found, 'a.ttf')").unwrap()
        warm.run_code("font = plt.matplotlib.font_manager.get_font('a.ttf'); os.truncate('a.ttf', 0)").unwrap()
        assert warm.eval("font.load_char(ord('g')).width") > 0
        assert warm.eval("isinstance(font, plt.matplotlib.font_manager.ft2font.FT2Font)") is True
        # The name of a font is its path, so that figures can be files with fonts.
        assert warm.eval("str(plt.matplotlib.font_manager.get_font(found).fname) == str(found)")
        for kind in ("pdf", "ps", "svg"):
            assert warm.eval(f"to = io.BytesIO(); plt.plot([1]); plt.savefig(to, format='{kind}'); to.tell()") > 1000
