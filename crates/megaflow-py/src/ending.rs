//! The end of Python, while threads of Rust call it.
//!
//! Sources that are Python objects (remote files, Arrow streams, splitters of sentences) are called by threads of Rust. Up to
//! version 3.13 CPython ends a thread that asks for the GIL during the interpreter's end by `pthread_exit`. glibc unwinds its
//! stack for that, and the frames of C++ and Rust on it abort the process. Nor may anything wait for such a thread: it does
//! not come back. Hence three steps, none of which costs anything where no source is a Python object:
//!
//! 1. Every such call passes [`call`], which counts the threads of Rust that have called Python and still run.
//! 2. Python's `atexit`, while the interpreter is whole, calls [`end_calls`]: streams are stopped, new calls are refused, and
//!    the threads get [`PATIENCE`] to end.
//! 3. A thread that is still in a call by then may stay there, and rests for ever once it comes back; [`Parking`] catches it
//!    where CPython would end it, as version 3.14 does.
//!
//! The interpreter's end is one for the process, and so is this module's state. It is locked with the GIL held alone, so that
//! no fork finds it locked.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use megaflow_stream::StreamSource;
use pyo3::prelude::*;

use crate::errors::error;
use crate::parking::{Parking, is_thread_of_python};

/// How long threads may take to end.
const PATIENCE: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The interpreter runs.
const RUNS: u8 = 0;
/// New calls are refused; threads that end may still let go of Python's objects.
const ENDS: u8 = 1;
/// Nothing of Rust may touch Python, but for the thread that ends it.
const ENDED: u8 = 2;

static PHASE: AtomicU8 = AtomicU8::new(RUNS);
/// Threads of Rust that have called Python and run.
static CALLERS: AtomicUsize = AtomicUsize::new(0);
/// The process that the callers and streams belong to: a forked child has none of them. 0 before the first.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static STREAMS: Mutex<Vec<Weak<StreamSource>>> = Mutex::new(Vec::new());
/// The thread that ends Python.
static ENDER: OnceLock<ThreadId> = OnceLock::new();

/// What is said where Python cannot be called any more.
pub(crate) const REFUSED: &str = "Python is ending, so that its objects can be read no more";

thread_local! {
    static CALLER: RefCell<Option<Caller>> = const { RefCell::new(None) };
}

/// A thread of Rust that has called Python, until it ends.
struct Caller {
    _parking: Parking,
}

impl Caller {
    fn new() -> Self {
        CALLERS.fetch_add(1, Ordering::SeqCst);
        Self { _parking: Parking::new() }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        CALLERS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Sees to it that the end of Python waits for the threads that will call it.
pub(crate) fn expect_calls(py: Python<'_>) -> PyResult<()> {
    if has_begun() {
        return Err(error("MegaflowError", REFUSED.to_owned()));
    }
    let process = std::process::id();
    match PROCESS.swap(process, Ordering::SeqCst) {
        0 => {
            let handler = wrap_pyfunction!(end_calls, py)?;
            py.import("atexit")?.call_method1("register", (handler,)).map(drop)
        }
        known if known == process => Ok(()),
        _parent => {
            CALLERS.store(0, Ordering::SeqCst);
            streams().clear();
            Ok(())
        }
    }
}

/// Stops a stream when Python ends.
pub(crate) fn stop_at_end(_: Python<'_>, stream: &Arc<StreamSource>) {
    let mut streams = streams();
    streams.retain(|known| known.strong_count() > 0);
    streams.push(Arc::downgrade(stream));
}

fn streams() -> MutexGuard<'static, Vec<Weak<StreamSource>>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether Python has begun to end.
pub(crate) fn has_begun() -> bool {
    PHASE.load(Ordering::SeqCst) != RUNS
}

/// Runs work that takes the GIL; `None`, without running it, once Python ends.
pub(crate) fn call<T>(work: impl FnOnce() -> T) -> Option<T> {
    guarded(work, RUNS)
}

/// Lets go of an object of Python's, or leaves it where it is once Python has ended.
pub(crate) fn release<T>(object: T) {
    let mut object = Some(object);
    if guarded(|| drop(object.take()), ENDS).is_none() {
        std::mem::forget(object);
    }
}

fn guarded<T>(work: impl FnOnce() -> T, last_phase: u8) -> Option<T> {
    // A thread of Python's lives on behind the call, and may be any program's: it is caught during the call only.
    let during_call = is_thread_of_python().then(Parking::new);
    if during_call.is_none() {
        CALLER.with_borrow_mut(|caller| {
            caller.get_or_insert_with(Caller::new);
        });
    }
    rest_if_ended();
    if PHASE.load(Ordering::SeqCst) > last_phase {
        return None;
    }
    let done = work();
    rest_if_ended();
    Some(done)
}

fn rest_if_ended() {
    if PHASE.load(Ordering::SeqCst) == ENDED && must_rest() {
        rest();
    }
}

/// Whether Python has begun to end, and this thread is not the one that ends it: what it finds out is nobody's news.
pub(crate) fn must_rest() -> bool {
    has_begun() && ENDER.get() != Some(&thread::current().id())
}

/// Stays here until the process ends. Not to be called with the GIL.
pub(crate) fn rest() -> ! {
    loop {
        thread::park();
    }
}

/// Stops all that calls Python, and waits a while for its threads. Python's `atexit` calls it.
#[pyfunction]
fn end_calls(py: Python<'_>) {
    if PROCESS.load(Ordering::SeqCst) != std::process::id() || ENDER.set(thread::current().id()).is_err() {
        return;
    }
    PHASE.store(ENDS, Ordering::SeqCst);
    let open: Vec<Arc<StreamSource>> = streams().iter().filter_map(Weak::upgrade).collect();
    py.detach(|| {
        open.iter().for_each(|stream| stream.stop());
        let begin = Instant::now();
        while CALLERS.load(Ordering::SeqCst) > 0 && begin.elapsed() < PATIENCE {
            thread::sleep(LOOK_EVERY);
        }
    });
    PHASE.store(ENDED, Ordering::SeqCst);
    std::mem::forget(open); // the end of the last one's would wait for threads that rest
}
