//! Reads of mapped files that end in an error where a file was cut short under its map.
//!
//! The system answers a read of a page that the file has no more (or that cannot be fetched) with the signal SIGBUS, which
//! ends the process. While a thread is inside [`watched`], our handler puts a page of zeros in that place and notes it, so
//! that the read ends and its caller learns that what it read is worthless. Everywhere else the signal goes to whoever
//! handled it before.
#![expect(unsafe_code, reason = "signals and maps are C")]

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// How many calls of `watched` this thread is inside of.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Pages that this thread found missing.
    static MISSING: Cell<u32> = const { Cell::new(0) };
}

/// Pages that any thread found missing, and the last of them.
static FAULTS: AtomicUsize = AtomicUsize::new(0);
static LAST_FAULT: AtomicUsize = AtomicUsize::new(0);

/// What became of a watched read.
pub(crate) enum Seen {
    /// Every page was there.
    Whole,
    /// This thread, or another one meanwhile, met a page that was missing. If another one: its address.
    Missing(Option<usize>),
}

/// Runs `read`, and tells whether pages were missing.
#[inline]
pub(crate) fn watched<T>(read: impl FnOnce() -> T) -> (T, Seen) {
    struct Inside;
    impl Drop for Inside {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1); // also when `read` panics
        }
    }
    let (faults, missing) = (FAULTS.load(Ordering::Acquire), MISSING.get());
    DEPTH.set(DEPTH.get() + 1);
    let inside = Inside;
    let value = read();
    drop(inside);
    let seen = if MISSING.get() != missing {
        Seen::Missing(None)
    } else if FAULTS.load(Ordering::Acquire) != faults {
        Seen::Missing(Some(LAST_FAULT.load(Ordering::Acquire)))
    } else {
        Seen::Whole
    };
    (value, seen)
}

#[cfg(unix)]
pub(crate) use handler::install;

/// Nothing to handle.
#[cfg(not(unix))]
pub(crate) fn install() {}

#[cfg(unix)]
mod handler {
    use std::sync::OnceLock;

    use super::{DEPTH, FAULTS, LAST_FAULT, MISSING, MaybeUninit, Once, Ordering};

    static INSTALLED: Once = Once::new();
    static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
    static PAGE: OnceLock<usize> = OnceLock::new();

    /// Puts the handler in place, once a process; forked children have it too.
    pub(crate) fn install() {
        INSTALLED.call_once(|| {
            // SAFETY: `sysconf` takes any number.
            let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            let _ = PAGE.set(usize::try_from(page).ok().filter(|page| page.is_power_of_two()).unwrap_or(4096));
            let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
            // SAFETY: asks for the handler in place; the pointer leads to room for it, and zeros are a valid value.
            let previous = unsafe {
                libc::sigaction(libc::SIGBUS, std::ptr::null(), previous.as_mut_ptr());
                previous.assume_init()
            };
            // Known before ours can be called.
            let _ = PREVIOUS.set(previous);
            // SAFETY: the structure is filled as sigaction(2) asks: a handler of three arguments goes with SA_SIGINFO.
            unsafe {
                let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
                action.sa_sigaction = on_bus_error as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                libc::sigemptyset(&raw mut action.sa_mask);
                libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
            }
        });
    }

    /// Calls only what may be called in a signal handler: atomics, thread-local cells without destructors, `mmap`.
    extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: with SA_SIGINFO the system passes a valid `info`, whose address is set for SIGBUS.
        let address = unsafe { (*info).si_addr() } as usize;
        let page = PAGE.get().copied().unwrap_or(4096);
        if address != 0 && DEPTH.try_with(|depth| depth.get() > 0).unwrap_or(false) {
            // Told before the zeros can be seen by another thread.
            LAST_FAULT.store(address, Ordering::Release);
            FAULTS.fetch_add(1, Ordering::AcqRel);
            let place = (address & !(page - 1)) as *mut libc::c_void;
            // SAFETY: a watched thread touches only its own memory and mapped files, and only the latter raise SIGBUS: the
            // page belongs to a map of ours, which nobody else looks at but to read it.
            let mapped = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                libc::mmap(place, page, libc::PROT_READ, flags, -1, 0)
            };
            if mapped == place {
                MISSING.set(MISSING.get() + 1);
                return;
            }
        }
        pass_on(signal, info, context);
    }

    fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let Some(previous) = PREVIOUS.get() else { return };
        // SAFETY: `previous` is what sigaction(2) gave: its handler takes the arguments that its flags say. A default action
        // is put back, and takes effect when the faulting instruction runs again.
        unsafe {
            match previous.sa_sigaction {
                libc::SIG_DFL | libc::SIG_IGN => {
                    let mut action = *previous;
                    action.sa_sigaction = libc::SIG_DFL;
                    libc::sigaction(signal, &raw const action, std::ptr::null_mut());
                }
                handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
                    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(handler);
                    handler(signal, info, context);
                }
                handler => {
                    let handler: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
                    handler(signal);
                }
            }
        }
    }
}
