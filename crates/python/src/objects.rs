//! Values of guests as Python objects.
//!
//! Promises: the objects made of one value keep to a budget, which is charged before they are made.
//! Values that only have a name (functions, promises), and dates that Python cannot hold, become
//! `afresh.Opaque`. A map or set that would lose an entry as a dictionary or set becomes a list.
//! May break it: an interpreter whose objects are larger than [`PythonBuilder::COSTS`] says.

use std::collections::HashMap;

use afresh_budget::Budget;
use afresh_interpreter::objects::{
    BuiltSet, Costs, DecodeError, ObjectBuilder, ObjectReader, Pair, Scalar,
};
use minicbor::Decoder;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PySet, PyString,
    PyTuple,
};

use crate::error::MarshalError;
use crate::exit;
use crate::python_type::{
    DATETIME, DAY_TYPE, DECIMAL_TYPE, OPAQUE, PythonType, UNDEFINED, UTC, UUID_TYPE,
};

/// Default limit, in bytes, of the Python objects made of one value.
pub(crate) const DEFAULT_RESULT: usize = 128 << 20;
/// Maximum keys of one dictionary or set with the same hash.
const MAX_EQUAL_HASHES: u32 = 64;
/// Maximum bytes of an integer in a value whose keys may be decimals as well.
const MAX_MIXED_INTEGER: usize = 64;

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

/// Reads the values that a guest sent.
pub(crate) type Values<'py, 'b> = ObjectReader<'b, PythonBuilder<'py>>;

/// A reader of `from` that makes at most `limit` bytes of objects. With `exact`, `undefined` is the
/// package's `UNDEFINED`; otherwise it is `None`.
pub(crate) fn reader<'py, 'b>(
    py: Python<'py>,
    from: Decoder<'b>,
    exact: bool,
    limit: usize,
) -> Values<'py, 'b> {
    let charge = Budget::new("result", limit).empty();
    let builder = PythonBuilder { py, exact, has_decimal: false, has_long_integer: false };
    ObjectReader::new(from, builder, charge)
}

/// Makes Python's objects.
pub(crate) struct PythonBuilder<'py> {
    py: Python<'py>,
    exact: bool,
    has_decimal: bool,
    /// An integer of more than [`MAX_MIXED_INTEGER`] bytes.
    has_long_integer: bool,
}

/// A dictionary under construction.
pub(crate) struct PythonMap<'py> {
    dict: Bound<'py, PyDict>,
    hashes: KeyHashes,
    /// The keys that are not in the dictionary as they were given, each with the number of its
    /// entry.
    converted: Vec<(usize, Bound<'py, PyAny>)>,
}

impl<'py> PythonBuilder<'py> {
    fn opaque(&self, kind: &str, text: &str) -> PyResult<Bound<'py, PyAny>> {
        OPAQUE.get(self.py)?.call1((kind, text))
    }

    fn date(&self, seconds: f64) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        let utc = UTC.get(py)?.getattr("utc")?;
        match DATETIME.get(py)?.call_method1("fromtimestamp", (seconds, utc)) {
            Ok(date) => Ok(date),
            Err(_) if seconds.is_nan() => self.opaque("date", "Invalid Date"),
            Err(_) => self.opaque("date", &format!("{seconds} seconds from 1970-01-01T00:00:00Z")),
        }
    }

    /// A value that Python reads from text; an `Opaque` of this kind if it cannot.
    fn parsed(
        &self,
        of: &PythonType,
        method: &str,
        kind: &str,
        text: &str,
    ) -> PyResult<Bound<'py, PyAny>> {
        let made = of.get(self.py)?.call_method1(method, (text,));
        made.or_else(|_| self.opaque(kind, text))
    }

    /// Refuses a key that Python may compare with another one for hours: it makes a decimal of an
    /// integer first, in the square of its length. Tuples and sets may contain both.
    fn check_comparison(&self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        if !(self.has_decimal && self.has_long_integer) || is_string(key) {
            return Ok(());
        }
        Err(MarshalError::new_err(format!(
            "the guest value has decimals, integers of more than {MAX_MIXED_INTEGER} bytes, and \
             keys or members that are neither text nor bytes"
        )))
    }

    fn integer(&mut self, magnitude: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        self.has_long_integer |= magnitude.len() > MAX_MIXED_INTEGER;
        let bytes = PyBytes::new(self.py, magnitude);
        self.py.get_type::<PyInt>().call_method1("from_bytes", (bytes, "big"))
    }
}

