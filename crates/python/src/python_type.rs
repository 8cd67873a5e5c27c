//! Types and objects of Python's modules. Each is looked up once.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// A Python object that is looked up once.
pub(crate) struct PythonType {
    cell: PyOnceLock<Py<PyAny>>,
    module: &'static str,
    name: &'static str,
}

impl PythonType {
    const fn new(module: &'static str, name: &'static str) -> Self {
        Self { cell: PyOnceLock::new(), module, name }
    }

    pub(crate) fn get<'py>(&self, py: Python<'py>) -> PyResult<&Bound<'py, PyAny>> {
        let found = || Ok::<_, PyErr>(py.import(self.module)?.getattr(self.name)?.unbind());
        Ok(self.cell.get_or_try_init(py, found)?.bind(py))
    }
}

pub(crate) static OPAQUE: PythonType = PythonType::new("afresh._values", "Opaque");
pub(crate) static UNDEFINED: PythonType = PythonType::new("afresh._values", "UNDEFINED");
pub(crate) static DATETIME: PythonType = PythonType::new("datetime", "datetime");
pub(crate) static DAY_TYPE: PythonType = PythonType::new("datetime", "date");
pub(crate) static UTC: PythonType = PythonType::new("datetime", "timezone");
pub(crate) static DECIMAL_TYPE: PythonType = PythonType::new("decimal", "Decimal");
pub(crate) static UUID_TYPE: PythonType = PythonType::new("uuid", "UUID");
