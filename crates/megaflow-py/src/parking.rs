//! Threads that CPython would end, kept where they are.
#![expect(unsafe_code, reason = "the C libraries are asked about the current thread, and told what to do at its end")]

use pyo3::ffi;

/// Whether the interpreter knows this thread: it is Python's own, or has attached to it.
pub(crate) fn is_thread_of_python() -> bool {
    // SAFETY: it reads a value of the current thread, and may be called with and without the GIL.
    unsafe { !ffi::PyGILState_GetThisThreadState().is_null() }
}

/// While it lives, the `pthread_exit` of its thread ends in a rest for ever, before any frame of the stack is left.
///
/// Only glibc unwinds a stack for that; elsewhere a thread just ends, and nothing is done here.
pub(crate) struct Parking {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    _entry: glibc::Entry,
    /// It belongs to one thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Parking {
    pub(crate) fn new() -> Self {
        Self {
            #[cfg(all(target_os = "linux", target_env = "gnu"))]
            _entry: glibc::Entry::new(),
            _thread: std::marker::PhantomData,
        }
    }
}

/// Runs what Python is to be told by a thread of its own, which may be a daemon.
pub(crate) fn parked<T>(tell: impl FnOnce() -> T) -> T {
    let _parking = Parking::new();
    tell()
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    use std::ffi::{c_int, c_void};
    use std::ptr;

    /// `struct _pthread_cleanup_buffer` of <pthread.h>.
    #[repr(C)]
    struct Buffer {
        routine: Option<unsafe extern "C" fn(*mut c_void)>,
        argument: *mut c_void,
        cancel_type: c_int,
        previous: *mut Buffer,
    }

    type Push = unsafe extern "C" fn(*mut Buffer, unsafe extern "C" fn(*mut c_void), *mut c_void);
    type Pop = unsafe extern "C" fn(*mut Buffer, c_int);

    /// A cleanup routine of this thread. glibc runs those whose buffer lies on a part of the stack that is being left, and takes
    /// one that lies elsewhere for left at the first frame.
    pub(super) struct Entry(Option<(*mut Buffer, Pop)>);

    impl Entry {
        pub(super) fn new() -> Self {
            // SAFETY: names end in a zero. Where glibc has the functions they have these types, since version 2.2.5.
            let functions = unsafe {
                let push = libc::dlsym(libc::RTLD_DEFAULT, c"_pthread_cleanup_push".as_ptr());
                let pop = libc::dlsym(libc::RTLD_DEFAULT, c"_pthread_cleanup_pop".as_ptr());
                std::mem::transmute::<(*mut c_void, *mut c_void), (Option<Push>, Option<Pop>)>((push, pop))
            };
            let (Some(push), Some(pop)) = functions else { return Self(None) };
            let empty = Buffer { routine: None, argument: ptr::null_mut(), cancel_type: 0, previous: ptr::null_mut() };
            let buffer = Box::into_raw(Box::new(empty));
            // SAFETY: the buffer lives until it is popped.
            unsafe { push(buffer, rest_for_ever, ptr::null_mut()) };
            Self(Some((buffer, pop)))
        }
    }

    impl Drop for Entry {
        fn drop(&mut self) {
            let Some((buffer, pop)) = self.0.take() else { return };
            // SAFETY: `Parking` stays in its thread, where the buffer was pushed, and nobody else knows of it. Entries of one
            // thread end in reverse order: the first lasts until its end, the others during a call.
            unsafe {
                pop(buffer, 0);
                drop(Box::from_raw(buffer));
            }
        }
    }

    unsafe extern "C" fn rest_for_ever(_: *mut c_void) {
        crate::ending::rest()
    }
}