impl<'py> ObjectBuilder for PythonBuilder<'py> {
    type Object = Bound<'py, PyAny>;
    type List = Bound<'py, PyList>;
    type Map = PythonMap<'py>;
    type Error = PyErr;

    /// As CPython 3.10 to 3.14 allocates them, with the slot that refers to each.
    const COSTS: Costs = Costs {
        slot: 8,
        number: 40,
        text: 64,
        // Up to four bytes a character, and three of UTF-8 may become four.
        wide: 4,
        list: 88,
        map: 88,
        table: 160,
        // With its hash while the value is read.
        entry: 144,
        member: 104,
        pair: 88,
        object: 160,
    };

    fn refuse(&self, error: DecodeError) -> PyErr {
        MarshalError::new_err(match error {
            DecodeError::TooLarge { limit } => {
                format!("the value takes more memory than `result_limit` allows, {limit} bytes")
            }
            error => error.to_string(),
        })
    }

    /// Lets other threads of Python run.
    fn pause(&mut self) {
        self.py.detach(exit::park_if_exiting);
    }

    fn scalar(&mut self, scalar: Scalar<'_>) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match scalar {
            Scalar::Undefined if self.exact => UNDEFINED.get(py)?.clone(),
            Scalar::Undefined | Scalar::Null => py.None().into_bound(py),
            Scalar::Bool(truth) => PyBool::new(py, truth).to_owned().into_any(),
            Scalar::Integer(number) => match i64::try_from(number) {
                Ok(number) => number.into_pyobject(py)?.into_any(),
                Err(_) => number.into_pyobject(py)?.into_any(),
            },
            Scalar::Float(number) => PyFloat::new(py, number).into_any(),
            Scalar::Text(text) => PyString::new(py, text).into_any(),
            Scalar::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
            Scalar::Date(seconds) => self.date(seconds)?,
            Scalar::Timestamp(text) => self.parsed(&DATETIME, "fromisoformat", "date", text)?,
            Scalar::Day(text) => self.parsed(&DAY_TYPE, "fromisoformat", "date", text)?,
            Scalar::Decimal(text) => {
                self.has_decimal = true;
                self.parsed(&DECIMAL_TYPE, "__call__", "decimal", text)?
            }
            Scalar::Uuid(bytes) => {
                let named = PyDict::new(py);
                named.set_item("bytes", PyBytes::new(py, &bytes))?;
                UUID_TYPE.get(py)?.call((), Some(&named))?
            }
            Scalar::Complex(real, imaginary) => {
                PyComplex::from_doubles(py, real, imaginary).into_any()
            }
            Scalar::Positive(magnitude) => self.integer(magnitude)?,
            Scalar::Negative(magnitude) => self.integer(magnitude)?.call_method0("__invert__")?,
            Scalar::Integers(words) => {
                PyList::new(py, words.iter().map(|word| i64::from_le_bytes(*word)))?.into_any()
            }
            Scalar::Floats(words) => {
                PyList::new(py, words.iter().map(|word| f64::from_le_bytes(*word)))?.into_any()
            }
            Scalar::Opaque { kind, text } => self.opaque(kind, text)?,
            _ => return Err(self.refuse(DecodeError::NotValue)),
        })
    }

    fn begin_list(&mut self) -> PyResult<Bound<'py, PyList>> {
        Ok(PyList::empty(self.py))
    }

    fn push(&mut self, list: &mut Bound<'py, PyList>, item: Bound<'py, PyAny>) -> PyResult<()> {
        list.append(item)
    }

    fn list(&mut self, list: Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        Ok(list.into_any())
    }

    fn tuple(&mut self, list: Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        Ok(list.to_tuple().into_any())
    }

    fn set(&mut self, members: Bound<'py, PyList>) -> PyResult<BuiltSet<Bound<'py, PyAny>>> {
        let (set, mut hashes) = (PySet::empty(self.py)?, KeyHashes::default());
        for (before, member) in members.iter().enumerate() {
            let key = hashable(member)?;
            self.check_comparison(&key)?;
            set.add(&key)?;
            if set.len() == before {
                return Ok(BuiltSet::List(members.into_any()));
            }
            hashes.add(&key)?;
        }
        Ok(BuiltSet::Set(set.into_any()))
    }

    fn begin_map(&mut self) -> PyResult<PythonMap<'py>> {
        let dict = PyDict::new(self.py);
        Ok(PythonMap { dict, hashes: KeyHashes::default(), converted: Vec::new() })
    }

    fn insert(
        &mut self,
        map: &mut PythonMap<'py>,
        key: Bound<'py, PyAny>,
        value: Bound<'py, PyAny>,
    ) -> PyResult<Option<Pair<Bound<'py, PyAny>>>> {
        let own = hashable(key.clone())?;
        self.check_comparison(&own)?;
        if map.dict.contains(&own)? {
            return Ok(Some((key, value)));
        }
        map.hashes.add(&own)?;
        if !own.is(&key) {
            map.converted.push((map.dict.len(), key));
        }
        map.dict.set_item(own, value)?;
        Ok(None)
    }

    fn map(&mut self, map: PythonMap<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(map.dict.into_any())
    }

    fn pairs(&mut self, map: PythonMap<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(self.py);
        let mut converted = map.converted.into_iter().peekable();
        for (number, (key, value)) in map.dict.iter().enumerate() {
            let given = converted.next_if(|(at, _)| *at == number).map_or(key, |(_, given)| given);
            list.append((given, value))?;
        }
        Ok(list)
    }

    fn pair(
        &mut self,
        key: Bound<'py, PyAny>,
        value: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Ok(PyTuple::new(self.py, [key, value])?.into_any())
    }
}

