//! Arrays that numpy reads without a copy, and that keep alive what they show.
//!
//! numpy learns of the memory through `__array_interface__`. It holds the object for as long as any array made of it
//! lives, and the object holds the owner of the memory. Data may be unaligned, and no unsafe code is needed here.

use std::any::Any;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Read-only memory of an owner that never changes or moves it.
#[pyclass(frozen, module = "megaflow._core")]
pub(crate) struct ArrayView {
    _owner: Arc<dyn Any + Send + Sync>,
    address: usize,
    shape: Vec<usize>,
    typestr: &'static str,
}

impl ArrayView {
    /// Shows the slice that `select` takes of `owner`, as `shape` items of numpy type `typestr`.
    ///
    /// # Panics
    /// If the slice does not hold exactly as many bytes as shape and type say: a bug of the caller.
    pub(crate) fn new<O, T>(
        owner: Arc<O>,
        typestr: &'static str,
        shape: &[usize],
        select: impl FnOnce(&O) -> &[T],
    ) -> Self
    where
        O: Any + Send + Sync,
    {
        let items = select(&owner);
        let item_bytes = usize::from(typestr.as_bytes()[2] - b'0');
        assert_eq!(std::mem::size_of_val(items), shape.iter().product::<usize>() * item_bytes, "shape of a view");
        let address = items.as_ptr().expose_provenance();
        Self { _owner: owner, address, shape: shape.to_vec(), typestr }
    }
}

#[pymethods]
impl ArrayView {
    /// numpy's array interface, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        array_interface(py, self.typestr, &self.shape, self.address, true)
    }
}

/// The dictionary through which numpy finds memory that lies in C order.
pub(crate) fn array_interface<'py>(
    py: Python<'py>,
    typestr: &str,
    shape: &[usize],
    address: usize,
    is_readonly: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let interface = PyDict::new(py);
    interface.set_item("version", 3)?;
    interface.set_item("typestr", typestr)?;
    interface.set_item("shape", PyTuple::new(py, shape)?)?;
    interface.set_item("data", (address, is_readonly))?;
    Ok(interface)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ArrayView>()
}
