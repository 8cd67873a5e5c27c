//! Values between Python and an interpreter, as CBOR: the host's half of what the guests' `wire.rs` describes.
//!
//! What it promises: nothing that a guest sends makes more of the host's memory than its own bytes account for, and
//! nesting ends at [`DEEPEST`]. Values that only have a name (functions, promises) become `afresh.Opaque`.

use afresh_interpreter::tag::{DAY, DEEPEST, FLOATS, INTEGERS, SET, TIMESTAMP, TUPLE};
use minicbor::data::{Tag, Type as Item};
use minicbor::{Decoder, Encoder};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList,
    PyMapping, PySet, PyString, PyTuple, PyType,
};

use crate::error::MarshalError;

const DATE: Tag = Tag::new(1);
const POSITIVE: Tag = Tag::new(2);
const NEGATIVE: Tag = Tag::new(3);
const NAMED: Tag = Tag::new(39);
/// Real and imaginary part.
const COMPLEX: Tag = Tag::new(43_000);

/// Something of Python's own that is looked up once.
struct Known {
    cell: PyOnceLock<Py<PyAny>>,
    module: &'static str,
    name: &'static str,
}

impl Known {
    const fn new(module: &'static str, name: &'static str) -> Self {
        Self { cell: PyOnceLock::new(), module, name }
    }

    fn get<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        let found = || Ok::<_, PyErr>(py.import(self.module)?.getattr(self.name)?.unbind());
        Ok(self.cell.get_or_try_init(py, found)?.bind(py))
    }
}

static OPAQUE: Known = Known::new("afresh._values", "Opaque");
static UNDEFINED: Known = Known::new("afresh._values", "UNDEFINED");
static DATETIME: Known = Known::new("datetime", "datetime");
static DAY_TYPE: Known = Known::new("datetime", "date");
static UTC: Known = Known::new("datetime", "timezone");

fn broken(error: minicbor::decode::Error) -> PyErr {
    MarshalError::new_err(format!("what the guest sent cannot be read: {error}"))
}

fn infallible(error: minicbor::encode::Error<std::convert::Infallible>) -> PyErr {
    MarshalError::new_err(error.to_string())
}

/// Reads the next value; `undefined` is `None`, or with `exact` the package's `UNDEFINED`.
pub(crate) fn read<'py>(
    py: Python<'py>,
    from: &mut Decoder<'_>,
    exact: bool,
    depth: usize,
) -> PyResult<Bound<'py, PyAny>> {
    if depth > DEEPEST {
        return Err(MarshalError::new_err(format!(
            "what the guest sent is nested deeper than {DEEPEST} levels"
        )));
    }
    Ok(match from.datatype().map_err(broken)? {
        Item::Undefined => {
            from.undefined().map_err(broken)?;
            if exact { UNDEFINED.get(py)?.clone() } else { py.None().into_bound(py) }
        }
        Item::Null => {
            from.null().map_err(broken)?;
            py.None().into_bound(py)
        }
        Item::Bool => PyBool::new(py, from.bool().map_err(broken)?).to_owned().into_any(),
        Item::F16 | Item::F32 | Item::F64 => {
            PyFloat::new(py, from.f64().map_err(broken)?).into_any()
        }
        Item::String => PyString::new(py, from.str().map_err(broken)?).into_any(),
        Item::Bytes => PyBytes::new(py, from.bytes().map_err(broken)?).into_any(),
        Item::Array => read_list(py, from, exact, depth)?.into_any(),
        Item::Map => {
            let dict = PyDict::new(py);
            for _ in 0..length(from.map().map_err(broken)?)? {
                let key = read(py, from, exact, depth + 1)?;
                let value = read(py, from, exact, depth + 1)?;
                dict.set_item(hashable(key)?, value)?;
            }
            dict.into_any()
        }
        Item::Tag => read_tagged(py, from, exact, depth)?,
        Item::Int => {
            let number: i128 = from.int().map_err(broken)?.into();
            number.into_pyobject(py)?.into_any()
        }
        Item::Simple | Item::Break | Item::Unknown(_) => {
            return Err(MarshalError::new_err("what the guest sent is not a value"));
        }
        _ => from.i64().map_err(broken)?.into_pyobject(py)?.into_any(),
    })
}

/// A key that a dictionary can have: lists become tuples.
fn hashable(key: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    match key.cast::<PyList>() {
        Ok(list) => Ok(list.to_tuple().into_any()),
        Err(_) => Ok(key),
    }
}