/// The hashes of the keys of one dictionary or set, but for those of text, which Python keys with a
/// secret.
///
/// Python compares a new key with every earlier one of the same hash. A guest can choose numbers
/// and tuples of equal hashes, and 16 MiB of them would take hours.
#[derive(Default)]
struct KeyHashes(HashMap<isize, u32>);

impl KeyHashes {
    /// Adds a key that equals none before.
    fn add(&mut self, key: &Bound<'_, PyAny>) -> PyResult<()> {
        if is_string(key) {
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

/// Whether a key is text or bytes.
fn is_string(key: &Bound<'_, PyAny>) -> bool {
    key.is_instance_of::<PyString>() || key.is_instance_of::<PyBytes>()
}

/// The key that stands for a value in a dictionary or set: lists become tuples and sets frozen
/// sets, at any depth. The value has no dictionary in it.
fn hashable(key: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    let py = key.py();
    let parts: Vec<_> = if let Ok(list) = key.cast::<PyList>() {
        list.iter().collect()
    } else if let Ok(tuple) = key.cast::<PyTuple>() {
        tuple.iter().collect()
    } else if let Ok(set) = key.cast::<PySet>() {
        return Ok(PyFrozenSet::new(py, set.iter())?.into_any());
    } else {
        return Ok(key);
    };
    let parts = parts.into_iter().map(hashable).collect::<PyResult<Vec<_>>>()?;
    Ok(PyTuple::new(py, parts)?.into_any())
}
