//! Python's values as CBOR for guests: the host side of the format that the guests' `wire.rs`
//! describes. `objects.rs` reads it.

use afresh_interpreter::tag::{
    COMPLEX, DAY, DECIMAL, MAX_DEPTH, NEGATIVE, POSITIVE, SET, TIMESTAMP, UUID,
};
use minicbor::{Decoder, Encoder};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList,
    PyMapping, PySet, PyString, PyTuple, PyType,
};

use crate::error::MarshalError;
use crate::exit;
use crate::objects::{self, DEFAULT_RESULT};
use crate::python_type::{DATETIME, DAY_TYPE, DECIMAL_TYPE, UNDEFINED, UUID_TYPE};

fn infallible(error: minicbor::encode::Error<std::convert::Infallible>) -> PyErr {
    MarshalError::new_err(error.to_string())
}

/// Writes a value.
pub(crate) fn write(
    value: &Bound<'_, PyAny>,
    out: &mut Encoder<&mut Vec<u8>>,
    depth: usize,
) -> PyResult<()> {
    if depth > MAX_DEPTH {
        return Err(MarshalError::new_err(format!(
            "the value is nested deeper than {MAX_DEPTH} levels, or refers to itself"
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
        let text = text.to_cow().map_err(|_| {
            MarshalError::new_err(
                "text with half of a surrogate pair cannot be given to a guest: encode it as bytes",
            )
        })?;
        out.str(&text).map_err(infallible)?;
    } else if let Ok(bytes) = value.cast::<PyBytes>() {
        out.bytes(bytes.as_bytes()).map_err(infallible)?;
    } else if let Ok(bytes) = value.cast::<PyByteArray>() {
        out.bytes(&bytes.to_vec()).map_err(infallible)?;
    } else if let Ok(list) = value.cast::<PyList>() {
        // Code of its parts may change it.
        let parts = list.to_tuple();
        out.array(parts.len() as u64).map_err(infallible)?;
        parts.iter().try_for_each(|part| write(&part, out, depth + 1))?;
    } else if let Ok(tuple) = value.cast::<PyTuple>() {
        out.array(tuple.len() as u64).map_err(infallible)?;
        tuple.iter().try_for_each(|part| write(&part, out, depth + 1))?;
    } else if let Ok(dict) = value.cast::<PyDict>() {
        let pairs = dict.items();
        out.map(pairs.len() as u64).map_err(infallible)?;
        for pair in pairs.iter() {
            let (key, part): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair.extract()?;
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

/// Less frequent types.
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
    if value.is_instance(DAY_TYPE.get(py)?)? {
        // As text, which shows whether a time has a zone: one without is the guest's local time,
        // not the host's.
        let tag = if value.is_instance(DATETIME.get(py)?)? { TIMESTAMP } else { DAY };
        let text: String = value.call_method0("isoformat")?.extract()?;
        out.tag(tag).map_err(infallible)?.str(&text).map_err(infallible)?;
        return Ok(());
    }
    if value.is_instance_of::<PySet>() || value.is_instance_of::<PyFrozenSet>() {
        let parts = value.try_iter()?.collect::<PyResult<Vec<_>>>()?;
        out.tag(SET).map_err(infallible)?.array(parts.len() as u64).map_err(infallible)?;
        parts.iter().try_for_each(|part| write(part, out, depth + 1))?;
        return Ok(());
    }
    if let Ok(number) = value.cast::<PyComplex>() {
        let parts = [number.real(), number.imag()];
        out.tag(COMPLEX).map_err(infallible)?.array(2).map_err(infallible)?;
        parts.into_iter().try_for_each(|part| out.f64(part).map(drop)).map_err(infallible)?;
        return Ok(());
    }
    if value.is_instance(DECIMAL_TYPE.get(py)?)? {
        out.tag(DECIMAL).map_err(infallible)?.str(&value.str()?.to_cow()?).map_err(infallible)?;
        return Ok(());
    }
    if value.is_instance(UUID_TYPE.get(py)?)? {
        let bytes = value.getattr("bytes")?;
        let bytes = bytes.cast::<PyBytes>()?.as_bytes();
        out.tag(UUID).map_err(infallible)?.bytes(bytes).map_err(infallible)?;
        return Ok(());
    }
    // Objects with a method that returns a plain form: data classes, models, arrays, and mappings
    // of any kind.
    for method in ["model_dump", "tolist"] {
        if let Some(plain) = value.getattr_opt(method)?
            && !value.is_instance_of::<PyType>()
        {
            return write(&plain.call0()?, out, depth + 1);
        }
    }
    if value.hasattr("__dataclass_fields__")? && !value.is_instance_of::<PyType>() {
        let fields = py.import("dataclasses")?.call_method1("fields", (value,))?;
        out.map(fields.len()? as u64).map_err(infallible)?;
        for field in fields.try_iter()? {
            let name = field?.getattr("name")?;
            let name = name.cast::<PyString>()?;
            write(name, out, depth + 1)?;
            write(&value.getattr(name)?, out, depth + 1)?;
        }
        return Ok(());
    }
    if let Ok(mapping) = value.cast::<PyMapping>() {
        let plain = PyDict::new(py);
        plain.update(mapping)?;
        return write(plain.as_any(), out, depth + 1);
    }
    Err(MarshalError::new_err(format!(
        "a {} cannot be given to a guest; values are None, booleans, numbers, strings, bytes, dates, UUIDs, and \
         lists, tuples, sets and dictionaries of them",
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
    exit::hold(py, || {
        let mut values = objects::reader(py, Decoder::new(bytes), true, DEFAULT_RESULT);
        let value = values.read()?;
        if values.position() != bytes.len() {
            return Err(PyTypeError::new_err("there is more than one value in the bytes"));
        }
        Ok(value)
    })
}
