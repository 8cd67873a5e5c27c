# Rich results of code in a Linux guest: the formats that values have for display, and figures of
# matplotlib. It follows `driver.py` in the same module, and `agent.py` follows it.
#
# Promises: the formats are those of Jupyter (`_repr_mimebundle_`, `_repr_html_` and so on). A value
# whose format raises is shown without that format. A module of a package is imported here only
# after code has imported that package. A result that is larger than `MAX_RESULT` is an exception of
# the code. A figure of matplotlib 3.10 or newer reads its fonts from memory: without that a small
# one can make 3,200 system calls for them. No function of Python is replaced for it.

import base64
import contextlib
import functools
import importlib
import importlib.machinery
import io
import json
import math
import os
import sys

# A frame: a result of code, as an object in JSON.
DISPLAYED = 8
# Maximum bytes of a result.
MAX_RESULT = 16 << 20
# The module that is the backend of figures.
_BACKEND = "_afresh_figures"
# Module of IPython that has `display`.
_IPYTHON = "IPython.core.display_functions"
# The module that opens fonts for figures.
_FONTS = "matplotlib.font_manager"
# The first version of matplotlib whose fonts are read whole.
_FONTS_VERSION = (3, 10)
# Maximum bytes of a font that is read whole.
_MAX_FONT = 8 << 20

_METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_pdf_": "application/pdf",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
    "_repr_javascript_": "application/javascript",
}
# Names of the formats in a result.
_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
# Formats that matplotlib draws.
_DRAWN = ("svg", "png", "jpeg", "pdf")
# Formats of figures, which `%config InlineBackend.figure_formats` changes.
_figure_formats = ["png"]


class AnswerTooLarge(ValueError):
    """A result does not fit."""


def _plain(value, other=None, depth=0):
    """A value of the types that JSON has. `other` makes text of values that JSON has no type for."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth > DEEPEST:
        raise ValueError("the value is nested too deeply")
    if isinstance(value, dict):
        return {str(key): _plain(part, other, depth + 1) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, other, depth + 1) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    for method in ("isoformat", "tolist", "item"):
        convert = getattr(type(value), method, None)
        if convert is not None:
            return _plain(convert(value), other, depth + 1)
    if other is None:
        raise ValueError("the value has no form in JSON")
    return other(value)


def _figure(value):
    """The formats of a figure."""
    formats = {}
    for mime, name in _FIELDS.items():
        if name in _DRAWN and name in _figure_formats:
            drawn = io.BytesIO()
            value.savefig(drawn, format=name, bbox_inches="tight")
            formats[mime] = drawn.getvalue().decode() if name == "svg" else drawn.getvalue()
    # The package of E2B that reads charts, where the guest has it.
    if _is_installed("e2b_charts"):
        try:
            chart = importlib.import_module("e2b_charts").chart_figure_to_dict(value)
        except Exception:
            chart = None
        if chart:
            formats["e2b/chart"] = chart
    return formats


def _is_installed(name):
    return name in sys.modules or importlib.machinery.PathFinder.find_spec(name) is not None


def _is_of(value, module, name):
    """Whether a value is of a class that a module has, if that module was imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _own_formats(value):
    """The formats that a value has itself."""
    if isinstance(value, type) or hasattr(value, "_ipython_canary_method_should_not_exist_"):
        # A class, or an object that claims to have all methods.
        return {}
    formats = {}
    bundle = getattr(value, "_repr_mimebundle_", None)
    if callable(bundle):
        try:
            made = bundle(include=None, exclude=None)
            formats.update(made[0] if isinstance(made, tuple) else made or {})
        except Exception:
            formats.clear()
    for method, mime in _METHODS.items():
        make = getattr(value, method, None) if mime not in formats else None
        if callable(make):
            try:
                made = make()
            except Exception:
                continue
            # With or without metadata.
            made = made[0] if isinstance(made, tuple) else made
            if made is not None:
                formats[mime] = made
    return formats


def _formats(value):
    """All formats of a value."""
    if _is_of(value, "matplotlib.figure", "Figure"):
        formats = _figure(value)
    else:
        formats = _own_formats(value)
    if _is_of(value, "pandas", "DataFrame"):
        with contextlib.suppress(Exception):
            formats["e2b/data"] = value.to_dict(orient="list")
    elif isinstance(value, (dict, list)) and "application/json" not in formats:
        formats["application/json"] = value
    formats.setdefault("text/plain", shown(value))
    return formats


def _unquoted(text):
    """Text without its outer quotes, as E2B shows it."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _show_formats(formats, main=False):
    """Sends a result to the host."""
    result, extra = {"is_main_result": main}, {}
    for mime, value in formats.items():
        try:
            made = _plain(value, str if mime == "e2b/data" else None)
        except (ValueError, RecursionError):
            # Without this format.
            continue
        if mime == "text/plain" and isinstance(made, str):
            made = _unquoted(made)
        (result if mime in _FIELDS else extra)[_FIELDS.get(mime, mime)] = made
    if extra:
        result["extra"] = extra
    frame = bytes((DISPLAYED,)) + json.dumps(result, allow_nan=False).encode()
    if len(frame) > MAX_RESULT:
        raise AnswerTooLarge(f"its value has {len(frame)} bytes, and may have {MAX_RESULT}")
    _flush()
    _call(frame)


def display(*values, raw=False, **_options):
    """Shows values in all their formats; with `raw`, each value is its formats by MIME type."""
    for value in values:
        _show_formats(dict(value) if raw else _formats(value))


def _publish(data, metadata=None, **_options):
    """Shows formats by MIME type."""
    _show_formats(dict(data))


# Figures


def _open_figures():
    """The figures that are open, and a function that closes all."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    managers = helpers.Gcf.get_all_fig_managers() if helpers else []
    return [manager.canvas.figure for manager in managers], helpers and helpers.Gcf.destroy_all


