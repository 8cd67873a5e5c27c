//! Values between Python and an interpreter, as CBOR: the host side of the format that the guests' `wire.rs`
//! describes.
//!
//! Promises: the objects made of one value keep to a budget, which is charged before they are made, and nesting ends at
//! [`MAX_DEPTH`]. Values that only have a name (functions, promises), and dates that Python cannot hold, become
//! `afresh.Opaque`. A map or set that would lose an entry as a dictionary or set becomes a list.
//! May break it: an interpreter whose objects are larger than [`cost`] estimates.

use std::collections::HashMap;

use afresh_budget::{Budget, Charge};
use afresh_interpreter::tag::{
    DAY, DECIMAL, FLOATS, INTEGERS, MAX_DEPTH, SET, TIMESTAMP, TUPLE, UUID,
};
use minicbor::data::{Tag, Type as Item};
use minicbor::{Decoder, Encoder};
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList,
    PyMapping, PySet, PyString, PyTuple, PyType,
};

use crate::error::MarshalError;
use crate::exit;

const DATE: Tag = Tag::new(1);
const POSITIVE: Tag = Tag::new(2);
const NEGATIVE: Tag = Tag::new(3);
const NAMED: Tag = Tag::new(39);
/// Real and imaginary part.
const COMPLEX: Tag = Tag::new(43_000);

/// A Python object that is looked up once.
struct PythonType {
    cell: PyOnceLock<Py<PyAny>>,
    module: &'static str,
    name: &'static str,
}

impl PythonType {
    const fn new(module: &'static str, name: &'static str) -> Self {
        Self { cell: PyOnceLock::new(), module, name }
    }

    fn get<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        let found = || Ok::<_, PyErr>(py.import(self.module)?.getattr(self.name)?.unbind());
        Ok(self.cell.get_or_try_init(py, found)?.bind(py))
    }
}

static OPAQUE: PythonType = PythonType::new("afresh._values", "Opaque");
static UNDEFINED: PythonType = PythonType::new("afresh._values", "UNDEFINED");
static DATETIME: PythonType = PythonType::new("datetime", "datetime");
static DAY_TYPE: PythonType = PythonType::new("datetime", "date");
static UTC: PythonType = PythonType::new("datetime", "timezone");
static DECIMAL_TYPE: PythonType = PythonType::new("decimal", "Decimal");
static UUID_TYPE: PythonType = PythonType::new("uuid", "UUID");

fn broken(error: minicbor::decode::Error) -> PyErr {
    MarshalError::new_err(format!("the guest's value cannot be decoded: {error}"))
}

fn infallible(error: minicbor::encode::Error<std::convert::Infallible>) -> PyErr {
    MarshalError::new_err(error.to_string())
}

/// Default limit, in bytes, of the Python objects made of one value.
pub(crate) const DEFAULT_RESULT: usize = 128 << 20;
/// Maximum keys of one dictionary or set with the same hash.
const MAX_EQUAL_HASHES: u32 = 64;
/// Items after which other threads of Python get a turn.
const TURN: usize = 1 << 14;

/// Estimated bytes of objects, as CPython 3.10 to 3.14 allocates them, with the slot that refers to each.
mod cost {
    pub(super) const PLAIN: usize = 8;
    pub(super) const NUMBER: usize = 40;
    /// Bytes of an empty string or bytes object.
    pub(super) const TEXT: usize = 64;
    pub(super) const LIST: usize = 88;
    pub(super) const DICT: usize = 88;
    /// Bytes of a dictionary or set that is not empty.
    pub(super) const TABLE: usize = 160;
    /// Bytes of an entry, and of its hash while the value is read.
    pub(super) const ENTRY: usize = 144;
    pub(super) const MEMBER: usize = 104;
    /// Bytes of a date or another object of a class.
    pub(super) const OBJECT: usize = 160;
}

/// The error for values that cannot be converted to Python's, for any reason.
pub(crate) fn marshal_error(py: Python<'_>, error: PyErr) -> PyErr {
    if error.is_instance_of::<MarshalError>(py) || !error.is_instance_of::<PyException>(py) {
        return error;
    }
    let raised =
        MarshalError::new_err(format!("a value of the guest has no equal in Python: {error}"));
    raised.set_cause(py, Some(error));
    raised
}

