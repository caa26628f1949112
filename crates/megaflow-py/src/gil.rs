//! The one way in which this crate lets go of the GIL.

use pyo3::prelude::*;

use crate::ending;
use crate::errors::IntoPyErr;

/// Runs work without the GIL.
pub(crate) trait WithoutGil {
    /// Releases the GIL, runs `work`, takes the GIL back, raises a pending Ctrl-C, and maps the error.
    fn without_gil<T, E>(self, work: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
    where
        T: Send,
        E: IntoPyErr + Send;
}

impl WithoutGil for Python<'_> {
    fn without_gil<T, E>(self, work: impl FnOnce() -> Result<T, E> + Send) -> PyResult<T>
    where
        T: Send,
        E: IntoPyErr + Send,
    {
        let result = self.detach(work);
        self.check_signals()?;
        result.map_err(IntoPyErr::into_py_err)
    }
}

/// Something whose end may wait for threads that need the GIL: it is dropped without it.
pub(crate) struct DropDetached<T: Send>(Option<T>);

impl<T: Send> DropDetached<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self(Some(inner))
    }

    pub(crate) fn get(&self) -> &T {
        self.0.as_ref().expect("taken only when it is dropped")
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("taken only when it is dropped")
    }
}

impl<T: Send> Drop for DropDetached<T> {
    fn drop(&mut self) {
        let mut inner = self.0.take();
        // While the interpreter ends, threads may rest where they called it, and the process takes them with it.
        if ending::has_begun() {
            return std::mem::forget(inner);
        }
        if Python::try_attach(|py| py.detach(|| drop(inner.take()))).is_none() {
            std::mem::forget(inner);
        }
    }
}