def _show_figures(*_arguments, **_options):
    """Shows the open figures, and closes them."""
    figures, close = _open_figures()
    if figures:
        try:
            for figure in figures:
                display(figure)
        finally:
            close()


def _flush_figures():
    """Shows the figures that code left open, if it did not choose another backend."""
    backend = getattr(sys.modules.get("matplotlib.pyplot"), "_backend_mod", None)
    if getattr(backend, "show", None) is _show_figures:
        _show_figures()


class _Font(io.BytesIO):
    """A font in memory. Its text is its path, which matplotlib 3.10 and newer use as the font's name. It is not
    `os.PathLike`, because 3.11 opens the path of such an object.
    """

    def __str__(self):
        return self.path


def _read_font(path):
    """A small font in memory; otherwise its path, with which matplotlib opens it or reports why it cannot."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size <= _MAX_FONT:
            font = _Font(file.read(_MAX_FONT))
            font.path = str(path)
            return font
    return path


class _FontClass(type):
    """The class of fonts for the module that opens them. Its call opens a font for letters in memory. All else is as in
    the class of the library, which has no subclasses: instances, subclasses, attributes and equality.
    """

    def __new__(cls, fonts):
        described = {name: getattr(fonts, name) for name in ("__module__", "__qualname__", "__doc__")}
        return super().__new__(cls, fonts.__name__, (), {**described, "_fonts": fonts})

    def __init__(cls, fonts):
        super().__init__(fonts)

    def __call__(cls, filename, *arguments, **options):
        """Opens a font. One for letters has this option. Others are opened for their names only."""
        if isinstance(filename, str) and "_kerning_factor" in options:
            filename = _read_font(filename)
        return cls._fonts(filename, *arguments, **options)

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls._fonts)

    def __subclasscheck__(cls, subclass):
        return subclass is cls or issubclass(subclass, cls._fonts)

    def __getattr__(cls, name):
        return getattr(type.__getattribute__(cls, "_fonts"), name)

    def __eq__(cls, other):
        return other is cls or other is cls._fonts

    def __hash__(cls):
        return hash(cls._fonts)


class _FontLibrary:
    """`matplotlib.ft2font` for the module that opens fonts.

    FreeType seeks and reads a few bytes of a font for each letter, through a file of Python. Such a file has a buffer
    of one block, so that most of these are system calls. A larger buffer is lost at each read to the end of the file.
    """

    def __init__(self, library):
        self._library = library
        fonts = getattr(library, "FT2Font", None)
        if isinstance(fonts, type):
            self.FT2Font = _FontClass(fonts)

    def __getattr__(self, name):
        return getattr(self._library, name)


def warm_figures():
    """Draws a figure if the setup imported matplotlib, so that sandboxes find its modules and caches filled."""
    # The first figure of the code reports what fails here. The module may be another one.
    with contextlib.suppress(BaseException):
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or dict.get(pyplot.rcParams, "backend") != f"module://{_BACKEND}":
            return
        figure = pyplot.figure()
        try:
            figure.subplots().plot([1, 4, 9])
            _formats(figure)
        finally:
            pyplot.close(figure)


def _change_images(image_class):
    """Makes Pillow send images to the host that code shows, and those that it saves under a name, as E2B does."""
    save = image_class.save

    @functools.wraps(save)
    def save_shown(image, fp, format=None, **options):
        if isinstance(fp, str):
            display(image)
        save(image, fp, format, **options)

    image_class.show = lambda image, *_arguments, **_options: display(image)
    image_class.save = save_shown


class _Importer:
    """Imports the backend of figures, and changes modules when code imports them: matplotlib gets the backend and fonts
    in memory, and IPython's `display` and Pillow's `show` send to the host, as an image that code saves under a name.
    """

    def __init__(self, loader=None):
        """With the loader of a module that is changed."""
        self.loader = loader

    def find_spec(self, name, path=None, target=None):
        """A module that is made or changed here."""
        if name == _BACKEND:
            return importlib.machinery.ModuleSpec(name, self)
        if name not in ("matplotlib", _FONTS, _IPYTHON, "PIL.Image"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Importer(spec.loader)
        return spec

    def create_module(self, spec):
        """Makes the module as usual."""
        return self.loader.create_module(spec) if self.loader else None

    def exec_module(self, module):
        """Fills the module."""
        if self.loader is None:
            canvas = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
            module.FigureCanvas, module.show = canvas, _show_figures
            return
        self.loader.exec_module(module)
        if module.__name__ == _FONTS:
            version = getattr(sys.modules.get("matplotlib"), "__version_info__", ())
            if isinstance(version, tuple) and version >= _FONTS_VERSION:
                module.ft2font = _FontLibrary(module.ft2font)
        elif module.__name__ == _IPYTHON:
            module.display, module.publish_display_data = display, _publish
        elif module.__name__ == "PIL.Image":
            _change_images(module.Image)
        elif module.__name__ == "matplotlib":
            # Where neither the environment nor a file chooses another.
            if "MPLBACKEND" not in os.environ and not isinstance(dict.get(module.rcParams, "backend"), str):
                module.rcParams["backend"] = f"module://{_BACKEND}"

    def __getattr__(self, name):
        """Other questions go to the loader, as those for resources."""
        if name.startswith("__") or self.__dict__.get("loader") is None:
            raise AttributeError(name)
        return getattr(self.loader, name)


def _prepare_displays():
    """Makes `display` known, and figures shown."""
    sys.meta_path.insert(0, _Importer())
    builtins.display = display