fn read_list<'py>(
    py: Python<'py>,
    from: &mut Decoder<'_>,
    exact: bool,
    depth: usize,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for _ in 0..length(from.array().map_err(broken)?)? {
        list.append(read(py, from, exact, depth + 1)?)?;
    }
    Ok(list)
}

fn length(given: Option<u64>) -> PyResult<u64> {
    given.ok_or_else(|| MarshalError::new_err("a length is missing in what the guest sent"))
}

fn text<'b>(from: &mut Decoder<'b>) -> PyResult<&'b str> {
    from.str().map_err(broken)
}

/// Numbers as they lie in memory.
fn words<'b>(from: &mut Decoder<'b>) -> PyResult<impl ExactSizeIterator<Item = [u8; 8]> + 'b> {
    let bytes = from.bytes().map_err(broken)?;
    if !bytes.len().is_multiple_of(8) {
        return Err(MarshalError::new_err("numbers that the guest sent are cut off"));
    }
    Ok(bytes.chunks_exact(8).map(|word| {
        let mut own = [0; 8];
        own.copy_from_slice(word);
        own
    }))
}

fn read_tagged<'py>(
    py: Python<'py>,
    from: &mut Decoder<'_>,
    exact: bool,
    depth: usize,
) -> PyResult<Bound<'py, PyAny>> {
    match from.tag().map_err(broken)? {
        DATE => {
            let seconds = from.f64().map_err(broken)?;
            let utc = UTC.get(py)?.getattr("utc")?;
            DATETIME.get(py)?.call_method1("fromtimestamp", (seconds, utc))
        }
        TIMESTAMP => DATETIME.get(py)?.call_method1("fromisoformat", (text(from)?,)),
        DAY => DAY_TYPE.get(py)?.call_method1("fromisoformat", (text(from)?,)),
        TUPLE => Ok(read_list(py, from, exact, depth)?.to_tuple().into_any()),
        COMPLEX => {
            from.array().map_err(broken)?;
            let (real, imaginary) = (from.f64().map_err(broken)?, from.f64().map_err(broken)?);
            Ok(PyComplex::from_doubles(py, real, imaginary).into_any())
        }
        INTEGERS => {
            let words = words(from)?;
            Ok(PyList::new(py, words.map(i64::from_le_bytes))?.into_any())
        }
        FLOATS => {
            let words = words(from)?;
            Ok(PyList::new(py, words.map(f64::from_le_bytes))?.into_any())
        }
        SET => {
            let members = read_list(py, from, exact, depth)?;
            let keys = members.iter().map(hashable).collect::<PyResult<Vec<_>>>()?;
            Ok(PySet::new(py, keys)?.into_any())
        }
        tag @ (POSITIVE | NEGATIVE) => {
            let bytes = PyBytes::new(py, from.bytes().map_err(broken)?);
            let number = py.get_type::<PyInt>().call_method1("from_bytes", (bytes, "big"))?;
            if tag == POSITIVE { Ok(number) } else { number.call_method0("__invert__") }
        }
        NAMED => {
            from.array().map_err(broken)?;
            let kind = from.str().map_err(broken)?;
            OPAQUE.get(py)?.call1((kind, from.str().map_err(broken)?))
        }
        other => Err(MarshalError::new_err(format!(
            "what the guest sent has values of an unknown kind (tag {})",
            other.as_u64()
        ))),
    }
}