/// Reads the values that a guest sent. The size of the Python objects is charged to one budget.
pub(crate) struct Values<'b> {
    from: Decoder<'b>,
    /// Whether `undefined` is the package's `UNDEFINED`; otherwise it is `None`.
    exact: bool,
    charge: Charge,
    items: usize,
}

impl<'b> Values<'b> {
    /// Reads from `from`, and makes at most `limit` bytes of objects.
    pub(crate) fn new(from: Decoder<'b>, exact: bool, limit: usize) -> Self {
        Self { from, exact, charge: Budget::new("result", limit).empty(), items: 0 }
    }

    /// Bytes read so far.
    pub(crate) fn position(&self) -> usize {
        self.from.position()
    }

    /// Reads the next value.
    pub(crate) fn read<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.read_nested(py, 0)
    }

    fn add(&mut self, bytes: usize) -> PyResult<()> {
        self.charge.add(bytes).map_err(|exceeded| {
            MarshalError::new_err(format!(
                "the value takes more memory than `result_limit` allows, {} bytes",
                exceeded.limit
            ))
        })
    }

    fn read_nested<'py>(&mut self, py: Python<'py>, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        if depth > MAX_DEPTH {
            return Err(MarshalError::new_err(format!(
                "the value of the guest is nested deeper than {MAX_DEPTH} levels"
            )));
        }
        self.items += 1;
        if self.items.is_multiple_of(TURN) {
            py.detach(exit::park_if_finished);
        }
        self.add(cost::PLAIN)?;
        let from = &mut self.from;
        Ok(match from.datatype().map_err(broken)? {
            Item::Undefined => {
                from.undefined().map_err(broken)?;
                if self.exact { UNDEFINED.get(py)?.clone() } else { py.None().into_bound(py) }
            }
            Item::Null => {
                from.null().map_err(broken)?;
                py.None().into_bound(py)
            }
            Item::Bool => PyBool::new(py, from.bool().map_err(broken)?).to_owned().into_any(),
            Item::F16 | Item::F32 | Item::F64 => {
                let number = from.f64().map_err(broken)?;
                self.add(cost::NUMBER)?;
                PyFloat::new(py, number).into_any()
            }
            Item::String => {
                let text = from.str().map_err(broken)?;
                // Up to four bytes a character, and three of UTF-8 may become four.
                let width = if text.is_ascii() { 1 } else { 4 };
                self.add(cost::TEXT + text.len().saturating_mul(width))?;
                PyString::new(py, text).into_any()
            }
            Item::Bytes => {
                let bytes = from.bytes().map_err(broken)?;
                self.add(cost::TEXT + bytes.len())?;
                PyBytes::new(py, bytes).into_any()
            }
            Item::Array => self.read_list(py, depth)?.into_any(),
            Item::Map => self.read_map(py, depth)?,
            Item::Tag => self.read_tagged(py, depth)?,
            Item::Int => {
                let number: i128 = from.int().map_err(broken)?.into();
                self.add(cost::NUMBER)?;
                number.into_pyobject(py)?.into_any()
            }
            Item::Simple | Item::Break | Item::Unknown(_) => {
                return Err(MarshalError::new_err("the guest's bytes are not a value"));
            }
            _ => {
                let number = from.i64().map_err(broken)?;
                self.add(cost::NUMBER)?;
                number.into_pyobject(py)?.into_any()
            }
        })
    }

    /// A dictionary; a list of pairs where that would lose an entry, since keys are objects or equal in Python.
    fn read_map<'py>(&mut self, py: Python<'py>, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        let dict = PyDict::new(py);
        self.add(cost::DICT)?;
        let entries = length(self.from.map().map_err(broken)?)?;
        if entries > 0 {
            self.add(cost::TABLE)?;
        }
        let begin = self.from.position();
        let mut hashes = KeyHashes::default();
        for done in 1..=entries {
            self.add(cost::ENTRY)?;
            let key = hashable(self.read_nested(py, depth + 1)?)?;
            let value = self.read_nested(py, depth + 1)?;
            let Some(key) = key else { return self.read_pairs(py, begin, entries, depth) };
            dict.set_item(&key, value)?;
            if dict.len() as u64 != done {
                return self.read_pairs(py, begin, entries, depth);
            }
            hashes.add(&key)?;
        }
        Ok(dict.into_any())
    }

    /// The entries at `begin` once more.
    fn read_pairs<'py>(
        &mut self,
        py: Python<'py>,
        begin: usize,
        entries: u64,
        depth: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.from.set_position(begin);
        let list = PyList::empty(py);
        for _ in 0..entries {
            self.add(cost::LIST)?;
            let key = self.read_nested(py, depth + 1)?;
            list.append((key, self.read_nested(py, depth + 1)?))?;
        }
        Ok(list.into_any())
    }

    fn read_list<'py>(&mut self, py: Python<'py>, depth: usize) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        self.add(cost::LIST)?;
        for _ in 0..length(self.from.array().map_err(broken)?)? {
            list.append(self.read_nested(py, depth + 1)?)?;
        }
        Ok(list)
    }

    /// Numbers as they are laid out in memory.
    fn words(&mut self) -> PyResult<impl ExactSizeIterator<Item = [u8; 8]> + use<'b>> {
        let bytes = self.from.bytes().map_err(broken)?;
        if !bytes.len().is_multiple_of(8) {
            return Err(MarshalError::new_err("numbers that the guest sent are cut off"));
        }
        self.add(cost::LIST + bytes.len() / 8 * (cost::PLAIN + cost::NUMBER))?;
        Ok(bytes.chunks_exact(8).map(|word| {
            let mut own = [0; 8];
            own.copy_from_slice(word);
            own
        }))
    }

    fn text(&mut self) -> PyResult<&'b str> {
        let text = self.from.str().map_err(broken)?;
        self.add(text.len())?;
        Ok(text)
    }

    fn read_tagged<'py>(&mut self, py: Python<'py>, depth: usize) -> PyResult<Bound<'py, PyAny>> {
        let tag = self.from.tag().map_err(broken)?;
        if !matches!(tag, TUPLE | INTEGERS | FLOATS) {
            self.add(cost::OBJECT)?;
        }
        match tag {
            DATE => {
                let seconds = self.from.f64().map_err(broken)?;
                let utc = UTC.get(py)?.getattr("utc")?;
                match DATETIME.get(py)?.call_method1("fromtimestamp", (seconds, utc)) {
                    Ok(date) => Ok(date),
                    Err(_) if seconds.is_nan() => OPAQUE.get(py)?.call1(("date", "Invalid Date")),
                    Err(_) => {
                        let text = format!("{seconds} seconds from 1970-01-01T00:00:00Z");
                        OPAQUE.get(py)?.call1(("date", text))
                    }
                }
            }
            TIMESTAMP => parsed(&DATETIME, "fromisoformat", "date", self.text()?, py),
            DAY => parsed(&DAY_TYPE, "fromisoformat", "date", self.text()?, py),
            DECIMAL => parsed(&DECIMAL_TYPE, "__call__", "decimal", self.text()?, py),
            UUID => {
                let bytes = PyBytes::new(py, self.from.bytes().map_err(broken)?);
                let named = PyDict::new(py);
                named.set_item("bytes", bytes)?;
                UUID_TYPE.get(py)?.call((), Some(&named))
            }
            TUPLE => Ok(self.read_list(py, depth)?.to_tuple().into_any()),
            COMPLEX => {
                self.from.array().map_err(broken)?;
                let real = self.from.f64().map_err(broken)?;
                let imaginary = self.from.f64().map_err(broken)?;
                Ok(PyComplex::from_doubles(py, real, imaginary).into_any())
            }
            INTEGERS => Ok(PyList::new(py, self.words()?.map(i64::from_le_bytes))?.into_any()),
            FLOATS => Ok(PyList::new(py, self.words()?.map(f64::from_le_bytes))?.into_any()),
            SET => {
                let members = self.read_list(py, depth)?;
                self.add(cost::TABLE + members.len() * cost::MEMBER)?;
                let (set, mut hashes) = (PySet::empty(py)?, KeyHashes::default());
                for member in members.iter() {
                    let before = set.len();
                    let Some(key) = hashable(member)? else { return Ok(members.into_any()) };
                    set.add(&key)?;
                    if set.len() == before {
                        return Ok(members.into_any());
                    }
                    hashes.add(&key)?;
                }
                Ok(set.into_any())
            }
            tag @ (POSITIVE | NEGATIVE) => {
                let bytes = self.from.bytes().map_err(broken)?;
                self.add(cost::TEXT + bytes.len().saturating_mul(3))?;
                let bytes = PyBytes::new(py, bytes);
                let number = py.get_type::<PyInt>().call_method1("from_bytes", (bytes, "big"))?;
                if tag == POSITIVE { Ok(number) } else { number.call_method0("__invert__") }
            }
            NAMED => {
                self.from.array().map_err(broken)?;
                let (kind, shown) = (self.text()?, self.text()?);
                OPAQUE.get(py)?.call1((kind, shown))
            }
            other => Err(MarshalError::new_err(format!(
                "the guest's value has parts of an unknown kind (tag {})",
                other.as_u64()
            ))),
        }
    }
}

