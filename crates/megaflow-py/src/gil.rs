//! The one way in which this crate lets go of the GIL.

use pyo3::prelude::*;

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