/// Writes a value.
pub(crate) fn write(
    value: &Bound<'_, PyAny>,
    out: &mut Encoder<&mut Vec<u8>>,
    depth: usize,
) -> PyResult<()> {
    if depth > DEEPEST {
        return Err(MarshalError::new_err(format!(
            "the value is nested deeper than {DEEPEST} levels, or refers to itself"
        )));
    }
    if value.is_none() {
        out.null().map_err(infallible)?;
    } else if let Ok(truth) = value.cast::<PyBool>() {
        out.bool(truth.is_true()).map_err(infallible)?;
    } else if let Ok(number) = value.cast::<PyInt>() {
        write_int(number, out)?;
    } else if let Ok(number) = value.cast::<PyFloat>() {
        out.f64(number.value()).map_err(infallible)?;
    } else if let Ok(text) = value.cast::<PyString>() {
        out.str(&text.to_cow()?).map_err(infallible)?;
    } else if let Ok(bytes) = value.cast::<PyBytes>() {
        out.bytes(bytes.as_bytes()).map_err(infallible)?;
    } else if let Ok(bytes) = value.cast::<PyByteArray>() {
        out.bytes(&bytes.to_vec()).map_err(infallible)?;
    } else if let Ok(list) = value.cast::<PyList>() {
        out.array(list.len() as u64).map_err(infallible)?;
        list.iter().try_for_each(|part| write(&part, out, depth + 1))?;
    } else if let Ok(tuple) = value.cast::<PyTuple>() {
        out.array(tuple.len() as u64).map_err(infallible)?;
        tuple.iter().try_for_each(|part| write(&part, out, depth + 1))?;
    } else if let Ok(dict) = value.cast::<PyDict>() {
        out.map(dict.len() as u64).map_err(infallible)?;
        for (key, part) in dict.iter() {
            write(&key, out, depth + 1)?;
            write(&part, out, depth + 1)?;
        }
    } else {
        return write_other(value, out, depth);
    }
    Ok(())
}

fn write_int(number: &Bound<'_, PyInt>, out: &mut Encoder<&mut Vec<u8>>) -> PyResult<()> {
    if let Ok(small) = number.extract::<i64>() {
        out.i64(small).map_err(infallible)?;
        return Ok(());
    }
    let negative = number.lt(0)?;
    let positive =
        if negative { number.call_method0("__invert__")? } else { number.clone().into_any() };
    let bits: usize = positive.call_method0("bit_length")?.extract()?;
    let bytes = positive.call_method1("to_bytes", (bits.div_ceil(8), "big"))?;
    let tag = if negative { NEGATIVE } else { POSITIVE };
    out.tag(tag).map_err(infallible)?;
    out.bytes(bytes.cast::<PyBytes>()?.as_bytes()).map_err(infallible)?;
    Ok(())
}

/// What is found less often.
fn write_other(
    value: &Bound<'_, PyAny>,
    out: &mut Encoder<&mut Vec<u8>>,
    depth: usize,
) -> PyResult<()> {
    let py = value.py();
    if value.is(UNDEFINED.get(py)?) {
        out.undefined().map_err(infallible)?;
        return Ok(());
    }
    if value.is_instance(DATETIME.get(py)?)? {
        let seconds: f64 = value.call_method0("timestamp")?.extract()?;
        out.tag(DATE).map_err(infallible)?.f64(seconds).map_err(infallible)?;
        return Ok(());
    }
    if value.is_instance_of::<PySet>() || value.is_instance_of::<PyFrozenSet>() {
        out.tag(SET).map_err(infallible)?.array(value.len()? as u64).map_err(infallible)?;
        for part in value.try_iter()? {
            write(&part?, out, depth + 1)?;
        }
        return Ok(());
    }
    // What says of itself how it is plain: data classes, models, arrays, and mappings of any kind.
    for method in ["model_dump", "tolist"] {
        if let Some(plain) = value.getattr_opt(method)?
            && !value.is_instance_of::<PyType>()
        {
            return write(&plain.call0()?, out, depth + 1);
        }
    }
    if value.hasattr("__dataclass_fields__")? && !value.is_instance_of::<PyType>() {
        let plain = py.import("dataclasses")?.call_method1("asdict", (value,))?;
        return write(&plain, out, depth + 1);
    }
    if let Ok(mapping) = value.cast::<PyMapping>() {
        let plain = PyDict::new(py);
        plain.update(mapping)?;
        return write(plain.as_any(), out, depth + 1);
    }
    Err(MarshalError::new_err(format!(
        "a {} cannot be given to a guest; values are None, booleans, numbers, strings, bytes, dates, and lists, \
         tuples, sets and dictionaries of them",
        value.get_type().fully_qualified_name()?
    )))
}

/// A value as the bytes that guests read.
#[pyfunction]
pub(crate) fn encode<'py>(
    py: Python<'py>,
    value: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut bytes = Vec::new();
    write(value, &mut Encoder::new(&mut bytes), 0)?;
    Ok(PyBytes::new(py, &bytes))
}

/// The value that such bytes hold.
#[pyfunction]
pub(crate) fn decode<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let mut from = Decoder::new(bytes);
    let value = read(py, &mut from, true, 0)?;
    if from.position() != bytes.len() {
        return Err(PyTypeError::new_err("there is more than one value in the bytes"));
    }
    Ok(value)
}