/// A value that Python reads from text; an `Opaque` of this kind if it cannot.
fn parsed<'py>(
    of: &PythonType,
    method: &str,
    kind: &str,
    text: &str,
    py: Python<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let made = of.get(py)?.call_method1(method, (text,));
    made.or_else(|_| OPAQUE.get(py)?.call1((kind, text)))
}

/// The hashes of the keys of one dictionary or set, but for those of text, which Python keys with a secret.
///
/// Python compares a new key with every earlier one of the same hash. A guest can choose numbers and tuples of equal
/// hashes, and 16 MiB of them would take hours.
#[derive(Default)]
struct KeyHashes(HashMap<isize, u32>);

impl KeyHashes {
    /// Adds a key that equals none before.
    fn add(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        if key.is_instance_of::<PyString>() || key.is_instance_of::<PyBytes>() {
            return Ok(());
        }
        let equal = self.0.entry(key.hash()?).or_default();
        *equal += 1;
        if *equal > MAX_EQUAL_HASHES {
            return Err(MarshalError::new_err(format!(
                "more than {MAX_EQUAL_HASHES} keys or members of the guest value have the same hash in Python"
            )));
        }
        Ok(())
    }
}

/// The key that stands for a value in a dictionary or set: lists become tuples and sets frozen sets, at any depth.
/// `None` for a value that has no such key: one with a dictionary in it.
fn hashable(key: Bound<'_, PyAny>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let py = key.py();
    if key.is_instance_of::<PyDict>() {
        return Ok(None);
    }
    let parts: Vec<_> = if let Ok(list) = key.cast::<PyList>() {
        list.iter().collect()
    } else if let Ok(tuple) = key.cast::<PyTuple>() {
        tuple.iter().collect()
    } else if let Ok(set) = key.cast::<PySet>() {
        return Ok(Some(PyFrozenSet::new(py, set.iter())?.into_any()));
    } else {
        return Ok(Some(key));
    };
    let parts = parts.into_iter().map(hashable).collect::<PyResult<Option<Vec<_>>>>()?;
    parts.map(|parts| Ok(PyTuple::new(py, parts)?.into_any())).transpose()
}

fn length(given: Option<u64>) -> PyResult<u64> {
    given.ok_or_else(|| MarshalError::new_err("a length is missing in the guest's value"))
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
        // As text, which shows whether a time has a zone: one without is the guest's local time, not the host's.
        let tag = if value.is_instance(DATETIME.get(py)?)? { TIMESTAMP } else { DAY };
        let text: String = value.call_method0("isoformat")?.extract()?;
        out.tag(tag).map_err(infallible)?.str(&text).map_err(infallible)?;
        return Ok(());
    }
    if value.is_instance_of::<PySet>() || value.is_instance_of::<PyFrozenSet>() {
        out.tag(SET).map_err(infallible)?.array(value.len()? as u64).map_err(infallible)?;
        for part in value.try_iter()? {
            write(&part?, out, depth + 1)?;
        }
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
    // Objects with a method that returns a plain form: data classes, models, arrays, and mappings of any kind.
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
    let mut values = Values::new(Decoder::new(bytes), true, DEFAULT_RESULT);
    let value = values.read(py)?;
    if values.position() != bytes.len() {
        return Err(PyTypeError::new_err("there is more than one value in the bytes"));
    }
    Ok(value)
}
